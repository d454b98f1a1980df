#include "net/lane_serve.h"

#include <algorithm>

#include "block/copy.h"
#include "net/admitted_put.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;

// Who comes back within kSoon is waited for awake, for kPoll: a sleep and a wake-up cost both sides
// up to 50 us. Who does not would only make the node spin for nothing.
constexpr auto kSoon = 100us;
constexpr auto kPoll = 50us;

}  // namespace

LaneServe::Served LaneServe::serve() {
  lane_.node_polls.store(1, std::memory_order_relaxed);
  for (;;) {
    while (is_asked() && !host_.ended.load(std::memory_order_acquire))
      if (!carry_out()) return Served::garbage;
    if (host_.ended.load(std::memory_order_acquire)) return Served::ended;
    if (is_busy_ && spin_until([&] { return is_asked(); }, kPoll)) continue;
    lane_.node_polls.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // a client: asked -> fence -> node_polls
    if (!is_asked()) return Served::quiet;
    lane_.node_polls.store(1, std::memory_order_relaxed);
  }
}

bool LaneServe::carry_out() {
  is_busy_ = std::chrono::steady_clock::now() - answered_at_ < kSoon;
  alignas(Hash128) std::byte memory[sizeof(Keys)];  // not initialized: 16 KiB for every request
  auto* const keys = reinterpret_cast<Hash128*>(memory);
  LaneRequest request;
  if (!read(request, keys)) return false;
  host_.books.requests.fetch_add(1, std::memory_order_relaxed);
  host_.client->requests.fetch_add(1, std::memory_order_relaxed);
  Refusal refused = Refusal::none;
  if (host_.books.draining.load(std::memory_order_acquire)) {
    refused = Refusal::draining;
  } else if (request.space == nullptr) {
    refused = Refusal::no_space;
  } else if (!(request.op == LaneOp::put ? put(request) : get(request))) {
    return garbage("a lane's client counted payload that cannot be there");
  }
  answer(request.number, refused);
  return true;
}

// Every word is loaded once. What follows uses the copy alone.
bool LaneServe::read(LaneRequest& request, Hash128* keys) {
  request.number = lane_.asked.load(std::memory_order_acquire);
  if (request.number != answered_ + 1)
    return garbage("a lane's requests are not numbered in order");
  const std::uint64_t op = lane_.op.load(std::memory_order_relaxed);
  const std::uint64_t count = lane_.count.load(std::memory_order_relaxed);
  const std::uint64_t space = lane_.space.load(std::memory_order_relaxed);
  const std::uint64_t deadline_us = lane_.deadline_us.load(std::memory_order_relaxed);
  const bool has_parent = lane_.has_parent.load(std::memory_order_relaxed) != 0;
  request.skip = lane_.skip.load(std::memory_order_relaxed);
  if (op != static_cast<std::uint64_t>(LaneOp::put) &&
      op != static_cast<std::uint64_t>(LaneOp::get))
    return garbage("a lane has no such operation");
  if (count == 0 || count > kKeysPerLane) return garbage("a lane's request has no such count");
  if (request.skip > count) return garbage("a lane's request skips more blocks than it names");
  if (space > ~std::uint32_t{0}) return garbage("a lane names no such namespace");
  request.op = static_cast<LaneOp>(op);
  request.space = host_.node.space(static_cast<std::uint32_t>(space));
  request.deadline =
      std::chrono::steady_clock::now() +
      std::min(host_.request_max, std::chrono::microseconds(std::min<std::uint64_t>(
                                      deadline_us, std::uint64_t{kDeadlineMaxMs} * 1000)));
  request.keys = {keys + (has_parent ? 1 : 0), count};
  request.parent = has_parent ? keys : nullptr;
  return read_window(request, has_parent, keys);
}

