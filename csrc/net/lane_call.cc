#include "net/lane_call.h"

#include <unistd.h>

#include <algorithm>

#include "block/copy.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;

// About what it takes to be woken.
constexpr auto kSpin = 50us;
constexpr auto kSlice = 20ms;
// A wake-up costs what copying 100 KiB does.
constexpr std::uint64_t kRouseBytes = 256 << 10;
// The node's answer that it was late comes before we are.
constexpr auto kHeadStart = 5ms;

std::uint64_t node_time_us(Deadline deadline) {
  const auto left = deadline - std::chrono::steady_clock::now();
  const auto ahead = std::min<std::chrono::nanoseconds>(left / 8, kHeadStart);
  const auto given = std::chrono::duration_cast<std::chrono::microseconds>(left - ahead).count();
  return static_cast<std::uint64_t>(
      std::clamp<std::int64_t>(given, 0, std::int64_t{kDeadlineMaxMs} * 1000));
}

}  // namespace

LaneCall::~LaneCall() {
  if (!is_answered()) cancel();
  client_.give_lane(&lane_);
}

void LaneCall::ask(const Ask& ask) {
  const std::uint64_t key_bytes = lane_key_bytes(ask.keys.size(), ask.parent != nullptr);
  std::byte* const window = client_.staging() + ask.window_offset;
  std::byte* keys = window;
  if (ask.parent != nullptr) {
    racy_fill(keys, ask.parent, kHashBytes);
    keys += kHashBytes;
  }
  racy_fill(keys, ask.keys.data(), ask.keys.size_bytes());
  count_ = ask.keys.size();
  ring_ = window + key_bytes;
  ring_bytes_ = ask.ring_bytes;

  const auto set = [](std::atomic<std::uint64_t>& word, std::uint64_t value) {
    word.store(value, std::memory_order_relaxed);
  };
  set(shared_.op, static_cast<std::uint64_t>(ask.op));
  set(shared_.space, ask.space);
  set(shared_.count, ask.keys.size());
  set(shared_.skip, ask.skip);
  set(shared_.has_parent, ask.parent != nullptr);
  set(shared_.deadline_us, node_time_us(deadline_));
  set(shared_.window_offset, ask.window_offset);
  set(shared_.window_bytes, key_bytes + ask.ring_bytes);
  set(shared_.staged, 0);
  shared_.asked.store(++lane_.number, std::memory_order_release);
  std::atomic_thread_fence(
      std::memory_order_seq_cst);  // the node: node_polls = 0 -> fence -> asked
  if (shared_.node_polls.load(std::memory_order_relaxed) != 0) return;
  const std::uint64_t once = 1;
  // Full: then it is ringing.
  (void)!write(lane_.bell.get(), &once, sizeof once);
}

void LaneCall::cancel() {
  shared_.cancelled.store(lane_.number, std::memory_order_release);
  node().rouse();  // its fence: what the caller writes from here on comes after
}

template <typename Ready>
bool LaneCall::wait(const Ready& ready) {
  if (ready()) return true;
  if (shown_ != roused_) rouse();
  const Sleeper self{shared_.client_waits, shared_.client_wake};
  return wait_for(self, {deadline_, kSpin, kSlice}, ready, [&] { return client_.look(); }) ==
         Waited::ready;
}

bool LaneCall::wait_for_answer() {
  return wait([&] { return is_answered(); });
}

bool LaneCall::wait_for_room(std::uint64_t end) {
  if (end <= ring_bytes_) return true;
  const auto has_room = [&] { return taken() >= end - ring_bytes_; };
  return wait([&] { return has_room() || is_answered(); }) && has_room();
}

bool LaneCall::wait_for_payload(std::uint64_t end, std::uint64_t stride) {
  if (!wait([&] { return taken() >= end || is_answered(); })) return false;
  return is_answered() ? done() * stride >= end : true;
}

void LaneCall::show(std::uint64_t bytes) {
  shown_ = bytes;
  shared_.staged.store(bytes, std::memory_order_release);
  if (shown_ - roused_ >= std::min(kRouseBytes, ring_bytes_ / 2)) rouse();
}

void LaneCall::rouse() {
  roused_ = shown_;
  node().rouse();
}

Refusal LaneCall::refusal() const {
  const std::uint64_t number = shared_.refused.load(std::memory_order_relaxed);
  return number <= static_cast<std::uint64_t>(Refusal::not_here) ? static_cast<Refusal>(number)
                                                                 : Refusal::not_here;
}

std::size_t LaneCall::done() const {
  if (refusal() != Refusal::none) return 0;  // whatever a request before came to
  return std::min<std::size_t>(count_, shared_.done.load(std::memory_order_relaxed));
}

Miss LaneCall::miss() const {
  const std::uint64_t number = shared_.miss.load(std::memory_order_relaxed);
  return number < kMisses ? static_cast<Miss>(number) : Miss::absent;
}

PutStatus LaneCall::status(std::size_t index) const {
  const std::uint8_t number = shared_.status[index].load(std::memory_order_relaxed);
  return number < kPutStatuses ? static_cast<PutStatus>(number) : PutStatus::failed;
}

}  // namespace kvpool
