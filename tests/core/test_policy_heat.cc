// Heat that is carried: over a restart, from tier to tier, from group to group.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <vector>

#include "policy/policy.h"
#include "policy_testing.h"

namespace kvpool {
namespace {

using testing::Random;

constexpr PolicyKind kHeated[] = {PolicyKind::temperature, PolicyKind::lru};

std::vector<BlockId> drain(Policy& policy, Group group, Seconds now) {
  std::vector<BlockId> order;
  for (;;) {
    const BlockId id = policy.take_coldest(group);
    if (id == kNoBlock) return order;
    policy.erase(id, id, Leave::removed, now);
    order.push_back(id);
  }
}

TEST_CASE("heat is the uses left after decay, now and later, and asking changes nothing") {
  const auto policy = make_policy(PolicyKind::temperature, {4, 0, 100});
  policy->insert(0, 0, kNoBlock, 0, 50);
  for (int use = 0; use < 3; ++use) policy->touch(0, 50);
  const double before = policy->temperature(0);
  CHECK(policy->heat(0, 50) == doctest::Approx(4).epsilon(1e-3));
  CHECK(policy->heat(0, 250) == doctest::Approx(1).epsilon(1e-3));
  CHECK(policy->heat(0, 50) == doctest::Approx(4).epsilon(1e-3));
  CHECK(policy->heat(0, 0) == doctest::Approx(4).epsilon(1e-3));
  CHECK(policy->temperature(0) == before);
  policy->touch(0, 150);
  CHECK(policy->heat(0, 150) == doctest::Approx(3).epsilon(1e-3));
}

TEST_CASE("heat under lru is one at the last use and halves every hour") {
  const auto policy = make_policy(PolicyKind::lru, {4, 0, 0});
  policy->insert(0, 0, kNoBlock, 0, 1e6);
  CHECK(policy->heat(0, 1e6) == 1);
  CHECK(policy->heat(0, 1e6 + 3600) == doctest::Approx(0.5).epsilon(1e-6));
  policy->touch(0, 1e6 + 3600);
  CHECK(policy->heat(0, 1e6 + 3600) == 1);
  CHECK(policy->heat(0, 0) == 1);
  for (const PolicyKind kind : {PolicyKind::lfu, PolicyKind::fifo, PolicyKind::s3fifo}) {
    const auto other = make_policy(kind, {4, 0, 0});
    other->insert(0, 0, kNoBlock, 0, 0);
    CHECK(other->heat(0, 1e6) == 1);
    other->set_heat(0, 0.5, 1e6);
    CHECK(other->heat(0, 1e6) == 1);
  }
}

TEST_CASE("a heat that is set is read back, and counts as no use") {
  for (const PolicyKind kind : kHeated) {
    CAPTURE(policy_name(kind));
    const auto policy = make_policy(kind, {4, 0, 100});
    policy->insert(0, 0, kNoBlock, 0, 1000);
    for (const double heat : {1.0, 0.25, 1e-3, 1e-30, 1e-300}) {
      CAPTURE(heat);
      policy->set_heat(0, heat, 1000);
      CHECK(policy->heat(0, 1000) / heat == doctest::Approx(1).epsilon(1e-4));
    }
  }
  const auto policy = make_policy(PolicyKind::temperature, {4, 0, 100});
  policy->insert(0, 0, kNoBlock, 0, 0);
  policy->set_heat(0, 7, 300);
  policy->touch(0, 300);
  CHECK(policy->heat(0, 300) == doctest::Approx(8).epsilon(1e-3));
}

TEST_CASE("a heat is set as of a time that no use has told yet") {
  for (const PolicyKind kind : kHeated) {
    CAPTURE(policy_name(kind));
    const auto policy = make_policy(kind, {4, 0, 100});
    policy->insert(1, 1, kNoBlock, 0, 0);
    policy->set_heat(1, 0.5, 500);
    CHECK(policy->heat(1, 500) == doctest::Approx(0.5).epsilon(1e-4));
    policy->set_heat(1, 1, 900);
    CHECK(policy->heat(1, 900) == doctest::Approx(1).epsilon(1e-4));
    policy->insert(0, 0, kNoBlock, 0, 900);  // used since
    if (kind == PolicyKind::lru) CHECK(policy->take_coldest(0) == 1);
  }
}

TEST_CASE("any heat is survived and lies in order, the least and what is no number first") {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const double heats[] = {std::numeric_limits<double>::quiet_NaN(),
                          -1,
                          0,
                          5e-324,
                          1e-320,
                          1e-300,
                          1e-9,
                          0.9,
                          1e19,
                          1e300,
                          kInfinity};
  constexpr BlockId kBlocks = std::size(heats);
  for (const PolicyKind kind : kHeated) {
    CAPTURE(policy_name(kind));
    const auto policy = make_policy(kind, {kBlocks + 1, 0, 0});
    for (BlockId id = 0; id < kBlocks; ++id) policy->insert(id, id, kNoBlock, 0, 100);
    for (BlockId id = 0; id < kBlocks; ++id) policy->set_heat(id, heats[id], 100);
    policy->check_invariants();
    for (BlockId id = 0; id < kBlocks; ++id) CHECK(std::isfinite(policy->temperature(id)));
    for (BlockId id = 4; id < kBlocks; ++id)
      CHECK(policy->temperature(id) >= policy->temperature(id - 1));
    for (BlockId id = 3; id < 8; ++id) CHECK(policy->temperature(id) > policy->temperature(2));
    CHECK(policy->temperature(0) == policy->temperature(2));
    CHECK(policy->temperature(1) == policy->temperature(2));
    for (BlockId id = 0; id < kBlocks; ++id) policy->touch(id, 100);
    for (BlockId id = 0; id < kBlocks; ++id) CHECK(std::isfinite(policy->temperature(id)));
    policy->check_invariants();
  }
}

// A first life ends, its blocks are put back in any order into a second one: then those who were
// not used since go in the order in which they would have gone.
TEST_CASE("order survives a restart") {
  Random random(testing::seed());
  constexpr BlockId kBlocks = 200;
  for (const PolicyKind kind : kHeated) {
    CAPTURE(policy_name(kind));
    const auto first = make_policy(kind, {kBlocks, 0, 40});
    Seconds now = 12'345;
    for (BlockId id = 0; id < kBlocks; ++id) first->insert(id, id, kNoBlock, 0, now);
    for (int use = 0; use < 2000; ++use) {
      now += static_cast<double>(1 + random.below(8)) / 4;
      first->touch(static_cast<BlockId>(random.below(kBlocks)), now);
    }
    std::vector<double> heats;
    std::vector<double> temperatures;
    for (BlockId id = 0; id < kBlocks; ++id) {
      heats.push_back(first->heat(id, now));
      temperatures.push_back(first->temperature(id));
    }
    const auto second = make_policy(kind, {kBlocks + 20, 0, 40});
    std::vector<BlockId> ids(kBlocks);
    for (BlockId id = 0; id < kBlocks; ++id) ids[id] = id;
    for (BlockId id = kBlocks; id > 1; --id) std::swap(ids[id - 1], ids[random.below(id)]);
    Seconds later = 5;  // the second life has a clock of its own
    for (const BlockId id : ids) {
      if (random.one_in(4)) later += 0.01;
      second->insert(id, id, kNoBlock, 0, later);
      second->set_heat(
          id, heats[id] * std::exp2(-(later - 5) / (kind == PolicyKind::lru ? 3600 : 40)), later);
    }
    std::set<BlockId> used;
    for (BlockId id = kBlocks; id < kBlocks + 20; ++id) {
      second->insert(id, id, kNoBlock, 0, later);
      used.insert(id);
    }
    for (int use = 0; use < 10 && kind == PolicyKind::lru; ++use) {
      const auto id = static_cast<BlockId>(random.below(kBlocks));
      second->touch(id, later);
      used.insert(id);
    }
    second->check_invariants();
    double previous = -INFINITY;
    bool is_past_restored = false;
    for (const BlockId id : drain(*second, 0, later)) {
      if (used.contains(id)) {
        is_past_restored = true;
        continue;
      }
      if (kind == PolicyKind::lru) CHECK_FALSE(is_past_restored);
      CHECK(temperatures[id] >= previous - 2e-4);  // heat was rounded to a step twice
      previous = temperatures[id];
    }
  }
}

TEST_CASE("lru goes by the calls, whatever their times say") {
  Random random(testing::seed());
  constexpr BlockId kBlocks = 64;
  const auto policy = make_policy(PolicyKind::lru, {kBlocks, 0, 0});
  std::vector<BlockId> recent;
  for (BlockId id = 0; id < kBlocks; ++id) {
    policy->insert(id, id, kNoBlock, 0, 1000);
    recent.push_back(id);
  }
  const double steps[] = {0, 0, 0, 1e-7, 1e-3, 5, -1000, 1e9};
  Seconds now = 1000;
  for (int use = 0; use < 5000; ++use) {
    now += steps[random.below(std::size(steps))];
    const auto id = static_cast<BlockId>(random.below(kBlocks));
    policy->touch(id, random.one_in(100) ? INFINITY : now);
    recent.erase(std::find(recent.begin(), recent.end(), id));
    recent.push_back(id);
    REQUIRE(policy->peek_coldest(0) == recent.front());
  }
  CHECK(drain(*policy, 0, now) == recent);
}

TEST_CASE("insert says whether the block was remembered") {
  for (const PolicyKind kind : kPolicyKinds) {
    CAPTURE(policy_name(kind));
    const bool has_ghosts = kind == PolicyKind::temperature || kind == PolicyKind::s3fifo;
    const auto policy = make_policy(kind, {4, 4, 0});
    CHECK_FALSE(policy->insert(0, 77, kNoBlock, 0, 0));
    REQUIRE(policy->take_coldest(0) == 0);
    policy->erase(0, 77, Leave::evicted, 1);
    CHECK(policy->insert(1, 77, kNoBlock, 0, 2) == has_ghosts);
    policy->erase(1, 77, Leave::removed, 3);
    CHECK_FALSE(policy->insert(2, 77, kNoBlock, 0, 4));
  }
}

TEST_CASE(
    "a parent is known as long as it is there, and is not taken for the next owner of its id") {
  for (const PolicyKind kind : kPolicyKinds) {
    CAPTURE(policy_name(kind));
    const bool is_chained = kind == PolicyKind::temperature || kind == PolicyKind::lru;
    const auto policy = make_policy(kind, {4, 0, 0});
    policy->insert(0, 0, kNoBlock, 0, 0);
    policy->insert(1, 1, 0, 0, 1);
    CHECK(policy->parent(0) == kNoBlock);
    CHECK(policy->parent(1) == (is_chained ? 0 : kNoBlock));
    policy->erase(0, 0, Leave::removed, 2);
    CHECK(policy->parent(1) == kNoBlock);
    policy->insert(0, 5, kNoBlock, 0, 3);
    CHECK(policy->parent(1) == kNoBlock);
  }
}

// What the caller knows of its blocks, while they also change group.
class Groups {
 public:
  static constexpr BlockId kIds = 48;
  static constexpr Group kGroups = 3;

