// Leases by request: for a client that has the arena mapped and wants more pins than it has hazard
// words, or blocks that lie on the SSD.
#include <algorithm>

#include "memory/slab_pool.h"
#include "net/stream_serve.h"

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

bool StreamServe::acquire(const Call& call) {
  ClientBooks& books = *host_.client;
  const std::uint64_t bytes = SlabPool::slot_bytes(call.space->block_bytes);
  const std::uint64_t may_lease = take_below(books.leases, 1, call.keys.size(), kLeasesMax);
  const std::uint64_t allowed =
      take_below(books.leased_bytes, bytes, may_lease, host_.options.pin_bytes);
  std::vector<Lease> leased(allowed);
  Miss why = Miss::pin_limit;
  std::size_t count = 0;
  if (allowed > 0)
    count = host_.node.acquire(*call.space, call.keys.first(allowed), leased.data(), &why);
  if (count == allowed && count < call.keys.size()) why = Miss::pin_limit;
  books.leases.fetch_sub(may_lease - count, std::memory_order_relaxed);
  books.leased_bytes.fetch_sub((allowed - count) * bytes, std::memory_order_relaxed);
  host_.books.leases.fetch_add(count, std::memory_order_relaxed);

  std::vector<LeasePlace> places(count);
  for (std::size_t i = 0; i < count; ++i) {
    places[i] = {next_lease_, leased[i].offset, leased[i].bytes};
    leases_.emplace(next_lease_++, leased[i]);
  }
  return answer(call, {.count = count,
                       .why = count < call.keys.size() ? why : Miss::none,
                       .body = std::as_bytes(std::span(places))});
}

bool StreamServe::release(const Call& call) {
  std::vector<Lease> released;
  for (const Hash128& number : call.keys) {
    const auto found = leases_.find(number.low);
    if (found == leases_.end()) continue;
    released.push_back(found->second);
    leases_.erase(found);
  }
  give_back(released);
  return answer(call, {.count = released.size()});
}

void StreamServe::give_back(std::span<const Lease> released) {
  host_.node.release(released);
  std::uint64_t bytes = 0;
  for (const Lease& lease : released) bytes += SlabPool::slot_bytes(lease.bytes);
  host_.client->leased_bytes.fetch_sub(bytes, std::memory_order_relaxed);
  host_.client->leases.fetch_sub(released.size(), std::memory_order_relaxed);
  host_.books.leases.fetch_sub(released.size(), std::memory_order_relaxed);
}

void StreamServe::forget_leases() {
  std::vector<Lease> all;
  all.reserve(leases_.size());
  for (const auto& [number, lease] : leases_) all.push_back(lease);
  leases_.clear();
  give_back(all);
}

}  // namespace kvpool
