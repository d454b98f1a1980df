// Putting through a lane: payload is copied into the lane's window while the node takes it out, or
// was born in staging memory.
#include <algorithm>
#include <vector>

#include "block/copy.h"
#include "net/lane_call.h"
#include "net/shm_use.h"

namespace kvpool {
namespace {

// So much is copied between two looks at what the node has taken, and shown to it at once.
constexpr std::uint64_t kPieceBytes = 32 << 10;

// The payload of one request on its way into the ring.
class Payload {
 public:
  Payload(LaneCall& call, BlockSource& source, std::uint64_t block_bytes)
      : call_(call),
        source_(source),
        block_bytes_(block_bytes),
        stride_(block_stride(block_bytes)) {}

  // Block `place` of those that bring payload, `index` in the whole call. False: no more is wanted.
  bool stage(std::size_t place, std::size_t index) {
    const std::uint64_t start = place * stride_;
    if (call_.taken() < start + stride_) {  // else the node has this block already
      const std::byte* from = source_.place(index);
      if (from == nullptr && stride_ <= call_.ring_bytes()) return fill_in_place(start, index);
      if (from == nullptr) {
        Hash128 sum;
        bounce_.resize(block_bytes_);
        if (!source_.fill(index, bounce_.data(), sum)) return refuse();
        from = bounce_.data();
      }
      for (std::uint64_t done = 0; done < block_bytes_;) {
        const std::uint64_t at = start + done;
        const std::uint64_t piece =
            std::min({kPieceBytes, block_bytes_ - done, call_.left_in_ring(at), call_.half_ring()});
        if (!call_.wait_for_room(at + piece)) return false;
        // Past the cache: another core reads it next, and lines on their way from one core's cache
        // to another's cost three times what memory does.
        stream_fill(call_.ring(at), from + done, piece);
        fence_before_publish();
        done += piece;
        call_.show(start + done);
      }
    }
    call_.show(start + stride_);
    return true;
  }

 private:
  bool fill_in_place(std::uint64_t start, std::size_t index) {
    if (!call_.wait_for_room(start + stride_)) return false;
    Hash128 sum;
    if (!source_.fill(index, call_.ring(start), sum)) return refuse();
    fence_before_publish();  // it may have stored past the cache
    call_.show(start + stride_);
    return true;
  }
  // The node answers that this block failed, and what became of those before it.
  bool refuse() {
    call_.cancel();
    return false;
  }