  Groups(PolicyKind kind, Random& random)
      : kind_(kind), random_(random), policy_(make_policy(kind, {kIds, 16, 0})) {}

  void step() {
    now_ += static_cast<double>(random_.below(3));
    const auto id = static_cast<BlockId>(random_.below(kIds));
    const auto group = static_cast<Group>(random_.below(kGroups));
    const auto found = blocks_.find(id);
    if (found == blocks_.end()) {
      auto parent = static_cast<BlockId>(random_.below(kIds));
      if (!blocks_.contains(parent)) parent = kNoBlock;
      policy_->insert(id, id, parent, group, now_);
      blocks_[id] = {group, false};
    } else if (random_.one_in(3)) {
      const double before = policy_->temperature(id);
      const BlockId parent = policy_->parent(id);
      policy_->regroup(id, group);
      CHECK(policy_->temperature(id) == before);
      CHECK(policy_->parent(id) == parent);
      found->second.group = group;
    } else if (found->second.is_taken) {
      random_.one_in(2) ? erase(id) : give_back(id);
    } else if (random_.one_in(3)) {
      take(group);
    } else if (random_.one_in(6)) {
      policy_->set_heat(id, static_cast<double>(random_.below(100)) / 50, now_);
    } else {
      policy_->touch(id, now_);
    }
  }

