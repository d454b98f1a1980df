// The watch over LRU: it stays out of the way where heat helps and yields where it harms.
#include <doctest/doctest.h>

#include <queue>
#include <vector>

#include "policy/lru_guard.h"
#include "policy/simulator.h"
#include "policy_testing.h"

namespace kvpool {
namespace {

using testing::Random;

struct TimedRequest {
  Seconds now;
  std::vector<BlockNames::Name> blocks;
};

double hit_rate(PolicyKind kind, BlockId capacity, const BlockNames& names,
                const std::vector<TimedRequest>& trace) {
  const auto simulator = make_simulator({kind, capacity}, names);
  for (const TimedRequest& request : trace) simulator->request(request.blocks, request.now);
  const SimulatorReport report = simulator->report();
  return static_cast<double>(report.hit_blocks) / static_cast<double>(report.blocks);
}

// Conversations that end at random after four turns on average, and pause 20 to 220 s in between.
std::vector<TimedRequest> conversations(Random& random, BlockNames& names, std::size_t requests) {
  const auto is_later = [](const TimedRequest& a, const TimedRequest& b) { return a.now > b.now; };
  std::priority_queue<TimedRequest, std::vector<TimedRequest>, decltype(is_later)> open(is_later);
  std::vector<TimedRequest> trace;
  std::uint64_t next_id = 0;
  for (Seconds start = 0; trace.size() < requests;) {
    if (open.empty() || open.top().now > start) {
      open.push({start, {}});
      start += static_cast<double>(random.below(20));
    }
    TimedRequest turn = open.top();
    open.pop();
    for (std::uint64_t more = 1 + random.below(8); more > 0; --more) {
      turn.blocks.push_back(names.intern(next_id++));
    }
    trace.push_back(turn);
    if (random.one_in(4)) continue;
    turn.now += static_cast<double>(20 + random.below(200));
    open.push(turn);
  }
  return trace;
}

// Past uses of a block say nothing here of uses to come. With room for most live conversations heat
// only keeps finished ones, and without the watch costs 0.03 to 0.04 of hit rate; with little room
// it pays.
TEST_CASE("where the past foretells nothing, temperature stays near LRU") {
  Random random(testing::seed());
  BlockNames names;
  const auto trace = conversations(random, names, 15'000);
  const double lru = hit_rate(PolicyKind::lru, 1300, names, trace);
  CHECK(hit_rate(PolicyKind::temperature, 1300, names, trace) > lru - 0.02);
  const double lru_tight = hit_rate(PolicyKind::lru, 700, names, trace);
  CHECK(hit_rate(PolicyKind::temperature, 700, names, trace) > lru_tight + 0.02);
}

// A scan wider than the cache runs between the uses of a hot set: LRU loses the hot set each time.
TEST_CASE("where heat helps it keeps its full weight") {
  const auto policy = make_policy(PolicyKind::temperature, {100, 1600, 0});
  Seconds now = 0;
  Fingerprint one_off = 1000;
  std::vector<Fingerprint> held(100, 0);  // by id
  auto use = [&](Fingerprint fp) {
    for (BlockId id = 0; id < 100; ++id) {
      if (held[id] == fp) return policy->touch(id, now);
    }
    BlockId id = static_cast<BlockId>(policy->stats().resident);
    if (id == 100) {
      id = policy->take_coldest(0);
      policy->erase(id, held[id], Leave::evicted, now);
    }
    held[id] = fp;
    policy->insert(id, fp, kNoBlock, 0, now);
  };
  for (int round = 0; round < 400; ++round) {
    for (Fingerprint hot = 1; hot <= 50; ++hot) use(hot);
    now += 10;
    for (int i = 0; i < 120; ++i) use(one_off++);
    now += 10;
    REQUIRE(policy->stats().heat_weight == 1);
  }
}

struct Load {
  LruGuard guard;
  std::uint64_t capacity;
  Fingerprint fp = 0;

  // Uses that miss in the cache although LRU, whose list they are in, would have had them.
  void lost_uses(int uses) {
    for (int i = 0; i < uses; ++i) {
      guard.inserted(0, fp++ % (capacity / 2));
      guard.left(0);
      guard.saw_full(capacity);
    }
  }
  // Uses that miss in both.
  void new_uses(int uses) {
    for (int i = 0; i < uses; ++i) {
      guard.inserted(0, 1'000'000 + fp++);
      guard.left(0);
      guard.saw_full(capacity);
    }
  }
};

TEST_CASE("the weight falls while LRU leads, and comes back when it does not") {
  for (const std::uint64_t capacity : {64u, 2000u, 10'000u}) {
    CAPTURE(capacity);
    Load load{LruGuard(), capacity};
    load.new_uses(20'000);
    CHECK(load.guard.weight() == 1);
    load.lost_uses(static_cast<int>(40 * capacity) + 20'000);
    CHECK(load.guard.weight() == 0);
    load.new_uses(static_cast<int>(250 * capacity) + 100'000);
    CHECK(load.guard.weight() == 1);
    load.guard.check_invariants();
  }
}

TEST_CASE("before anything is evicted the weight does not move") {
  LruGuard guard;
  for (int i = 0; i < 100'000; ++i) {
    guard.inserted(0, static_cast<Fingerprint>(i % 10));
    guard.left(0);
  }
  CHECK(guard.weight() == 1);
}

TEST_CASE("the sample stays small and holds the same blocks") {
  LruGuard guard;
  for (std::uint64_t resident = 1; resident <= 1u << 20; ++resident) guard.saw_resident(resident);
  std::vector<bool> is_watched;
  std::uint64_t watched = 0;
  for (Fingerprint fp = 0; fp < 1u << 20; ++fp) {
    is_watched.push_back(guard.inserted(static_cast<BlockId>(fp), fp * 0x9e3779b97f4a7c15u));
    watched += is_watched.back();
  }
  CHECK(watched > (1u << 20) / 512 / 2);
  CHECK(watched < (1u << 20) / 512 * 2);
  CHECK(guard.bytes() <= 256 * 1024);
  for (Fingerprint fp = 0; fp < 1000; ++fp) {
    CHECK(guard.inserted(static_cast<BlockId>(fp), fp * 0x9e3779b97f4a7c15u) == is_watched[fp]);
  }
}

}  // namespace
}  // namespace kvpool