  LaneCall& call_;
  BlockSource& source_;
  const std::uint64_t block_bytes_, stride_;
  std::vector<std::byte> bounce_;
};

PutStatus status_of(Refusal refusal) {
  return refusal == Refusal::no_space ? PutStatus::dropped : PutStatus::disconnected;
}

// One status per key, once the payload is on its way.
void read_statuses(LaneCall& call, std::span<PutStatus> statuses) {
  if (!call.wait_for_answer()) {
    std::ranges::fill(statuses, call.is_broken() ? PutStatus::disconnected : PutStatus::timed_out);
    return;
  }
  if (call.refusal() != Refusal::none) {
    std::ranges::fill(statuses, status_of(call.refusal()));
    return;
  }
  for (std::size_t i = 0; i < statuses.size(); ++i) statuses[i] = call.status(i);
}

ClientLane* lane_for(const ShmUse& use, std::span<PutStatus> statuses) {
  ClientLane* const lane = use.client->take_lane(use.deadline);
  if (lane == nullptr)
    std::ranges::fill(statuses,
                      use.client->look() ? PutStatus::disconnected : PutStatus::timed_out);
  return lane;
}

// Up to kKeysPerLane keys. `first`: of them, in the whole call.
struct Piece {
  std::span<const Hash128> keys;
  const Hash128* parent;
  std::size_t first;
  std::size_t skip;  // leading keys that bring no payload
};

void put_by_lane(const ShmUse& use, const Piece& piece, BlockSource& source,
                 std::span<PutStatus> statuses) {
  ClientLane* const lane = lane_for(use, statuses);
  if (lane == nullptr) return;
  const std::uint64_t stride = block_stride(use.space.block_bytes);
  const std::uint64_t room =
      (lane->window.bytes() - lane_key_bytes(piece.keys.size(), piece.parent != nullptr)) /
      kLaneAlign * kLaneAlign;
  LaneCall call(*use.client, *lane, use.deadline);
  call.ask({.op = LaneOp::put,
            .space = use.number,
            .keys = piece.keys,
            .parent = piece.parent,
            .skip = piece.skip,
            .window_offset = lane->window.offset(),
            // Whole blocks, so that none is cut by the end of the ring.
            .ring_bytes = room < stride ? room : room / stride * stride});
  Payload payload(call, source, use.space.block_bytes);
  for (std::size_t i = piece.skip; i < piece.keys.size(); ++i)
    if (!payload.stage(i - piece.skip, piece.first + i)) break;
  call.rouse();
  read_statuses(call, statuses);
}

}  // namespace

void ShmChannel::put(const PutCall& call, BlockSource& source, PutStatus* statuses) {
  const std::span all(statuses, call.keys.size());
  const ShmUse use = this->use(call.space, at_least_a_way(call.deadline));
  if (!use || use.incarnation == 0) {
    std::ranges::fill(all, use ? PutStatus::dropped : PutStatus::disconnected);
    return;
  }
  bool is_due = false;  // the node lacked a block that was thought present
  for (std::size_t done = 0; done < call.keys.size();) {
    const std::size_t count = std::min<std::size_t>(kKeysPerLane, call.keys.size() - done);
    Piece piece{call.keys.subspan(done, count), done == 0 ? call.parent : &call.keys[done - 1],
                done, 0};
    if (std::chrono::steady_clock::now() >= use.deadline) {
      all[done] = PutStatus::timed_out;
      std::ranges::fill(all.subspan(done + 1), PutStatus::chain_broken);
      return;
    }
    // Payload that the node would not take is not sent. It may have gone before the node looks:
    // then it says so, and is sent it.
    if (!is_due) piece.skip = use.reader().lookup(piece.keys, use.incarnation, nullptr);
    const auto answers = all.subspan(done, count);
    put_by_lane(use, piece, source, answers);
    const auto missing = std::ranges::find_if_not(answers, is_there);
    done += static_cast<std::size_t>(missing - answers.begin());
    is_due = missing != answers.end() && *missing == PutStatus::payload_due;
    if (missing == answers.end() || is_due) continue;
    std::ranges::fill(all.subspan(piece.first + count), PutStatus::chain_broken);
    return;
  }
}

// --- payload that is born in staging memory ------------------------------------------------------

StagedBlocks::~StagedBlocks() {
  if (run_ != nullptr && client_->is_forked()) run_->forget();
}

std::unique_ptr<StagedBlocks> ShmChannel::reserve_many(const Space& space, std::size_t count,
                                                       PutStatus& status) {
  const ShmUse use = this->use(space, {});
  status = PutStatus::disconnected;
  if (!use) return nullptr;
  const std::uint64_t stride = block_stride(space.block_bytes);
  status = PutStatus::too_large;
  if (count == 0 || count > kKeysPerLane) return nullptr;
  // Keys go before the payload, which begins on a page.
  const std::uint64_t ahead = on_page(lane_key_bytes(count, true));
  if (ahead + count * stride > use.client->room().bytes_max()) return nullptr;
  StagingRun run = use.client->room().take(ahead + count * stride);
  if (!run) {
    use.client->find_lanes();  // one that was lost may have given its memory back since
    run = use.client->room().take(ahead + count * stride);
  }
  status = PutStatus::pool_pinned;
  if (!run) return nullptr;
  status = PutStatus::stored;
  std::unique_ptr<StagedBlocks> blocks(new StagedBlocks());
  blocks->payload_ = use.client->staging() + run.offset() + ahead;
  blocks->run_ = std::make_shared<StagingRun>(std::move(run));
  blocks->client_ = use.client;
  blocks->count_ = count;
  blocks->stride_ = stride;
  blocks->block_bytes_ = space.block_bytes;
  return blocks;
}

namespace {

// Blocks in staging memory that this node does not share.
class FromElsewhere final : public BlockSource {
 public:
  explicit FromElsewhere(const StagedBlocks& blocks) : blocks_(blocks) {}
  bool fill(std::size_t, std::byte*, Hash128&) override { return false; }  // there is a place
  const std::byte* place(std::size_t index) const override { return blocks_.memory(index); }

