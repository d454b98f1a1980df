// The simulator against a list that plays LRU, Belady as a bound, and the corners of a request.
#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include "policy/belady.h"
#include "policy/simulator.h"
#include "policy_testing.h"

namespace kvpool {
namespace {

using testing::Random;
using Name = BlockNames::Name;
using Trace = std::vector<std::vector<Name>>;

// Paths from the root of a random tree: equal names mean equal prefixes, as in real traces. Every
// trace interns its names in order of appearance, so that a head has a smaller one than its tail.
Trace random_trace(Random& random, BlockNames& names, int requests) {
  std::vector<std::vector<std::uint64_t>> chains{{}};
  std::uint64_t next_id = 1;
  Trace trace;
  for (int i = 0; i < requests; ++i) {
    std::vector<std::uint64_t> chain =
        chains[chains.size() - 1 - random.below(std::min<std::uint64_t>(chains.size(), 12))];
    if (!chain.empty() && random.one_in(3)) chain.resize(1 + random.below(chain.size()));
    for (std::uint64_t more = random.below(4); more > 0; --more) chain.push_back(next_id++);
    if (chain.size() > 12) chain.resize(12);
    chains.push_back(chain);
    trace.emplace_back();
    for (const std::uint64_t id : chain) trace.back().push_back(names.intern(id * 1'000'003));
  }
  return trace;
}

SimulatorReport replay(Simulator& simulator, const Trace& trace) {
  Seconds now = 0;
  for (const auto& request : trace) simulator.request(request, now += 1);
  simulator.finish();
  return simulator.report();
}

SimulatorReport replay(std::optional<PolicyKind> policy, BlockId capacity, const BlockNames& names,
                       const Trace& trace) {
  return replay(*make_simulator({policy, capacity}, names), trace);
}

// Most recent first. Each request ends with all its resident blocks in front, head foremost.
SimulatorReport list_lru(std::size_t capacity, const Trace& trace) {
  SimulatorReport report;
  std::vector<Name> list;
  auto resident = [&](Name name) { return std::find(list.begin(), list.end(), name); };
  for (const auto& request : trace) {
    ++report.requests;
    report.blocks += request.size();
    std::size_t hits = 0;
    while (hits < request.size() && resident(request[hits]) != list.end()) ++hits;
    report.hit_blocks += hits;
    std::size_t served = 0;
    for (; served < request.size(); ++served) {
      if (resident(request[served]) != list.end()) continue;
      if (list.size() == capacity) {
        const auto victim = std::find_if(list.rbegin(), list.rend(), [&](Name name) {
          return std::find(request.begin(), request.end(), name) == request.end();
        });
        if (victim == list.rend()) break;
        list.erase(std::next(victim).base());
        ++report.evictions;
      }
      list.insert(list.begin(), request[served]);
    }
    for (std::size_t i = served; i-- > 0;) {
      const auto at = resident(request[i]);
      std::rotate(list.begin(), at, at + 1);
    }
  }
  return report;
}

TEST_CASE("simulator: LRU equals a list that is searched, to the block") {
  Random random(testing::seed());
  for (int run = 0; run < 20; ++run) {
    BlockNames names;
    const Trace trace = random_trace(random, names, 300);
    for (const BlockId capacity : {1u, 3u, 7u, 20u, 60u, 5000u}) {
      CAPTURE(capacity);
      const SimulatorReport got = replay(PolicyKind::lru, capacity, names, trace);
      const SimulatorReport expected = list_lru(capacity, trace);
      REQUIRE(got.requests == expected.requests);
      REQUIRE(got.blocks == expected.blocks);
      REQUIRE(got.hit_blocks == expected.hit_blocks);
      REQUIRE(got.evictions == expected.evictions);
    }
  }
}

TEST_CASE("simulator: no online policy beats Belady, and a cache that holds all beats none") {
  Random random(testing::seed());
  for (int run = 0; run < 20; ++run) {
    BlockNames names;
    const Trace trace = random_trace(random, names, 300);
    for (const BlockId capacity : {2u, 5u, 12u, 30u, 80u}) {
      const std::uint64_t best = replay(std::nullopt, capacity, names, trace).hit_blocks;
      for (const PolicyKind kind : kPolicyKinds) {
        CAPTURE(policy_name(kind));
        CAPTURE(capacity);
        REQUIRE(replay(kind, capacity, names, trace).hit_blocks <= best);
      }
    }
    const auto roomy = static_cast<BlockId>(names.size());
    const SimulatorReport all = replay(std::nullopt, roomy, names, trace);
    CHECK(all.hit_blocks == all.blocks - names.size());
    for (const PolicyKind kind : kPolicyKinds) {
      const SimulatorReport report = replay(kind, roomy, names, trace);
      CHECK(report.hit_blocks == all.hit_blocks);
      CHECK(report.evictions == 0);
    }
  }
}

TEST_CASE(
    "belady: the plain rule evicts the chain it serves and loses to LRU; the guarded one does "
    "not") {
  // Room for two. Block 1 was just served and is far from its next use when 2 and 3 come in.
  const Trace trace{{0, 1}, {0, 1, 2, 3}, {0, 1}};
  BlockNames names;
  for (std::uint64_t id = 0; id < 4; ++id) names.intern(id);
  BeladySimulator plain(2, BeladyRule::plain);
  BeladySimulator guarded(2, BeladyRule::guarded);
  CHECK(replay(PolicyKind::lru, 2, names, trace).hit_blocks == 4);
  CHECK(replay(plain, trace).hit_blocks == 3);
  CHECK(replay(guarded, trace).hit_blocks == 4);
}

TEST_CASE("belady: a block that would only push out a nearer one is passed over") {
  BlockNames names;
  for (std::uint64_t id = 0; id < 3; ++id) names.intern(id);
  const SimulatorReport report = replay(std::nullopt, 1, names, {{0}, {1}, {0}, {2}, {0}});
  CHECK(report.hit_blocks == 2);
  CHECK(report.evictions == 0);
}

TEST_CASE("simulator: the same trace gives the same figures") {
  Random random(testing::seed());
  BlockNames names;
  const Trace trace = random_trace(random, names, 500);
  for (const PolicyKind kind : kPolicyKinds) {
    const SimulatorReport one = replay(kind, 20, names, trace);
    const SimulatorReport two = replay(kind, 20, names, trace);
    CHECK(one.hit_blocks == two.hit_blocks);
    CHECK(one.evictions == two.evictions);
    CHECK(one.ghosts_peak == two.ghosts_peak);
    CHECK(one.ghosts_peak <= 16 * 20);
  }
}

TEST_CASE("simulator: a request larger than the cache keeps its head and evicts none of itself") {
  for (const PolicyKind kind : kPolicyKinds) {
    CAPTURE(policy_name(kind));
    BlockNames names;
    Trace trace(3);
    for (std::uint64_t id = 0; id < 10; ++id) {
      for (auto& request : trace) request.push_back(names.intern(id));
    }
    const SimulatorReport report = replay(kind, 4, names, trace);
    CHECK(report.hit_blocks == 8);  // 4 in each repetition
    CHECK(report.evictions == 0);
  }
}

TEST_CASE("simulator: the tail of a hit counts as used before its head") {
  BlockNames names;
  for (std::uint64_t id = 0; id < 3; ++id) names.intern(id);
  // LFU knows no chains: on equal counts only the order of the touches saves the head.
  CHECK(replay(PolicyKind::lfu, 2, names, {{0, 1}, {0, 1}, {2}, {0, 1}}).hit_blocks == 3);
}

TEST_CASE("simulator: empty requests and repeated ids are survived") {
  for (const PolicyKind kind : kPolicyKinds) {
    BlockNames names;
    const Name a = names.intern(1);
    const Name b = names.intern(2);
    const SimulatorReport report = replay(kind, 2, names, {{}, {a, a, b, a}, {}, {a, a, b, a}});
    CHECK(report.requests == 4);
    CHECK(report.blocks == 8);
    CHECK(report.hit_blocks == 4);
  }
  BlockNames names;
  const Name a = names.intern(1);
  CHECK(replay(std::nullopt, 1, names, {{}, {a, a}, {a, a}}).hit_blocks == 2);
  CHECK(replay(std::nullopt, 1, names, {}).requests == 0);
}

TEST_CASE("names: one number for an id, in order of appearance, also past a growth of the table") {
  BlockNames names;
  for (std::uint64_t id = 0; id < 5000; ++id) REQUIRE(names.intern(id << 40) == id);
  for (std::uint64_t id = 0; id < 5000; ++id) REQUIRE(names.intern(id << 40) == id);
  CHECK(names.size() == 5000);
  CHECK(names.id(4999) == std::uint64_t{4999} << 40);
}

}  // namespace
}  // namespace kvpool