  void check() const { policy_->check_invariants(); }

  void empty() {
    for (const auto& [id, block] : blocks_)
      if (block.is_taken) policy_->give_back(id);
    std::size_t gone = 0;
    for (std::size_t before = 1; before != gone;) {
      before = gone;
      for (Group group = 0; group < kGroups; ++group)
        for (const BlockId id : drain(*policy_, group, now_)) {
          CHECK(blocks_[id].group == group);
          ++gone;
        }
    }
    CHECK(gone == blocks_.size());
    check();
  }

 private:
  struct Block {
    Group group = 0;
    bool is_taken = false;
  };

  void take(Group group) {
    const BlockId seen = policy_->peek_coldest(group);
    const BlockId taken = policy_->take_coldest(group);
    REQUIRE((seen == kNoBlock) == (taken == kNoBlock));
    if (taken == kNoBlock) return;
    if (kind_ != PolicyKind::s3fifo) CHECK(seen == taken);
    REQUIRE(blocks_.contains(taken));
    CHECK(blocks_[taken].group == group);
    CHECK_FALSE(blocks_[taken].is_taken);
    blocks_[taken].is_taken = true;
  }

  void give_back(BlockId id) {
    policy_->give_back(id);
    blocks_[id].is_taken = false;
  }

  void erase(BlockId id) {
    policy_->erase(id, id, random_.one_in(2) ? Leave::evicted : Leave::removed, now_);
    blocks_.erase(id);
  }

