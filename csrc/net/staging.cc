#include "net/staging.h"

#include <algorithm>
#include <iterator>

#include "memory/arena.h"

namespace kvpool {

StagingRun::~StagingRun() {
  if (room_ != nullptr) room_->give(offset_, bytes_);
}

StagingRoom::StagingRoom(std::uint64_t bytes) : bytes_max_(bytes / kPageBytes * kPageBytes) {
  if (bytes_max_ > 0) free_.emplace(0, bytes_max_);
}

StagingRun StagingRoom::take(std::uint64_t bytes) {
  bytes = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  const std::lock_guard lock(mutex_);
  const auto fits =
      std::ranges::find_if(free_, [&](const auto& run) { return run.second >= bytes; });
  if (fits == free_.end() || bytes == 0) return {};
  const auto [offset, length] = *fits;
  free_.erase(fits);
  if (length > bytes) free_.emplace(offset + bytes, length - bytes);
  return StagingRun(*this, offset, bytes);
}

std::uint64_t StagingRoom::bytes_free() const {
  const std::lock_guard lock(mutex_);
  std::uint64_t sum = 0;
  for (const auto& run : free_) sum += run.second;
  return sum;
}

void StagingRoom::give(std::uint64_t offset, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  auto after = free_.lower_bound(offset);
  if (after != free_.end() && after->first == offset + bytes) {
    bytes += after->second;
    after = free_.erase(after);
  }
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free_.emplace(offset, bytes);
}

}  // namespace kvpool
