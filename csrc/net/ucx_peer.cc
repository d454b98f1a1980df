#include <algorithm>
#include <utility>

#include "block/checksum.h"
#include "net/ucx_address.h"
#include "net/ucx_batch.h"
#include "net/ucx_counters.h"
#include "net/ucx_endpoint.h"
#include "net/ucx_lane.h"
#include "net/ucx_worker.h"

namespace kvpool {
namespace {

// From the deadline until the endpoint is closed by force: measured, 0.1 ms for 64 reads.
constexpr std::chrono::milliseconds kCloseMax{500};

}  // namespace

UcxPeer::UcxPeer(std::shared_ptr<UcxWorker> worker, std::shared_ptr<UcxEndpoint> endpoint,
                 std::shared_ptr<UcxCounters> counters, const UcxAddressHead& head)
    : worker_(std::move(worker)),
      endpoint_(std::move(endpoint)),
      counters_(std::move(counters)),
      arena_bytes_(head.arena_bytes),
      arena_base_(head.arena_base),
      chunk_bytes_(head.chunk_bytes) {}

UcxPeer::~UcxPeer() {
  endpoint_->drop();
  worker_->wake();
}

bool UcxPeer::is_broken() const { return endpoint_->is_broken(); }

bool UcxPeer::is_inside(const UcxPlace& place) const {
  return place.bytes > 0 && place.into != nullptr && place.offset <= arena_bytes_ &&
         place.bytes <= arena_bytes_ - place.offset;
}

std::vector<UcxOutcome> UcxPeer::read(std::span<const UcxPlace> places,
                                      std::shared_ptr<const void> keeper, Time deadline) {
  std::vector<UcxOutcome> outcomes(places.size(), UcxOutcome::failed);
  std::vector<UcxPiece> pieces;
  const std::size_t count = std::min(places.size(), kUcxPlacesMax);
  for (std::size_t i = 0; i < count; ++i) {
    if (!is_inside(places[i])) continue;
    for (std::uint64_t done = 0; done < places[i].bytes;) {
      const std::uint64_t at = places[i].offset + done;
      const std::uint64_t chunk = at / chunk_bytes_;
      const std::uint64_t bytes = std::min(places[i].bytes - done, (chunk + 1) * chunk_bytes_ - at);
      pieces.push_back({.remote = arena_base_ + at,
                        .bytes = bytes,
                        .into = places[i].into + done,
                        .chunk = static_cast<std::uint32_t>(chunk),
                        .place = static_cast<std::uint32_t>(i)});
      done += bytes;
    }
  }
  const auto batch =
      std::make_shared<UcxBatch>(std::move(pieces), places.size(), std::move(keeper), deadline);
  const bool is_taken = !is_broken() && deadline > std::chrono::steady_clock::now() &&
                        worker_->post([batch, endpoint = endpoint_] { endpoint->start(batch); });
  std::uint64_t whole = 0, damaged = 0, bytes = 0;
  for (std::size_t i = 0; is_taken && i < count; ++i) {
    if (!is_inside(places[i])) continue;
    if (batch->wait_for(i, deadline + kCloseMax) != UcxBatch::Answer::landed) continue;
    const bool is_right = checksum(places[i].into, places[i].bytes) == places[i].sum;
    outcomes[i] = is_right ? UcxOutcome::whole : UcxOutcome::damaged;
    (is_right ? whole : damaged) += 1;
    bytes += is_right ? places[i].bytes : 0;
  }
  counters_->whole.fetch_add(whole, std::memory_order_relaxed);
  counters_->damaged.fetch_add(damaged, std::memory_order_relaxed);
  counters_->bytes.fetch_add(bytes, std::memory_order_relaxed);
  counters_->failed.fetch_add(places.size() - whole - damaged, std::memory_order_relaxed);
  return outcomes;
}

}  // namespace kvpool