  PolicyKind kind_;
  Random& random_;
  std::unique_ptr<Policy> policy_;
  std::map<BlockId, Block> blocks_;
  Seconds now_ = 0;
};

TEST_CASE("a block changes group in any state, as cold as before") {
  Random random(testing::seed());
  for (const PolicyKind kind : kPolicyKinds) {
    CAPTURE(policy_name(kind));
    Groups groups(kind, random);
    for (int step = 0; step < 10'000; ++step) {
      groups.step();
      if (step % 16 == 0) groups.check();
    }
    groups.empty();
  }
}

TEST_CASE("a parent in another group than its children still waits for them") {
  for (const PolicyKind kind : kHeated) {
    CAPTURE(policy_name(kind));
    const auto policy = make_policy(kind, {4, 0, 0});
    policy->insert(0, 0, kNoBlock, 0, 0);
    policy->insert(1, 1, 0, 0, 1);
    policy->regroup(0, 1);
    CHECK(policy->peek_coldest(1) == kNoBlock);
    REQUIRE(policy->take_coldest(0) == 1);
    policy->regroup(1, 1);
    CHECK(policy->peek_coldest(1) == kNoBlock);
    policy->give_back(1);
    CHECK(drain(*policy, 1, 2) == std::vector<BlockId>{1, 0});
  }
}

TEST_CASE("blocks of a chain let go of each other in any order, and once is for good") {
  Random random(testing::seed());
  for (const PolicyKind kind : kHeated) {
    CAPTURE(policy_name(kind));
    for (int round = 0; round < 200; ++round) {
      const auto policy = make_policy(kind, {8, 0, 0});
      for (BlockId id = 0; id < 6; ++id) policy->insert(id, id, id ? id - 1 : kNoBlock, 0, id);
      for (int step = 0; step < 8; ++step) {
        policy->let_go(static_cast<BlockId>(random.below(6)));
        policy->check_invariants();
      }
      for (BlockId id = 0; id < 5; ++id) policy->let_go(id);
      policy->check_invariants();
      for (BlockId id = 0; id < 6; ++id) CHECK(policy->parent(id) == kNoBlock);
      CHECK(drain(*policy, 0, 7).size() == 6);
    }
  }
}

TEST_CASE("a block that lets go does not find a parent in the next owner of its parent's id") {
  for (const PolicyKind kind : kHeated) {
    CAPTURE(policy_name(kind));
    const auto policy = make_policy(kind, {8, 0, 0});
    for (BlockId id = 0; id < 3; ++id) policy->insert(id, id, id ? id - 1 : kNoBlock, 0, id);
    policy->erase(0, 0, Leave::removed, 3);
    policy->insert(0, 100, kNoBlock, 0, 4);
    policy->let_go(1);
    policy->check_invariants();
    CHECK(policy->parent(1) == kNoBlock);
  }
}

}  // namespace
}  // namespace kvpool
