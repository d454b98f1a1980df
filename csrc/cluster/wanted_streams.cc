#include "cluster/wanted_streams.h"

#include <algorithm>

namespace kvpool {

void WantedStreams::want(const WantedStream& wanted) {
  const std::lock_guard lock(mutex_);
  if (closed_ || wanted.count == 0) return;
  const auto there = std::ranges::find(wanted_, wanted.member, &WantedStream::member);
  if (there == wanted_.end())
    wanted_.push_back(wanted);
  else
    *there = wanted;
  came_.notify_one();
}

std::vector<WantedStream> WantedStreams::wait(Deadline deadline) {
  std::unique_lock lock(mutex_);
  for (;;) {
    const auto now = std::chrono::steady_clock::now();
    std::vector<WantedStream> due;
    auto next = deadline;
    for (const WantedStream& wanted : wanted_) {
      if (wanted.not_before <= now)
        due.push_back(wanted);
      else
        next = std::min(next, wanted.not_before);
    }
    std::erase_if(wanted_, [&](const WantedStream& wanted) { return wanted.not_before <= now; });
    if (!due.empty() || closed_ || now >= deadline) return due;
    came_.wait_until(lock, next);
  }
}

void WantedStreams::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  wanted_.clear();
  came_.notify_all();
}

}  // namespace kvpool
