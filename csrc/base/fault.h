// Named points at which a test makes a step fail, or holds it while something else happens.
//
// Always compiled in, so that the tested binary is the shipped one: an unarmed point costs one
// relaxed load. Each node has its own set (no module-level state). Thread-safe.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

namespace kvpool {

class FaultPoints {
 public:
  // The next `times` passes of `point` fail, after `skip` passes that do not.
  void fail(std::string point, std::uint64_t times, std::uint64_t skip);
  // The next `times` passes of `point` wait until resume() or the time is over. A test sees them
  // with waiting().
  void pause(std::string point, std::chrono::milliseconds at_most, std::uint64_t times = ~0ull);
  void resume(std::string_view point);
  void clear();

  // Whether any point was armed since the last clear(): a step that passes many points at once goes
  // through them one by one then.
  bool is_armed() const { return armed_.load(std::memory_order_relaxed); }
  std::uint64_t hits(std::string_view point) const;     // passes that failed or waited
  std::uint64_t waiting(std::string_view point) const;  // passes that wait now

  // At the point itself: true = this step fails. put.reserve and get.acquire are asked under
  // the node's lock and must not be paused.
  bool fires(const char* point) {
    return armed_.load(std::memory_order_relaxed) && fires_slowly(point);
  }

 private:
  struct Point {
    std::uint64_t fail_times = 0, fail_skip = 0, pause_times = 0, hits = 0, waiting = 0;
    std::chrono::milliseconds pause_at_most{0};
    bool paused = false;
  };

  bool fires_slowly(const char* point);

  std::atomic<bool> armed_{false};
  mutable std::mutex mutex_;  // guards points_
  std::condition_variable resumed_;
  std::map<std::string, Point, std::less<>> points_;
};

}  // namespace kvpool
