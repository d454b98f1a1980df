#include "cluster/wanted_streams.h"

#include <algorithm>
#include <utility>

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
  came_.wait_until(lock, deadline, [&] { return closed_ || !wanted_.empty(); });
  return std::exchange(wanted_, {});
}

void WantedStreams::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  wanted_.clear();
  came_.notify_all();
}

}  // namespace kvpool
