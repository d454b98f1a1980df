// A client that writes anything at all into the memory it shares with its node: the node lives, its
// books hold, and other clients get their bytes.
#include <algorithm>
#include <random>

#include "block_random.h"
#include "net/lane_call.h"
#include "net/shm_use.h"
#include "net_shm.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;

using test::after;
using test::all_are;
using test::get_through;
using test::keys_from;
using test::kKiB;
using test::NamedSpace;
using test::never_hung;
using test::put_through;
using test::ShmHost;

constexpr std::uint64_t kBytes = 16 * kKiB;
constexpr std::uint64_t kExtremes[] = {0,
                                       1,
                                       2,
                                       63,
                                       kKeysPerLane,
                                       kKeysPerLane + 1,
                                       0x7fff'ffff,
                                       0xffff'ffff,
                                       0x1'0000'0000,
                                       0x7fff'ffff'ffff'ffff,
                                       0x8000'0000'0000'0000,
                                       0xffff'ffff'ffff'ffc0,
                                       0xffff'ffff'ffff'ffff};

NodeOptions pool_of(std::uint64_t units) { return test::Pool::plain(units * kUnitBytes); }

std::byte* control_of(ShmClient& client) {
  return reinterpret_cast<std::byte*>(&client.page()) - kPageOffset;
}
Lane& lane_of(ShmClient& client, std::uint32_t number) {
  return *reinterpret_cast<Lane*>(control_of(client) + kLanesOffset + number * kLaneBytes);
}

// The honest one beside it finds what it put, and can put more.
void check_bystander(const ShmHost& host, Channel& bystander, const Space& space,
                     std::span<const Hash128> keys) {
  std::size_t wrong = 0;
  Miss why = Miss::none;
  CHECK(get_through(bystander, space, keys, wrong, why) == keys.size());
  CHECK(wrong == 0);
  CHECK(all_are(put_through(bystander, space, keys), PutStatus::present));
  host.node->check_invariants();
}

using Word = std::atomic<std::uint64_t>;
struct Field {
  const char* name;
  Word& (*of)(Lane&);
};
constexpr Field kFields[] = {
    {"asked", [](Lane& l) -> Word& { return l.asked; }},
    {"op", [](Lane& l) -> Word& { return l.op; }},
    {"space", [](Lane& l) -> Word& { return l.space; }},
    {"count", [](Lane& l) -> Word& { return l.count; }},
    {"skip", [](Lane& l) -> Word& { return l.skip; }},
    {"has_parent", [](Lane& l) -> Word& { return l.has_parent; }},
    {"deadline_us", [](Lane& l) -> Word& { return l.deadline_us; }},
    {"cancelled", [](Lane& l) -> Word& { return l.cancelled; }},
    {"window_offset", [](Lane& l) -> Word& { return l.window_offset; }},
    {"window_bytes", [](Lane& l) -> Word& { return l.window_bytes; }},
    {"staged", [](Lane& l) -> Word& { return l.staged; }},
    {"client_waits", [](Lane& l) -> Word& { return l.client_waits; }},
    {"node_wake", [](Lane& l) -> Word& { return l.node_wake; }},
    {"taken", [](Lane& l) -> Word& { return l.taken; }},
    {"node_waits", [](Lane& l) -> Word& { return l.node_waits; }},
    {"client_wake", [](Lane& l) -> Word& { return l.client_wake; }},
    {"answered", [](Lane& l) -> Word& { return l.answered; }},
    {"node_polls", [](Lane& l) -> Word& { return l.node_polls; }},
};

// A request that would do, but for one field. Rings whatever the lane says.
void ask_with(ShmClient& client, ClientLane& mine, const Space& space, LaneOp op,
              const Field& field, std::uint64_t value) {
  const auto keys = keys_from(70'000, 3);
  racy_fill(client.staging() + mine.window.offset(), keys.data(), 3 * kHashBytes);
  Lane& lane = *mine.shared;
  const auto number = lane.answered.load() + 1;
  lane.op = static_cast<std::uint64_t>(op);
  lane.space = space.number.load();
  lane.count = 3;
  lane.skip = 0;
  lane.has_parent = 0;
  lane.deadline_us = 20'000;
  lane.window_offset = mine.window.offset();
  lane.window_bytes = lane_key_bytes(3, false) + 3 * kBytes;
  lane.staged = op == LaneOp::put ? 3 * kBytes : 0;
  lane.asked = number;
  field.of(lane) = value;
  const std::uint64_t once = 1;
  REQUIRE(write(mine.bell.get(), &once, sizeof once) == sizeof once);
}

TEST_CASE("hostile lane: every field of a request may hold anything") {
  const ShmHost host(pool_of(4));
  const NamedSpace space(host.space(1, kBytes));
  const auto bystander = host.channel();
  const auto kept = keys_from(1, 12);
  REQUIRE(all_are(put_through(*bystander, space, kept), PutStatus::stored));
  std::shared_ptr<ShmClient> client;
  std::size_t closed = 0, asked = 0;
  for (const LaneOp op : {LaneOp::put, LaneOp::get})
    for (const Field& field : kFields)
      for (const std::uint64_t value : kExtremes) {
        if (!client || client->look()) client = host.client();
        ClientLane* const mine = client->take_lane(never_hung());
        REQUIRE(mine != nullptr);
        ask_with(*client, *mine, space, op, field, value);
        ++asked;
        // Answered, closed, or (no such number) not seen as a request at all.
        const auto number = mine->shared->asked.load();
        const auto until = after(200ms);
        while (!client->look() && mine->shared->answered.load() != number &&
               std::chrono::steady_clock::now() < until)
          std::this_thread::yield();
        closed += client->is_broken();
        client->break_off();  // what it wrote over what belongs to the node stays with it
        client.reset();
      }
  MESSAGE("asked " << asked << ", closed " << closed
                   << "; last: " << host.server->stats().last_closed);
  CHECK(closed > 20);
  CHECK(host.server->stats().closed_garbage > 20);
  CHECK(host.comes_to_rest(10s));
  check_bystander(host, *bystander, space, kept);
}

// Any word of what the client shares, or most of them in a lane, at random; of bells and counters,
// values that look as if they were meant.
void scribble(ShmClient& client, std::uint32_t lanes, std::mt19937_64& random) {
  const auto word_at = [](std::byte* at, std::uint64_t offset) -> Word& {
    return *reinterpret_cast<Word*>(at + offset / 8 * 8);
  };
  Lane& lane = lane_of(client, static_cast<std::uint32_t>(random() % lanes));
  const std::uint64_t value =
      random() % 2 == 0 ? random() : kExtremes[random() % std::size(kExtremes)];
  switch (random() % 6) {
    case 0:
      word_at(control_of(client), random() % control_bytes(lanes)) = value;
      return;
    case 1:
      word_at(client.staging(), random() % (64 * kKiB)) = value;
      return;
    case 2:
      lane.staged = random() % 3 == 0 ? value : lane.taken.load() + random() % (64 * kKiB);
      return;
    case 3:
      kFields[random() % std::size(kFields)].of(lane) = value;
      return;
    case 4:
      word_at(reinterpret_cast<std::byte*>(&client.page()), random() % sizeof(ClientPage)) = value;
      return;
    default:
      lane.asked = lane.answered.load() + 1;
  }
}

// What it gets is its own scribbling: not looked at.
class BlindSink final : public BlockSink {
 public:
  bool deliver(std::size_t, const IndexReader&, const Found&) override { return true; }
  bool deliver_whole(std::size_t, std::span<const std::byte>) override { return true; }
};

// A short life of a client that asks and scribbles at once.
void live_and_scribble(const ShmHost& host, const Space& space, std::uint64_t seed) {
  const auto client = host.client();
  ShmChannel channel(nullptr, {.call_time_max = 30ms});
  channel.attach(client);
  std::atomic<bool> done{false};
  std::thread scribbler([&] {
    std::mt19937_64 random(seed);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
    for (int i = 0; i < 400 && !done && !client->is_broken(); ++i) {
      scribble(*client, ShmHost::small().lanes, random);
      for (std::uint64_t wait = random() % 2000; wait > 0; --wait) pause_core();
    }
  });
  for (std::uint64_t i = 0; i < 6 && !client->look(); ++i) {
    const auto keys = keys_from(1'000'000 + (seed % 50) * 10 + i, 5);
    test::PlacedSource source(keys, kBytes);
    put_through(channel, space, keys, source, nullptr, after(10ms));
    ShmUse use{.client = client, .space = space, .deadline = after(10ms)};
    use.number = space.number;
    BlindSink sink;
    Miss why = Miss::none;
    get_by_lane(use, keys, 0, sink);
    (void)channel.acquire(space, keys, why);
  }
  done = true;
  scribbler.join();
}

TEST_CASE("hostile lane: a node outlives clients that scribble over all they share with it") {
  test::Random random("hostile lane");
  const ShmHost host(pool_of(4));
  const NamedSpace space(host.space(1, kBytes)), other(host.space(2, kBytes));
  const auto bystander = host.channel();
  const auto kept = keys_from(1, 12);
  REQUIRE(all_are(put_through(*bystander, other, kept), PutStatus::stored));
  for (std::size_t life = 0; life < test::scaled(60); ++life) {
    live_and_scribble(host, space, random.engine()());
    if (life % 10 == 0) check_bystander(host, *bystander, other, kept);
  }
  CHECK(host.comes_to_rest(10s));
  check_bystander(host, *bystander, other, kept);
  MESSAGE("closed " << host.server->stats().closed_garbage
                    << "; last: " << host.server->stats().last_closed);
  CHECK(host.server->stats().closed_garbage > 0);
  // The last one of them is being closed, perhaps.
  const auto until = after(10s);
  while (host.server->stats().shm_clients > 1) REQUIRE(std::chrono::steady_clock::now() < until);
  CHECK(host.server->stats().shm_clients == 1);
}

}  // namespace
}  // namespace kvpool
