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
      lane_(head.lane),
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

std::unique_ptr<UcxReading> UcxPeer::begin(std::span<const UcxPlace> places,
                                           std::shared_ptr<const void> keeper, Time deadline) {
  std::vector<bool> is_asked(places.size(), false);
  std::vector<UcxPiece> pieces;
  const std::size_t count = std::min(places.size(), kUcxPlacesMax);
  for (std::size_t i = 0; i < count; ++i) {
    if (!is_inside(places[i])) continue;
    is_asked[i] = true;
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
  auto batch =
      std::make_shared<UcxBatch>(std::move(pieces), places.size(), std::move(keeper), deadline);
  const bool is_taken = !is_broken() && deadline > std::chrono::steady_clock::now() &&
                        worker_->post([batch, endpoint = endpoint_] { endpoint->start(batch); });
  if (!is_taken) batch = nullptr;
  return std::make_unique<UcxReading>(std::move(batch), counters_, std::move(is_asked));
}

std::vector<UcxOutcome> UcxPeer::read(std::span<const UcxPlace> places,
                                      std::shared_ptr<const void> keeper, Time deadline) {
  std::vector<UcxOutcome> outcomes(places.size(), UcxOutcome::failed);
  const auto reading = begin(places, std::move(keeper), deadline);
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (!reading->wait(i, deadline + kCloseMax)) continue;
    const bool is_right = checksum(places[i].into, places[i].bytes) == places[i].sum;
    outcomes[i] = is_right ? UcxOutcome::whole : UcxOutcome::damaged;
    reading->judge(outcomes[i], places[i].bytes);
  }
  return outcomes;
}

// --- what is under way ---------------------------------------------------------------------------

UcxReading::UcxReading(std::shared_ptr<UcxBatch> batch, std::shared_ptr<UcxCounters> counters,
                       std::vector<bool> is_asked)
    : batch_(std::move(batch)), counters_(std::move(counters)), is_asked_(std::move(is_asked)) {}

UcxReading::~UcxReading() {
  counters_->failed.fetch_add(is_asked_.size() - judged_, std::memory_order_relaxed);
}

bool UcxReading::wait(std::size_t place, Time until) {
  return batch_ != nullptr && is_asked_[place] &&
         batch_->wait_for(place, until) == UcxBatch::Answer::landed;
}

void UcxReading::judge(UcxOutcome outcome, std::uint64_t bytes) {
  ++judged_;
  const bool is_right = outcome == UcxOutcome::whole;
  (is_right ? counters_->whole : counters_->damaged).fetch_add(1, std::memory_order_relaxed);
  if (is_right) counters_->bytes.fetch_add(bytes, std::memory_order_relaxed);
}

}  // namespace kvpool
