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
  // Seconds since 1970, for what outlives the process. May jump either way.
  virtual double wall_s() const = 0;
};

class SystemClock final : public Clock {
 public:
  Seconds now() const override { return read(CLOCK_MONOTONIC); }
  double wall_s() const override { return read(CLOCK_REALTIME); }

 private:
  static double read(clockid_t clock) {
    timespec t{};
    clock_gettime(clock, &t);
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
  }
};

// Stands still until told, both its times alike; for replay and tests. Thread-safe.
class ManualClock final : public Clock {
 public:
  Seconds now() const override { return now_.load(std::memory_order_relaxed); }
  double wall_s() const override { return now(); }
  void set(Seconds now) { now_.store(now, std::memory_order_relaxed); }

 private:
  std::atomic<Seconds> now_{0};
};

}  // namespace kvpool
