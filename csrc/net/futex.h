// Sleeping on a word that another process changes, so that no wake-up is lost and none is needed
// for longer than a deadline.
//
//   waits  S: store 1 -> seen = `wake` -> FULL fence -> ready? -> sleep while `wake` == seen
//   rouses    what S waits for (release) -> FULL fence -> `waits`? -> `wake` + 1 -> futex-wake
// One of the two sees the other's store. The word slept on is not the one waited for, so that one
// sleeper can wait for several.
//
// The other side may be hostile, stopped or dead and write anything into these words: the worst is
// that a sleeper sleeps for a slice, then looks whether it should give up.
// Thread rule: one waiter at a time per pair of words; any number that rouse.
#pragma once
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>

namespace kvpool {

inline void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The low half of a word, which is the first: formats are little-endian.
inline void* futex_of(std::atomic<std::uint64_t>& word) { return &word; }

// May return for no reason. Shared between processes.
inline void futex_wait(std::atomic<std::uint64_t>& word, std::uint64_t seen,
                       std::chrono::nanoseconds time_max) {
  constexpr std::int64_t kSecond = 1'000'000'000;
  const std::int64_t left = std::max<std::int64_t>(time_max.count(), 0);
  const timespec time{static_cast<time_t>(left / kSecond), static_cast<long>(left % kSecond)};
  syscall(SYS_futex, futex_of(word), FUTEX_WAIT, static_cast<std::uint32_t>(seen), &time, nullptr,
          0);
}
inline void futex_wake(std::atomic<std::uint64_t>& word) {
  syscall(SYS_futex, futex_of(word), FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

struct Sleeper {
  std::atomic<std::uint64_t>& waits;
  std::atomic<std::uint64_t>& wake;

  // Without looking whether anybody waits.
  void wake_up() const {
    wake.fetch_add(1, std::memory_order_release);
    futex_wake(wake);
  }
  void rouse() const {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (waits.load(std::memory_order_relaxed) != 0) wake_up();
  }
};

enum class Waited : std::uint8_t { ready, given_up, late };

struct WaitLimits {
  std::chrono::steady_clock::time_point deadline;
  // Awake, before the first sleep: a wake-up costs 5 to 50 us on both sides.
  std::chrono::microseconds spin{0};
  std::chrono::milliseconds slice{20};  // between two looks whether to give up
};

// Lets others run now and then: on a busy machine the one that is waited for may have been woken
// onto this very core, and would get it only when the spinning ends. With nobody else to run that
// costs 0.3 us.
template <typename Ready>
bool spin_until(const Ready& ready, std::chrono::microseconds time) {
  constexpr int kLooks = 32;  // between two looks at the clock, which cost as much
  const auto until = std::chrono::steady_clock::now() + time;
  do {
    for (int i = 0; i < kLooks; ++i) {
      if (ready()) return true;
      pause_core();
    }
    sched_yield();
  } while (std::chrono::steady_clock::now() < until);
  return false;
}

// `ready` is asked often and must be cheap; `give_up` once a slice, and at every wake-up.
template <typename Ready, typename GiveUp>
Waited wait_for(const Sleeper& sleeper, const WaitLimits& patience, const Ready& ready,
                const GiveUp& give_up) {
  if (ready()) return Waited::ready;
  if (patience.spin.count() > 0 && spin_until(ready, patience.spin)) return Waited::ready;
  Waited outcome = Waited::late;
  for (;;) {
    sleeper.waits.store(1, std::memory_order_relaxed);
    const std::uint64_t seen = sleeper.wake.load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (ready()) {
      outcome = Waited::ready;
      break;
    }
    if (give_up()) {
      outcome = Waited::given_up;
      break;
    }
    const auto left = patience.deadline - std::chrono::steady_clock::now();
    if (left.count() <= 0) break;
    futex_wait(sleeper.wake, seen, std::min<std::chrono::nanoseconds>(left, patience.slice));
  }
  sleeper.waits.store(0, std::memory_order_relaxed);
  return outcome;
}

}  // namespace kvpool
