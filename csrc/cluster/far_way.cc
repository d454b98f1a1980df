#include "cluster/far_way.h"

#include <algorithm>
#include <utility>

namespace kvpool {

using std::chrono::steady_clock;

void FarWay::set_address(std::span<const std::byte> address) {
  std::shared_ptr<UcxPeer> dropped;
  const std::lock_guard lock(mutex_);
  if (std::ranges::equal(address_, address)) return;
  address_.assign(address.begin(), address.end());
  dropped.swap(peer_);
  pause_ = {};
  not_before_ = {};
}

std::shared_ptr<UcxPeer> FarWay::get(Time deadline) {
  std::shared_ptr<UcxLane> lane;
  std::vector<std::byte> address;
  {
    const std::lock_guard lock(mutex_);
    if (peer_ != nullptr) return peer_;
    const bool may = reads_.lane != nullptr && !address_.empty() && !is_connecting_;
    if (!may || steady_clock::now() < not_before_) return nullptr;
    is_connecting_ = true;
    lane = reads_.lane;
    address = address_;
  }
  auto connected = lane->connect(address, deadline);
  const std::lock_guard lock(mutex_);
  is_connecting_ = false;
  if (!connected) {
    note(connected.error().message);
    return nullptr;
  }
  // Closed meanwhile, or the member has begun anew.
  if (reads_.lane == nullptr || address != address_) return nullptr;
  return peer_ = std::move(*connected);
}

std::shared_ptr<Staging> FarWay::staging() const {
  const std::lock_guard lock(mutex_);
  return reads_.staging;
}

void FarWay::read(std::uint64_t blocks, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  pause_ = {};
  counts_.blocks += blocks;
  counts_.bytes += bytes;
}

void FarWay::failed(const std::shared_ptr<UcxPeer>& peer, std::uint64_t blocks,
                    const std::string& trouble) {
  std::shared_ptr<UcxPeer> dropped;
  const std::lock_guard lock(mutex_);
  counts_.blocks_given_up += blocks;
  if (peer_ != peer) return;  // others have said so
  dropped.swap(peer_);
  note(trouble);
}

// Under the lock.
void FarWay::note(const std::string& trouble) {
  ++counts_.failures;
  counts_.trouble = trouble;
  pause_ = std::clamp(pause_ * 2, kPauseMin, kPauseMax);
  not_before_ = steady_clock::now() + pause_;
}

void FarWay::close() {
  FarReads reads;
  std::shared_ptr<UcxPeer> dropped;
  const std::lock_guard lock(mutex_);
  std::swap(reads_, reads);
  dropped.swap(peer_);
}

FarWayStats FarWay::stats() const {
  const std::lock_guard lock(mutex_);
  FarWayStats stats = counts_;
  if (reads_.lane == nullptr || address_.empty())
    stats.state = FarState::none;
  else if (peer_ != nullptr)
    stats.state = FarState::open;
  else
    stats.state = counts_.failures > 0 ? FarState::broken : FarState::unused;
  return stats;
}

}  // namespace kvpool
