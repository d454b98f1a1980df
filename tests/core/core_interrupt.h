// Looks at shared memory from between two instructions of its writer: a signal stops the writer
// wherever it is, and what runs in the handler sees what any reader sees while a writer is asleep.
//
// The body may use nothing that the writer could be in the middle of: no allocation, no lock, no
// doctest. One object at a time, in the thread that writes. Under TSan signals come only where the
// thread enters the runtime.
#pragma once
#include <doctest/doctest.h>
#include <signal.h>
#include <sys/time.h>

#include <cstdint>

namespace kvpool::test {

class Interrupts {
 public:
  using Body = void (*)(void* context);

  Interrupts(Body body, void* context) {
    body_ = body;
    context_ = context;
    active_ = 1;
    struct sigaction action{};
    action.sa_handler = [](int) { run(); };
    action.sa_flags = SA_RESTART;
    REQUIRE(sigaction(SIGALRM, &action, &before_) == 0);
    arm(kGap_us);
  }
  ~Interrupts() {
    active_ = 0;  // first: one that comes now must not arm the next one
    arm(0);
    sigaction(SIGALRM, &before_, nullptr);
  }
  Interrupts(const Interrupts&) = delete;
  Interrupts& operator=(const Interrupts&) = delete;

  static std::uint64_t count() { return count_; }

 private:
  // From the end of one look to the next: the writer gets on in between, by an odd number.
  static constexpr int kGap_us = 23;

  static void arm(int after_us) {
    const itimerval once{{0, 0}, {0, after_us}};
    setitimer(ITIMER_REAL, &once, nullptr);
  }
  static void run() {
    body_(context_);
    count_ = count_ + 1;
    if (active_ != 0) arm(kGap_us + static_cast<int>(count_ % 17));
  }

  inline static Body body_ = nullptr;
  inline static void* context_ = nullptr;
  inline static volatile sig_atomic_t active_ = 0;
  inline static volatile std::uint64_t count_ = 0;
  struct sigaction before_{};
};

}  // namespace kvpool::test
