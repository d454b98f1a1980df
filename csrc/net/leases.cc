#include "net/leases.h"

#include <algorithm>
#include <utility>

#include "memory/slab_pool.h"

namespace kvpool {
namespace {

// Takes up to `wanted` steps of `step` each below `limit`; answers how many it took.
std::uint64_t take_below(std::atomic<std::uint64_t>& taken, std::uint64_t step,
                         std::uint64_t wanted, std::uint64_t limit) {
  std::uint64_t before = taken.load(std::memory_order_relaxed);
  for (;;) {
    const std::uint64_t left = before < limit ? (limit - before) / step : 0;
    const std::uint64_t steps = std::min(wanted, left);
    if (taken.compare_exchange_weak(before, before + steps * step, std::memory_order_relaxed))
      return steps;
  }
}

}  // namespace

void Leases::open() {
  const std::lock_guard lock(mutex_);
  open_ = true;
}

void Leases::close() {
  std::unordered_map<std::uint64_t, Held> leases;
  {
    const std::lock_guard lock(mutex_);
    open_ = false;
    leases = std::exchange(leases_, {});
    ages_.clear();
  }
  std::vector<Lease> all;
  all.reserve(leases.size());
  for (const auto& [number, held] : leases) all.push_back(held.lease);
  give_back(all);
}

std::vector<LeasePlace> Leases::acquire(const Namespace& space, std::span<const Hash128> keys,
                                        std::uint64_t bytes_max, Miss& why) {
  Loaded loaded;
  std::uint64_t number = 0;
  const auto leased = take({space, keys, bytes_max, Reach{}}, loaded, number);
  space.traffic->count_view(keys.size(), loaded);
  why = loaded.why;
  std::vector<LeasePlace> places;
  places.reserve(leased.size());
  for (const Lease& lease : leased) places.push_back({number++, lease.offset, lease.bytes});
  return places;
}

std::vector<FarPlace> Leases::acquire_far(const Namespace& space, std::span<const Hash128> keys,
                                          std::uint64_t bytes_max, Loaded& loaded) {
  std::uint64_t number = 0;
  std::vector<FarPlace> places;
  for (const Lease& lease : take({space, keys, bytes_max, Reach::here()}, loaded, number))
    places.push_back({.lease = number++,
                      .offset = lease.offset,
                      .generation = lease.generation,
                      .sum_low = lease.sum.low,
                      .sum_high = lease.sum.high,
                      .bytes = lease.bytes});
  return places;
}

// `number`: of the first; the others follow. None, and why: closed meanwhile.
std::vector<Lease> Leases::take(const Wanted& wanted, Loaded& loaded, std::uint64_t& number) {
  const Namespace& space = wanted.space;
  const std::uint64_t bytes = SlabPool::slot_bytes(space.block_bytes);
  const std::uint64_t counted = take_below(count_, 1, wanted.keys.size(), kLeasesMax);
  const std::uint64_t allowed = take_below(bytes_, bytes, counted, wanted.bytes_max);
  std::vector<Lease> leased(allowed);
  if (allowed > 0)
    node_.acquire_part(space, wanted.keys.first(allowed), leased.data(), loaded, wanted.reach);
  const std::size_t held = loaded.blocks();
  if (held == allowed && held < wanted.keys.size()) loaded.why = Miss::pin_limit;
  count_.fetch_sub(counted - held, std::memory_order_relaxed);
  bytes_.fetch_sub((allowed - held) * bytes, std::memory_order_relaxed);
  all_.fetch_add(held, std::memory_order_relaxed);
  leased.resize(held);
  {
    const std::lock_guard lock(mutex_);
    if (open_) {
      const LeaseAges::Slot now = LeaseAges::slot_of(std::chrono::steady_clock::now());
      number = next_;
      for (const Lease& lease : leased) leases_.emplace(next_++, Held{lease, now});
      ages_.add(now, held);
      return leased;
    }
  }
  give_back(leased);
  loaded = {.why = Miss::disconnected};
  return {};
}

std::size_t Leases::expire(LeaseAges::Time before) {
  const LeaseAges::Slot slot = LeaseAges::slot_of(before);
  std::vector<Lease> expired;
  {
    const std::lock_guard lock(mutex_);
    if (!ages_.has_before(slot)) return 0;
    std::erase_if(leases_, [&](const auto& each) {
      const Held& held = each.second;
      if (held.since >= slot) return false;
      expired.push_back(held.lease);
      ages_.take_off(held.since, 1);
      return true;
    });
  }
  give_back(expired);
  return expired.size();
}

std::size_t Leases::release(std::span<const Hash128> numbers) {
  std::vector<Lease> released;
  {
    const std::lock_guard lock(mutex_);
    for (const Hash128& number : numbers) {
      const auto found = leases_.find(number.low);
      if (found == leases_.end()) continue;
      released.push_back(found->second.lease);
      ages_.take_off(found->second.since, 1);
      leases_.erase(found);
    }
  }
  give_back(released);
  return released.size();
}

void Leases::add_ages(LeaseAges::Counts& counts) const {
  const std::lock_guard lock(mutex_);
  ages_.add_counts(LeaseAges::slot_of(std::chrono::steady_clock::now()), counts);
}

void Leases::give_back(std::span<const Lease> leases) {
  node_.release(leases);
  std::uint64_t bytes = 0;
  for (const Lease& lease : leases) bytes += SlabPool::slot_bytes(lease.bytes);
  bytes_.fetch_sub(bytes, std::memory_order_relaxed);
  count_.fetch_sub(leases.size(), std::memory_order_relaxed);
  all_.fetch_sub(leases.size(), std::memory_order_relaxed);
}

}  // namespace kvpool
