#include "base/fault.h"

namespace kvpool {

void FaultPoints::fail(std::string point, std::uint64_t times, std::uint64_t skip) {
  std::lock_guard lock(mutex_);
  Point& p = points_[std::move(point)];
  p.fail_times = times;
  p.fail_skip = skip;
  armed_.store(true, std::memory_order_relaxed);
}

void FaultPoints::pause(std::string point, std::chrono::milliseconds at_most, std::uint64_t times) {
  std::lock_guard lock(mutex_);
  Point& p = points_[std::move(point)];
  p.paused = true;
  p.pause_at_most = at_most;
  p.pause_times = times;
  armed_.store(true, std::memory_order_relaxed);
}

void FaultPoints::resume(std::string_view point) {
  std::lock_guard lock(mutex_);
  if (auto it = points_.find(point); it != points_.end()) it->second.paused = false;
  resumed_.notify_all();
}

void FaultPoints::clear() {
  std::lock_guard lock(mutex_);
  armed_.store(false, std::memory_order_relaxed);
  // Points that somebody waits at are kept until the waiter has left.
  for (auto& [name, p] : points_) p = Point{.hits = p.hits, .waiting = p.waiting};
  resumed_.notify_all();
}

std::uint64_t FaultPoints::hits(std::string_view point) const {
  std::lock_guard lock(mutex_);
  auto it = points_.find(point);
  return it == points_.end() ? 0 : it->second.hits;
}

std::uint64_t FaultPoints::waiting(std::string_view point) const {
  std::lock_guard lock(mutex_);
  auto it = points_.find(point);
  return it == points_.end() ? 0 : it->second.waiting;
}

bool FaultPoints::fires_slowly(const char* point) {
  std::unique_lock lock(mutex_);
  auto it = points_.find(std::string_view(point));
  if (it == points_.end()) return false;
  Point& p = it->second;  // std::map: stays where it is, and clear() erases nothing
  if (p.paused && p.pause_times > 0) {
    --p.pause_times;
    ++p.hits;
    ++p.waiting;
    resumed_.wait_for(lock, p.pause_at_most, [&] { return !p.paused; });
    --p.waiting;
  }
  if (p.fail_skip > 0) {
    --p.fail_skip;
    return false;
  }
  if (p.fail_times == 0) return false;
  --p.fail_times;
  ++p.hits;
  return true;
}

}  // namespace kvpool
