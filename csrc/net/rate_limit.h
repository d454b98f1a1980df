// So many bytes per second for all who share it: a bucket that holds what one second may take.
//
// Who asks while the bucket is not empty is admitted, with all its bytes, and may leave a debt that
// is paid off before the next is admitted. So a call that is larger than the bucket gets through as
// well, none starves behind small ones, and over any time t at most rate * (t + 1 s) and one call
// more are admitted.
// Thread rule: every method from any thread; nobody waits, for a lock or otherwise.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>

namespace kvpool {

class RateLimit {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // 0: no limit.
  explicit RateLimit(std::uint64_t bytes_per_s = 0) : bytes_per_s_(bytes_per_s) {}

  std::uint64_t bytes_per_s() const { return bytes_per_s_.load(std::memory_order_relaxed); }

  // What is owed is owed at the new rate, and a bucket is as full as it was.
  void set(std::uint64_t bytes_per_s, Time now = std::chrono::steady_clock::now()) {
    const std::uint64_t before = bytes_per_s_.exchange(bytes_per_s, std::memory_order_relaxed);
    if (before == bytes_per_s) return;
    std::int64_t full = full_at_ns_.load(std::memory_order_relaxed);
    std::int64_t changed = 0;
    do {
      const std::int64_t left = std::max<std::int64_t>(0, full - ns_of(now));
      // More than the bucket is a debt, in bytes; what is less is a share of the bucket.
      const std::int64_t debt = std::max<std::int64_t>(0, left - kBucketNs);
      const double owed = static_cast<double>(debt) / 1e9 * static_cast<double>(before);
      changed = ns_of(now) + (left - debt) + ns_for(owed, bytes_per_s);
    } while (!full_at_ns_.compare_exchange_weak(full, changed, std::memory_order_relaxed));
  }

  // False: over the limit; nothing is taken.
  bool admit(std::uint64_t bytes, Time now = std::chrono::steady_clock::now()) {
    return take(bytes, now, kBucketNs);
  }
  // Whether anything would be admitted.
  bool has_room(Time now = std::chrono::steady_clock::now()) const {
    return bytes_per_s() == 0 ||
           full_at_ns_.load(std::memory_order_relaxed) - ns_of(now) < kBucketNs;
  }
  // What went out before its size was known: over the limit or not, it is owed.
  void charge(std::uint64_t bytes, Time now = std::chrono::steady_clock::now()) {
    take(bytes, now, std::numeric_limits<std::int64_t>::max());
  }

 private:
  // False: what is owed takes `owed_max` or longer to be paid off.
  bool take(std::uint64_t bytes, Time now, std::int64_t owed_max) {
    const std::uint64_t rate = bytes_per_s();
    if (rate == 0 || bytes == 0) return true;
    const std::int64_t at = ns_of(now);
    std::int64_t full = full_at_ns_.load(std::memory_order_relaxed);
    std::int64_t taken = 0;
    do {
      if (full - at >= owed_max) return false;
      taken = std::max(full, at) + ns_for(static_cast<double>(bytes), rate);
    } while (!full_at_ns_.compare_exchange_weak(full, taken, std::memory_order_relaxed));
    return true;
  }

  static constexpr std::int64_t kBucketNs = 1'000'000'000;
  // No debt is longer: else one large call at a rate of a byte would be owed for years.
  static constexpr double kDebtMaxNs = 3600e9;

  static std::int64_t ns_of(Time time) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
  }
  static std::int64_t ns_for(double bytes, std::uint64_t rate) {
    if (rate == 0) return 0;
    return static_cast<std::int64_t>(std::min(bytes / static_cast<double>(rate) * 1e9, kDebtMaxNs));
  }

  std::atomic<std::uint64_t> bytes_per_s_;
  std::atomic<std::int64_t> full_at_ns_{0};  // when the bucket will be full if nobody takes
};

}  // namespace kvpool