bool LaneServe::read_window(LaneRequest& request, bool has_parent, Hash128* keys) {
  const std::uint64_t offset = lane_.window_offset.load(std::memory_order_relaxed);
  const std::uint64_t bytes = lane_.window_bytes.load(std::memory_order_relaxed);
  if (offset % kLaneAlign != 0 || bytes % kLaneAlign != 0)
    return garbage("a lane's window is not on a cache line");
  if (offset > host_.staging_bytes || bytes > host_.staging_bytes - offset)
    return garbage("a lane's window is not inside the staging memory");
  const std::uint64_t key_bytes = lane_key_bytes(request.keys.size(), has_parent);
  const bool has_payload = request.op == LaneOp::get || request.skip < request.keys.size();
  if (bytes < key_bytes + (has_payload ? kLaneAlign : 0))
    return garbage("a lane's window has no room for what is asked");
  racy_copy(keys, host_.staging + offset, (request.keys.size() + has_parent) * kHashBytes);
  request.ring = host_.staging + offset + key_bytes;
  request.ring_bytes = bytes - key_bytes;
  return true;
}

// False: garbage.
bool LaneServe::put(const LaneRequest& request) {
  PutStatus statuses[kKeysPerLane];
  LaneSource source(host_, lane_, request);
  const auto given_up = [&] {
    return host_.ended.load(std::memory_order_acquire) ||
           lane_.cancelled.load(std::memory_order_acquire) == request.number;
  };
  const std::span all(statuses, request.keys.size());
  put_admitted(host_.node, host_.books.puts,
               {*request.space, request.keys, request.parent, request.deadline, given_up, true},
               request.skip, source, all);
  // The first that failed is the one whose payload was wanted.
  if (source.is_payload_due()) std::ranges::replace(all, PutStatus::failed, PutStatus::payload_due);
  request.space->traffic->count_put(all);
  if (source.is_garbage()) return false;
  for (std::size_t i = 0; i < all.size(); ++i)
    lane_.status[i].store(static_cast<std::uint8_t>(all[i]), std::memory_order_relaxed);
  lane_.done.store(request.keys.size(), std::memory_order_relaxed);
  host_.books.bytes_in.fetch_add(source.bytes(), std::memory_order_relaxed);
  host_.client->bytes_in.fetch_add(source.bytes(), std::memory_order_relaxed);
  return true;
}

// Some of the time is for the way of the bytes through the ring.
Reach LaneServe::reach_of(const LaneRequest& request) {
  const auto now = std::chrono::steady_clock::now();
  return Reach::by(now + (request.deadline - now) / 4 * 3);
}

bool LaneServe::get(const LaneRequest& request) {
  const std::uint64_t block_bytes = request.space->block_bytes;
  LaneSink sink(host_, lane_, request);
  Loaded loaded{.why = Miss::limited};
  // Its client has just seen these blocks, so what it asks for is what it gets.
  if (host_.books.gets.admit(request.keys.size() * block_bytes))
    host_.node.get_part(*request.space, request.keys, sink, loaded, reach_of(request));
  request.space->traffic->count_get(request.keys.size(), loaded);
  host_.client->count_get(loaded, block_bytes);
  if (sink.is_garbage()) return false;
  lane_.done.store(loaded.blocks(), std::memory_order_relaxed);
  lane_.miss.store(static_cast<std::uint64_t>(loaded.why), std::memory_order_relaxed);
  host_.books.bytes_out.fetch_add(sink.bytes(), std::memory_order_relaxed);
  host_.client->bytes_out.fetch_add(sink.bytes(), std::memory_order_relaxed);
  return true;
}

void LaneServe::answer(std::uint64_t number, Refusal refused) {
  lane_.refused.store(static_cast<std::uint64_t>(refused), std::memory_order_relaxed);
  // Of the request before: what is in the ring is that one's.
  if (refused != Refusal::none) lane_.done.store(0, std::memory_order_relaxed);
  lane_.taken.store(0, std::memory_order_relaxed);  // for the next request
  lane_.answered.store(number, std::memory_order_release);
  client_sleeper(lane_).rouse();
  answered_ = number;
  answered_at_ = std::chrono::steady_clock::now();
}

}  // namespace kvpool
