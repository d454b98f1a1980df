// Time enters by argument: a node is given a Clock, so that replay and product share one policy.
#pragma once
#include <time.h>

#include <atomic>

namespace kvpool {

// Seconds since some fixed moment; never goes back. float64 keeps microseconds for centuries.
using Seconds = double;

class Clock {
 public:
  virtual ~Clock() = default;
  virtual Seconds now() const = 0;
};

class SystemClock final : public Clock {
 public:
  Seconds now() const override {
    timespec t{};
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
  }
};

// Stands still until told; for replay and tests. Thread-safe.
class ManualClock final : public Clock {
 public:
  Seconds now() const override { return now_.load(std::memory_order_relaxed); }
  void set(Seconds now) { now_.store(now, std::memory_order_relaxed); }

 private:
  std::atomic<Seconds> now_{0};
};

}  // namespace kvpool
