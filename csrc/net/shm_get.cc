// Copying out: straight from the arena, by generation; what cannot be had that way, through a lane.
#include <algorithm>
#include <vector>

#include "block/copy.h"
#include "net/lane_call.h"
#include "net/shm_use.h"

namespace kvpool {
namespace {

constexpr std::size_t kTouchBatch = 256;
constexpr int kPinTries = 2;  // to find and hold a block that is moved just then

enum class Got : std::uint8_t { whole, absent, moved, on_ssd, elsewhere };

// After one copy that came to nothing: hold the block, so that the next one cannot.
Got get_pinned(const ShmUse& use, const Hash128& key, std::size_t index, BlockSink& sink,
               Found& found) {
  HazardPin pin(*use.client);
  for (int i = 0; i < kPinTries; ++i) {
    if (!use.find(key, found)) return Got::moved;
    if ((found.tier & kTierDram) == 0) return Got::on_ssd;
    if (pin.hold(found)) return sink.deliver(index, use.reader(), found) ? Got::whole : Got::moved;
  }
  return Got::elsewhere;
}

Got get_in_place(const ShmUse& use, const Hash128& key, std::size_t index, BlockSink& sink,
                 Found& found) {
  if (!use.find(key, found)) return Got::absent;
  if ((found.tier & kTierDram) == 0) return Got::on_ssd;
  if (sink.deliver(index, use.reader(), found)) return Got::whole;
  return get_pinned(use, key, index, sink, found);
}

// Leading blocks that lie on the SSD alone, or are not here at all: those behind them are copied in
// place again.
std::size_t run_of_node(const ShmUse& use, std::span<const Hash128> keys, Got first) {
  std::size_t run = 1;
  for (Found found; run < keys.size(); ++run) {
    const bool is_here = use.find(keys[run], found);
    if (is_here != (first == Got::on_ssd) || (is_here && (found.tier & kTierDram) != 0)) break;
  }
  return run;
}

// What a lane get passes through: as many whole blocks as the lane's window holds, or room for one
// made for it; or, for blocks larger than any room, a window that they stream through.
struct Window {
  std::uint64_t offset = 0, ring_bytes = 0;

