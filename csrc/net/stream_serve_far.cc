// lease_far: a peer reads blocks out of the arena by itself; they are pinned until it has done so.
//
//   lease_far -> (the peer's network card reads) -> release, on the same stream
//
// Leases are the stream's: they end with it, and after ServerOptions::far_lease_max in any case.
// What a peer reads of a lease that has ended is not what its checksum says, which costs it a miss.
#include <algorithm>
#include <cstring>

#include "net/stream_serve.h"

namespace kvpool {

bool StreamServe::lease_far(const Call& call) {
  const std::shared_ptr<DirectoryService> directory = host_.directory.get();
  const std::uint64_t lane = directory ? directory->lane() : 0;
  if (lane == 0) return answer(call, {.refusal = Refusal::not_here});
  Miss why = Miss::none;
  const std::vector<FarPlace> places = lend(call, why);
  const FarHead head{.lane = lane,
                     .limit_ms = static_cast<std::uint32_t>(host_.options.far_lease_max.count())};
  std::vector<std::byte> body(sizeof head + places.size() * sizeof(FarPlace));
  std::memcpy(body.data(), &head, sizeof head);
  if (!places.empty())
    std::memcpy(body.data() + sizeof head, places.data(), places.size() * sizeof(FarPlace));
  // One that cannot be told ends this stream, and with it what was lent.
  return answer(call, {.count = places.size(), .why = why, .body = body});
}

// The leading blocks that lie in DRAM. `why`: of the first that does not; none: it is here, but is
// to be had by a get only.
std::vector<FarPlace> StreamServe::lend(const Call& call, Miss& why) {
  const Namespace& space = *call.space;
  const std::size_t left = kFarLeasesMax - std::min<std::size_t>(lent_.size(), kFarLeasesMax);
  std::vector<std::uint8_t> tiers(call.keys.size());
  const std::size_t found = host_.node.look(space, call.keys, tiers.data()).present;
  const auto end = tiers.begin() + static_cast<std::ptrdiff_t>(found);
  const auto in_dram =
      static_cast<std::size_t>(std::find(tiers.begin(), end, kTierSsd) - tiers.begin());
  Loaded loaded;
  if (left == 0 && in_dram > 0) loaded.why = Miss::pin_limit;
  std::vector<FarPlace> places;
  if (const auto keys = call.keys.first(std::min(in_dram, left)); !keys.empty()) {
    if (host_.books.gets.admit(keys.size() * std::uint64_t{space.block_bytes}))
      places = host_.far.acquire_far(space, keys, host_.options.pin_bytes, loaded);
    else
      loaded.why = Miss::limited;
  }
  for (const FarPlace& place : places) lent_.insert(place.lease);
  const bool is_absent = places.size() == found && found < call.keys.size();
  if (is_absent) {
    // Whoever sent the peer here is to know better.
    loaded.why = Miss::absent;
    host_.node.deny(space, call.keys[found]);
  }
  why = loaded.why;
  if (places.empty() && !is_absent) return places;  // it asks for them by a get, which is counted
  const std::uint64_t bytes = places.size() * std::uint64_t{space.block_bytes};
  space.traffic->count_get(places.size() + is_absent, loaded);
  host_.client->count_get(loaded, space.block_bytes);
  host_.client->bytes_out.fetch_add(bytes, std::memory_order_relaxed);
  host_.books.bytes_out.fetch_add(bytes, std::memory_order_relaxed);
  host_.books.far_lent_bytes.fetch_add(bytes, std::memory_order_relaxed);
  return places;
}

// By numbers, in the low halves. Those that are not this stream's are passed by; how many had not
// ended before.
bool StreamServe::take_back(const Call& call) {
  std::vector<Hash128> own;
  for (const Hash128& number : call.keys)
    if (lent_.erase(number.low) != 0) own.push_back(number);
  return answer(call, {.count = host_.far.release(own)});
}

void StreamServe::take_all_back() {
  std::vector<Hash128> own;
  for (const std::uint64_t number : std::exchange(lent_, {})) own.push_back({number, 0});
  host_.far.release(own);
}

}  // namespace kvpool
