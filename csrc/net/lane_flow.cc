#include "net/lane_flow.h"

#include <algorithm>

#include "block/checksum.h"
#include "block/copy.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;

// Small enough to stay in the first cache while it is copied, hashed and stored.
constexpr std::uint64_t kPieceBytes = 4 << 10;
constexpr std::uint64_t kSendPieceBytes = 64 << 10;
// A counter is shown so often, and a sleeper woken for so much: a wake-up costs what 100 KiB do.
constexpr std::uint64_t kShowBytes = 16 << 10;
constexpr std::uint64_t kRouseBytes = 256 << 10;
constexpr auto kSpin = 50us;
constexpr auto kSlice = 50ms;

}  // namespace

bool LaneFlow::wait_for_client(std::uint64_t until, std::uint64_t done) {
  // `until` is at most one ring from what was seen taken, so a count below it cannot have wrapped.
  if (theirs_ >= until) return true;
  const auto has_come = [&] {
    theirs_ = lane_.staged.load(std::memory_order_acquire);
    return theirs_ >= until;
  };
  if (!has_come()) {
    if (done > ours_) publish(done);
    if (ours_ != roused_) rouse();
    const auto give_up = [&] {
      return host_.ended.load(std::memory_order_acquire) ||
             lane_.cancelled.load(std::memory_order_acquire) == request_.number;
    };
    const WaitLimits patience{request_.deadline, kSpin, kSlice};
    if (wait_for(node_sleeper(lane_), patience, has_come, give_up) != Waited::ready) return false;
  }
  if (theirs_ - ours_ > theirs_max_ahead_ && theirs_ > ours_) is_garbage_ = true;
  return !is_garbage_;
}

void LaneFlow::publish(std::uint64_t to) {
  ours_ = to;
  lane_.taken.store(to, std::memory_order_release);
}

bool LaneSource::fill(std::size_t index, std::byte* slot, Hash128& sum) {
  if (index < request_.skip) {
    is_payload_due_ = true;
    return false;
  }
  alignas(64) std::byte bounce[kPieceBytes];
  ChecksumStream stream;
  const std::uint64_t start = (index - request_.skip) * stride_;
  for (std::uint64_t done = 0; done < block_bytes_;) {
    const std::uint64_t at = start + done;
    const std::uint64_t piece = std::min(
        {kPieceBytes, block_bytes_ - done, left_in_ring(at), half_of_ring(request_.ring_bytes)});
    if (!wait_for_client(at + piece, at)) return false;
    racy_copy(bounce, in_ring(at), piece);
    stream.update(bounce, piece);
    stream_fill(slot + done, bounce, piece);
    done += piece;
    if (start + done - ours_ >= kShowBytes) publish(start + done);
    if (ours_ - roused_ >= std::min(kRouseBytes, request_.ring_bytes / 2)) rouse();
  }
  // A client that has given up may have filled its staging memory with something else since: what
  // was copied is the block's only if that had not begun.
  std::atomic_thread_fence(std::memory_order_acquire);
  if (lane_.cancelled.load(std::memory_order_relaxed) == request_.number) return false;
  publish(start + stride_);
  moved_ += block_bytes_;
  sum = stream.digest();
  return true;
}

void LaneSource::skip(std::size_t index) {
  if (index >= request_.skip) publish((index - request_.skip + 1) * stride_);
}

template <typename Whole>
bool LaneSink::send(std::size_t index, const std::byte* payload, const Whole& is_whole) {
  if (is_over_) return false;
  const bool fits = stride_ <= request_.ring_bytes;
  const std::uint64_t start = index * stride_;
  for (std::uint64_t done = 0; done < block_bytes_;) {
    const std::uint64_t at = start + done;
    const std::uint64_t piece = std::min({kSendPieceBytes, block_bytes_ - done, left_in_ring(at),
                                          half_of_ring(request_.ring_bytes)});
    const std::uint64_t end = at + piece;
    // The client's counter is of what it has copied out.
    if (end > request_.ring_bytes && !wait_for_client(end - request_.ring_bytes, ours_)) {
      is_over_ = true;
      return false;
    }
    racy_copy(in_ring(at), payload + done, piece);
    if (!is_whole()) {
      is_over_ = !fits && done > 0;
      return false;
    }
    done += piece;
    if (!fits) publish(start + done);
    if (!fits && ours_ - roused_ >= request_.ring_bytes / 2) rouse();
  }
  publish(start + stride_);
  rouse();
  moved_ += block_bytes_;
  return true;
}

bool LaneSink::deliver(std::size_t index, const IndexReader& reader, const Found& found) {
  return found.bytes == block_bytes_ &&
         send(index, reader.payload(found), [&] { return reader.still_there(found); });
}

bool LaneSink::deliver_whole(std::size_t index, std::span<const std::byte> payload) {
  return payload.size() == block_bytes_ && send(index, payload.data(), [] { return true; });
}

}  // namespace kvpool