  Window(ShmClient& client, ClientLane& lane, std::size_t keys, std::uint64_t stride) {
    const std::uint64_t key_bytes = lane_key_bytes(keys, false);
    if (lane.window.bytes() < key_bytes + stride)
      if (auto own = client.room().take(key_bytes + std::min<std::uint64_t>(keys, 2) * stride); own)
        lane.used = std::make_shared<StagingRun>(std::move(own));
    const StagingRun& run = lane.used ? *lane.used : lane.window;
    offset = run.offset();
    ring_bytes = (run.bytes() - key_bytes) / kLaneAlign * kLaneAlign;
    if (ring_bytes >= stride)
      ring_bytes = std::min<std::uint64_t>(keys, ring_bytes / stride) * stride;
  }
};

// The bytes of one block, from the ring to the sink. False: not whole, or not wanted.
bool deliver_streamed(LaneCall& call, std::uint64_t block_bytes, std::size_t index,
                      std::size_t in_call, BlockSink& sink) {
  const std::uint64_t stride = block_stride(block_bytes);
  const std::uint64_t start = index * stride;
  std::byte* place = sink.place(in_call);
  std::vector<std::byte> own(place == nullptr ? block_bytes : 0);
  std::byte* const to = place == nullptr ? own.data() : place;
  for (std::uint64_t done = 0; done < block_bytes;) {
    const std::uint64_t at = start + done;
    const std::uint64_t piece = std::min(
        {std::uint64_t{256} << 10, block_bytes - done, call.left_in_ring(at), call.half_ring()});
    if (!call.wait_for_payload(at + piece, stride)) return false;
    racy_copy(to + done, call.ring(at), piece);
    done += piece;
    call.show(start + done);
  }
  if (!call.wait_for_payload(start + stride, stride)) return false;
  call.show(start + stride);
  return place != nullptr || sink.deliver_whole(in_call, own);
}

bool deliver(LaneCall& call, std::uint64_t block_bytes, std::size_t index, std::size_t in_call,
             BlockSink& sink) {
  const std::uint64_t stride = block_stride(block_bytes);
  if (call.ring_bytes() < stride) return deliver_streamed(call, block_bytes, index, in_call, sink);
  if (!call.wait_for_payload((index + 1) * stride, stride)) return false;
  if (!sink.deliver_whole(in_call, {call.ring(index * stride), block_bytes})) return false;
  call.show((index + 1) * stride);
  return true;
}

Miss miss_of(const ShmUse& use, const LaneCall& call) {
  if (use.client->is_broken()) return Miss::disconnected;
  if (!call.is_answered())  // else it was delivered, and the sink did not want it
    return std::chrono::steady_clock::now() >= use.deadline ? Miss::timed_out : Miss::moved;
  switch (call.refusal()) {
    case Refusal::none:
      return call.miss() == Miss::none ? Miss::moved : call.miss();
    case Refusal::no_space:
      return Miss::absent;
    default:
      return Miss::disconnected;
  }
}

}  // namespace

LaneGot get_by_lane(ShmUse& use, std::span<const Hash128> keys, std::size_t index,
                    BlockSink& sink) {
  keys = keys.first(std::min<std::size_t>(keys.size(), kKeysPerLane));
  ClientLane* const lane = use.client->take_lane(use.deadline);
  if (lane == nullptr) return {.why = use.client->look() ? Miss::disconnected : Miss::timed_out};
  const Window window(*use.client, *lane, keys.size(), block_stride(use.space.block_bytes));
  LaneCall call(*use.client, *lane, use.deadline);
  call.ask({.op = LaneOp::get,
            .space = use.number,
            .keys = keys,
            .window_offset = window.offset,
            .ring_bytes = window.ring_bytes});
  std::size_t done = 0;
  while (done < keys.size() && deliver(call, use.space.block_bytes, done, index + done, sink))
    ++done;
  LaneGot got{.delivered = done, .asked = keys.size()};
  if (done == keys.size()) {
    call.wait_for_answer();  // it is on its way: the lane stays ours to give back
    return got;
  }
  got.why = miss_of(use, call);
  if (call.is_answered() && call.refusal() != Refusal::none) got.asked = 0;
  return got;
}

std::size_t ShmChannel::get(const Space& space, std::span<const Hash128> keys, BlockSink& sink,
                            Miss& why) {
  ShmUse use = this->use(space, call_deadline());
  why = Miss::disconnected;
  if (!use) return 0;
  Found few[kTouchBatch];
  std::vector<Found> many;  // only for long calls: touches go out tail first, all together
  if (keys.size() > kTouchBatch) many.resize(keys.size());
  Found* const all = many.empty() ? few : many.data();
  std::size_t done = 0, in_place = 0, by_node = 0;
  bool is_first = true;
  for (why = Miss::none; done < keys.size();) {
    if (done % IndexReader::kGroup == 0 && keys.size() > 1)
      use.reader().prefetch(keys.subspan(done, std::min(IndexReader::kGroup, keys.size() - done)),
                            use.incarnation);
    const Got got = get_in_place(use, keys[done], done, sink, all[done]);
    const bool is_far = got == Got::absent && use.incarnation != 0 && use.client->asks_elsewhere();
    if ((got == Got::absent && !is_far) || got == Got::moved) {
      why = got == Got::absent ? Miss::absent : Miss::moved;
      break;
    }
    if (got == Got::whole) {
      ++done, ++in_place;
      continue;
    }
    const auto rest = keys.subspan(done);
    const std::size_t run = got == Got::on_ssd || is_far ? run_of_node(use, rest, got) : 1;
    const LaneGot fetched = get_by_lane(use, rest.first(run), done, sink);
    std::fill_n(all + done, fetched.delivered, Found{});  // the node touched these
    done += fetched.delivered;
    by_node += fetched.asked;
    why = fetched.why;
    if (why == Miss::none) continue;
    is_first = fetched.asked == 0;
    break;
  }
  report_touches(*use.client, {all, done});
  count_get(use, {keys.size() - by_node, in_place, why, is_first});
  return done;
}

}  // namespace kvpool
