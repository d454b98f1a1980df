#include "cluster/far_read.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "block/checksum.h"
#include "memory/slab_pool.h"

namespace kvpool {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// From the deadline of a read until its endpoint has been closed by force.
constexpr milliseconds kCloseMax{500};
// A lease is given back in good time or not at all: it ends by itself.
constexpr milliseconds kGiveBackMin{100};

}  // namespace

FarRead::FarRead(From from, std::span<const Hash128> keys, std::size_t first,
                 std::uint32_t block_bytes, BlockSink& sink)
    : from_(std::move(from)), keys_(keys), first_(first), block_bytes_(block_bytes), sink_(sink) {}

FarRead::~FarRead() {
  if (!is_over_) from_.stream->abandon();
}

// Each begins on a page, whatever its size.
std::uint64_t FarRead::step() const { return SlabPool::slot_bytes(block_bytes_); }

void FarRead::begin(Deadline lease_by, Deadline until) {
  until_ = until;
  if (!lease(lease_by) || places_.empty()) return;
  const auto staging = from_.peer->far().staging();
  memory_ = staging == nullptr ? nullptr : staging->take(places_.size() * step());
  if (memory_ == nullptr) {
    has_no_memory_ = true;
    return;
  }
  std::vector<UcxPlace> places;
  places.reserve(places_.size());
  for (std::size_t i = 0; i < places_.size(); ++i)
    places.push_back({.offset = places_[i].offset,
                      .bytes = block_bytes_,
                      .sum = {},
                      .into = memory_.get() + i * step()});
  reading_ = from_.arena->begin(places, memory_, until_);
}

bool FarRead::lease(Deadline deadline) {
  const auto began = steady_clock::now();
  std::vector<std::byte> body(sizeof(FarHead) + keys_.size() * sizeof(FarPlace));
  const auto reply = from_.stream->request(
      {.op = Op::lease_far, .space = from_.space, .keys = keys_, .deadline = deadline}, body);
  latency_ = steady_clock::now() - began;
  if (!from_.stream->is_live()) trouble_ = reply.is_good() ? Miss::disconnected : reply.trouble();
  if (reply.how == Io::done && reply.refusal == Refusal::not_here) {
    fail("it lends nothing (any more)");  // it leaves, or has closed its lane
    return false;
  }
  if (!reply.is_good()) {
    if (trouble_ == Miss::none) trouble_ = reply.trouble();
    return false;
  }
  FarHead head;
  if (reply.body_bytes != sizeof head + reply.count * sizeof(FarPlace)) {
    from_.stream->abandon();
    trouble_ = Miss::damaged;
    return false;
  }
  std::memcpy(&head, body.data(), sizeof head);
  places_.resize(reply.count);
  if (!places_.empty())
    std::memcpy(places_.data(), body.data() + sizeof head, places_.size() * sizeof(FarPlace));
  why_ = reply.count < keys_.size() ? reply.why : Miss::none;
  if (fits(head)) {
    until_ = std::min(until_, began + milliseconds(head.limit_ms));
    return true;
  }
  fail("it lends of another arena than it told of");
  return false;
}

// What is outside of the arena is not asked for by the lane itself.
bool FarRead::fits(const FarHead& head) const {
  return head.lane == from_.arena->lane() &&
         std::ranges::all_of(places_,
                             [&](const FarPlace& place) { return place.bytes == block_bytes_; });
}

void FarRead::end(Deadline deadline) {
  const Deadline until = std::min(until_ + kCloseMax, deadline);
  for (std::size_t i = 0; reading_ != nullptr && i < places_.size(); ++i) {
    if (!reading_->wait(i, until)) {
      fail(steady_clock::now() < until_ ? "a read failed" : "a read did not come in time");
      break;
    }
    if (!take(i, memory_.get() + i * step())) break;
    ++delivered_;
  }
  reading_.reset();
  memory_.reset();
  give_back(deadline);
  is_over_ = true;
  if (delivered_ > 0) {
    from_.peer->far().read(delivered_, delivered_ * std::uint64_t{block_bytes_});
    from_.peer->count_fetched(delivered_, delivered_ * std::uint64_t{block_bytes_});
  }
  if (has_failed_) from_.peer->far().failed(from_.arena, places_.size() - delivered_, failure_);
}

bool FarRead::take(std::size_t index, const std::byte* read) {
  const FarPlace& told = places_[index];
  const Hash128 expected{told.sum_low, told.sum_high};
  std::byte* const into = sink_.place(first_ + index);
  const Hash128 sum = into == nullptr
                          ? checksum(read, block_bytes_)
                          : copy_with_checksum(into, read, block_bytes_, Stores::cached);
  const bool is_right = sum == expected;
  reading_->judge(is_right ? UcxOutcome::whole : UcxOutcome::damaged, block_bytes_);
  if (!is_right) {
    fail("what was read is not what was leased");
    return false;
  }
  if (into != nullptr)
    sink_.arrived(first_ + index, sum);
  else if (!sink_.deliver_whole(first_ + index, {read, block_bytes_}))
    has_no_memory_ = true;
  return into != nullptr || !has_no_memory_;
}

void FarRead::give_back(Deadline deadline) {
  if (places_.empty() || !from_.stream->is_live()) return;
  std::vector<Hash128> numbers;
  numbers.reserve(places_.size());
  for (const FarPlace& place : places_) numbers.push_back({place.lease, 0});
  const auto by = std::max(deadline, steady_clock::now() + kGiveBackMin);
  const auto reply =
      from_.stream->request({.op = Op::release, .keys = numbers, .deadline = by}, {});
  if (!from_.stream->is_live()) trouble_ = reply.is_good() ? Miss::disconnected : reply.trouble();
}

void FarRead::fail(const std::string& trouble) {
  has_failed_ = true;
  failure_ = trouble;
}

}  // namespace kvpool