 private:
  const StagedBlocks& blocks_;
};

}  // namespace

void ShmChannel::put_staged(const PutCall& call, StagedBlocks& blocks, PutStatus* statuses) {
  const std::span all(statuses, call.keys.size());
  const ShmUse use = this->use(call.space, at_least_a_way(call.deadline));
  KVP_CHECK(call.keys.size() <= blocks.count() && call.space.block_bytes == blocks.block_bytes_);
  if (!use) {
    std::ranges::fill(all, PutStatus::disconnected);
    return;
  }
  if (use.client != blocks.client_) {
    FromElsewhere source(blocks);
    put(call, source, statuses);
    return;
  }
  if (blocks.is_awaited()) use.client->find_lanes();
  if (blocks.is_awaited()) {
    std::ranges::fill(all, PutStatus::timed_out);
    return;
  }
  ClientLane* const lane = all.empty() ? nullptr : lane_for(use, all);
  if (lane == nullptr) return;
  const std::uint64_t key_bytes = lane_key_bytes(call.keys.size(), call.parent != nullptr);
  const auto payload_at = static_cast<std::uint64_t>(blocks.payload_ - use.client->staging());
  lane->used = blocks.run_;
  {
    LaneCall request(*use.client, *lane, use.deadline);
    request.ask({.op = LaneOp::put,
                 .space = use.number,
                 .keys = call.keys,
                 .parent = call.parent,
                 .window_offset = payload_at - key_bytes,
                 .ring_bytes = call.keys.size() * blocks.stride()});
    request.show(call.keys.size() * blocks.stride());
    request.rouse();
    read_statuses(request, all);
  }
  const auto missing = std::ranges::find_if_not(all, is_there);
  if (missing != all.end()) std::fill(missing + 1, all.end(), PutStatus::chain_broken);
}

namespace {

// One block of a caller's, made in place.
class Placed final : public Room {
 public:
  Placed(ShmChannel& channel, const PutCall& call, std::unique_ptr<StagedBlocks> blocks)
      : channel_(channel),
        space_(call.space),
        key_(call.keys[0]),
        has_parent_(call.parent != nullptr),
        blocks_(std::move(blocks)) {
    if (has_parent_) parent_ = *call.parent;
    memory = blocks_->memory(0);
  }
  PutStatus commit(Deadline deadline) override {
    PutStatus status = PutStatus::failed;
    fence_before_publish();  // the caller may have stored past the cache
    channel_.put_staged({space_, {&key_, 1}, has_parent_ ? &parent_ : nullptr, deadline}, *blocks_,
                        &status);
    return status;
  }

 private:
  ShmChannel& channel_;
  const Space& space_;
  const Hash128 key_;
  Hash128 parent_;
  const bool has_parent_;
  const std::unique_ptr<StagedBlocks> blocks_;
};

}  // namespace

std::unique_ptr<Room> ShmChannel::reserve(const PutCall& call, PutStatus& status) {
  if (look(call.space, call.keys.first(1)) == 1) {
    status = PutStatus::present;
    return nullptr;
  }
  auto blocks = reserve_many(call.space, 1, status);
  if (blocks == nullptr) return nullptr;
  return std::make_unique<Placed>(*this, call, std::move(blocks));
}

}  // namespace kvpool
