// What every policy promises: nothing lost, groups apart, ids recycled, bounded memory.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <limits>
#include <map>
#include <vector>

#include "policy/policy.h"
#include "policy_testing.h"

namespace kvpool {
namespace {

using testing::Random;

constexpr PolicyKind kChained[] = {PolicyKind::temperature, PolicyKind::lru};

std::unique_ptr<Policy> make(PolicyKind kind, BlockId blocks_max, std::uint64_t ghosts_max = 64,
                             double tau_s = 0) {
  return make_policy(kind, {blocks_max, ghosts_max, tau_s});
}

// Evicts everything that may go and says in which order.
std::vector<BlockId> drain(Policy& policy, Group group, Seconds now) {
  std::vector<BlockId> order;
  for (;;) {
    const BlockId id = policy.take_coldest(group);
    if (id == kNoBlock) return order;
    policy.erase(id, id, Leave::removed, now);
    order.push_back(id);
  }
}

TEST_CASE("policy names are unique and lead back to their kind") {
  for (const PolicyKind kind : kPolicyKinds) {
    CHECK(policy_kind(policy_name(kind)) == kind);
  }
  CHECK_FALSE(policy_kind("belady").has_value());
  CHECK_FALSE(policy_kind("").has_value());
}

// What the caller knows of its blocks, kept beside the policy and compared with it.
class Books {
 public:
  static constexpr BlockId kIds = 64;
  static constexpr std::uint64_t kGhosts = 64;

  Books(PolicyKind kind, Random& random)
      : policy_(make(kind, kIds, kGhosts)),
        random_(random),
        is_chained_(kind == PolicyKind::temperature || kind == PolicyKind::lru) {}

  void step() {
    now_ += random_.one_in(3) ? 0 : static_cast<double>(random_.below(100)) / 10;
    const auto id = static_cast<BlockId>(random_.below(kIds));
    if (!blocks_.contains(id)) {
      insert(id);
    } else if (random_.one_in(8)) {
      erase(id, Leave::removed);
    } else if (blocks_[id].is_taken) {
      random_.one_in(2) ? give_back(id) : erase(id, Leave::evicted);
    } else if (random_.one_in(3)) {
      take(static_cast<Group>(random_.below(kGroups + 1)));
    } else {
      policy_->touch(id, now_);
    }
    CHECK(policy_->stats().resident == blocks_.size());
    CHECK(policy_->stats().ghosts <= kGhosts);
  }

  void check() const { policy_->check_invariants(); }

  // Nothing is stuck: all that was taken comes back, and then everything can go.
  void empty() {
    for (const auto& [id, block] : blocks_) {
      if (block.is_taken) policy_->give_back(id);
    }
    // Again until nothing comes, for a parent may be free only after a child in another group.
    std::size_t gone = 0;
    for (std::size_t before = 1; before != gone;) {
      before = gone;
      for (Group group = 0; group < kGroups; ++group) gone += drain(*policy_, group, now_).size();
    }
    CHECK(gone == blocks_.size());
    CHECK(policy_->stats().resident == 0);
    check();
  }

 private:
  static constexpr Group kGroups = 3;
  struct Block {
    Group group = 0;
    bool is_taken = false;
    int children = 0;  // resident
    BlockId parent = kNoBlock;
  };

  void insert(BlockId id) {
    auto parent = static_cast<BlockId>(random_.below(kIds));
    if (!blocks_.contains(parent)) parent = kNoBlock;
    const auto group = static_cast<Group>(random_.below(kGroups));
    policy_->insert(id, id * 7919, parent, group, now_);
    blocks_[id] = {group, false, 0, parent};
    if (parent != kNoBlock) ++blocks_[parent].children;
  }

  void erase(BlockId id, Leave why) {
    policy_->erase(id, id * 7919, why, now_);
    const auto parent = blocks_.find(blocks_[id].parent);
    if (parent != blocks_.end()) --parent->second.children;
    blocks_.erase(id);
    for (auto& [other, block] : blocks_) {
      if (block.parent == id) block.parent = kNoBlock;
    }
  }

  void take(Group group) {
    const bool is_promised = policy_->coldest(group).has_value();
    const BlockId victim = policy_->take_coldest(group);
    CHECK(is_promised == (victim != kNoBlock));
    if (victim == kNoBlock) return;
    REQUIRE(blocks_.contains(victim));
    CHECK(blocks_[victim].group == group);
    CHECK_FALSE(blocks_[victim].is_taken);
    if (is_chained_) CHECK(blocks_[victim].children == 0);
    blocks_[victim].is_taken = true;
  }

  void give_back(BlockId id) {
    policy_->give_back(id);
    blocks_[id].is_taken = false;
  }

  std::unique_ptr<Policy> policy_;
  Random& random_;
  bool is_chained_;
  std::map<BlockId, Block> blocks_;
  Seconds now_ = 0;
};

TEST_CASE("every policy keeps its books over random calls") {
  Random random(testing::seed());
  for (const PolicyKind kind : kPolicyKinds) {
    CAPTURE(policy_name(kind));
    Books books(kind, random);
    for (int step = 0; step < 20'000; ++step) {
      books.step();
      if (step % 16 == 0) books.check();
    }
    books.empty();
  }
}

TEST_CASE("groups do not compete with each other") {
  for (const PolicyKind kind : kPolicyKinds) {
    CAPTURE(policy_name(kind));
    const auto policy = make(kind, 8);
    for (BlockId id = 0; id < 8; ++id) policy->insert(id, id, kNoBlock, id % 2, id);
    CHECK(drain(*policy, 1, 9) == std::vector<BlockId>{1, 3, 5, 7});
    CHECK_FALSE(policy->coldest(1).has_value());
    CHECK(policy->take_coldest(7) == kNoBlock);
    CHECK(drain(*policy, 0, 9) == std::vector<BlockId>{0, 2, 4, 6});
  }
}

TEST_CASE("what is given back is as cold as before") {
  for (const PolicyKind kind : kPolicyKinds) {
    CAPTURE(policy_name(kind));
    const auto policy = make(kind, 8);
    for (BlockId id = 0; id < 8; ++id) policy->insert(id, id, kNoBlock, 0, id);
    for (int round = 0; round < 3; ++round) {
      for (BlockId id = 0; id < 4; ++id) REQUIRE(policy->take_coldest(0) == id);
      for (BlockId id = 0; id < 4; ++id) policy->give_back(id);
    }
    CHECK(drain(*policy, 0, 9) == std::vector<BlockId>{0, 1, 2, 3, 4, 5, 6, 7});
  }
}

TEST_CASE("a taken block may be touched and stays taken") {
  for (const PolicyKind kind : kPolicyKinds) {
    CAPTURE(policy_name(kind));
    const auto policy = make(kind, 2);
    policy->insert(0, 0, kNoBlock, 0, 0);
    REQUIRE(policy->take_coldest(0) == 0);
    policy->touch(0, 1);
    CHECK(policy->take_coldest(0) == kNoBlock);
    policy->insert(1, 1, kNoBlock, 0, 2);
    policy->give_back(0);
    CHECK(drain(*policy, 0, 3).size() == 2);
  }
}

TEST_CASE("no resident suffix without its parent: random forests, any calls") {
  Random random(testing::seed());
  for (const PolicyKind kind : kChained) {
    CAPTURE(policy_name(kind));
    constexpr BlockId kIds = 512;
    const auto policy = make(kind, kIds, 0);
    std::vector<BlockId> parents(kIds, kNoBlock);
    for (BlockId id = 0; id < kIds; ++id) {
      if (id > 0 && !random.one_in(16)) parents[id] = static_cast<BlockId>(random.below(id));
      policy->insert(id, id, parents[id], 0, 0);
    }
    // Heads colder than their tails, the worst case for a rule that looks at single blocks.
    for (int i = 0; i < 2000; ++i) {
      policy->touch(static_cast<BlockId>(kIds / 2 + random.below(kIds / 2)), i);
    }
    std::vector<bool> is_gone(kIds, false);
    for (const BlockId id : drain(*policy, 0, 2000)) {
      is_gone[id] = true;
      for (BlockId child = 0; child < kIds; ++child) {
        if (parents[child] == id) REQUIRE(is_gone[child]);
      }
    }
    CHECK(policy->stats().resident == 0);
  }
}

TEST_CASE("an erased inner block leaves first blocks of chains, not prisoners of its id") {
  for (const PolicyKind kind : kChained) {
    CAPTURE(policy_name(kind));
    const auto policy = make(kind, 8, 0);
    policy->insert(0, 0, kNoBlock, 0, 0);
    policy->insert(1, 1, 0, 0, 1);
    policy->insert(2, 2, 1, 0, 2);
    policy->insert(3, 3, 1, 0, 3);
    policy->erase(1, 1, Leave::removed, 4);
    policy->check_invariants();
    policy->insert(1, 101, kNoBlock, 0,
                   5);  // The id has a new owner; 2 and 3 are not its children.
    policy->insert(4, 4, 1, 0, 6);
    policy->check_invariants();
    CHECK(drain(*policy, 0, 7) == std::vector<BlockId>{0, 2, 3, 4, 1});
  }
}

TEST_CASE("a block that gains a child while taken waits for it") {
  for (const PolicyKind kind : kChained) {
    CAPTURE(policy_name(kind));
    const auto policy = make(kind, 2, 0);
    policy->insert(0, 0, kNoBlock, 0, 0);
    REQUIRE(policy->take_coldest(0) == 0);
    policy->insert(1, 1, 0, 0, 1);
    policy->give_back(0);
    policy->check_invariants();
    CHECK(drain(*policy, 0, 2) == std::vector<BlockId>{1, 0});
  }
}

// The best of a few runs, in processor time: an O(depth) use would cost thousands of times more.
double touch_cost_s(Policy& policy, BlockId id, Seconds now) {
  double best = std::numeric_limits<double>::infinity();
  for (int run = 0; run < 5; ++run) {
    const std::clock_t begin = std::clock();
    for (int i = 0; i < 20'000; ++i) policy.touch(id, now);
    best = std::min(best, static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC);
  }
  return best;
}

TEST_CASE("a use costs the same at any depth of a chain") {
  constexpr BlockId kDepth = 8192;
  for (const PolicyKind kind : kChained) {
    CAPTURE(policy_name(kind));
    const auto policy = make(kind, kDepth + 1, 0);
    policy->insert(kDepth, kDepth, kNoBlock, 0, 0);
    for (BlockId id = 0; id < kDepth; ++id) {
      policy->insert(id, id, id == 0 ? kNoBlock : id - 1, 0, 0);
    }
    const double shallow_s = touch_cost_s(*policy, kDepth, 1);
    CHECK(touch_cost_s(*policy, 0, 1) < 100 * shallow_s + 0.01);
    CHECK(touch_cost_s(*policy, kDepth - 1, 1) < 100 * shallow_s + 0.01);
    policy->check_invariants();
    const std::vector<BlockId> order = drain(*policy, 0, 2);
    REQUIRE(order.size() == kDepth + 1);
    policy->check_invariants();
  }
}

TEST_CASE("memory follows residents, not blocks_max") {
  for (const PolicyKind kind : kPolicyKinds) {
    CAPTURE(policy_name(kind));
    const auto policy = make(kind, kBlocksMax, 1u << 30);
    for (BlockId id = 0; id < 1000; ++id) policy->insert(id, id, kNoBlock, 0, 0);
    CHECK(policy->stats().bytes < 128 * 1024);
  }
}

TEST_CASE("temperature holds a resident block in 28 bytes and a ghost in 32") {
  constexpr BlockId kBlocks = 200'000;
  const auto policy = make(PolicyKind::temperature, kBlocks, 3 * kBlocks);
  Fingerprint fp = 0;
  for (BlockId id = 0; id < kBlocks; ++id) policy->insert(id, fp++, kNoBlock, 0, 0);
  const PolicyStats full = policy->stats();
  CHECK(full.ghost_bytes <= 4096);
  // The sample that watches LRU costs the same whatever the pool holds.
  CHECK(static_cast<double>(full.bytes) <= 28.0 * kBlocks + 3 * 4096 + 256 * 1024);
  for (std::uint32_t i = 0; i < 4 * kBlocks; ++i) {
    const BlockId id = policy->take_coldest(0);
    policy->erase(id, i, Leave::evicted, 1);
    policy->insert(id, fp++, kNoBlock, 0, 1);
  }
  const PolicyStats stats = policy->stats();
  CHECK(stats.ghosts == 3 * kBlocks);
  CHECK(static_cast<double>(stats.ghost_bytes) <= 32.0 * 3 * kBlocks + 2 * 4096);
  CHECK(stats.bytes <= full.bytes - full.ghost_bytes + stats.ghost_bytes + 256 * 1024);
}

TEST_CASE("any time is survived: backwards, not a number, without end") {
  for (const PolicyKind kind : kPolicyKinds) {
    for (const double tau_s : {0.0, 1e-300, 1e300}) {
      CAPTURE(policy_name(kind));
      const auto policy = make(kind, 16, 64, tau_s);
      const Seconds times[] = {1e9,
                               -1e9,
                               std::numeric_limits<double>::quiet_NaN(),
                               1e18,
                               std::numeric_limits<double>::infinity(),
                               0,
                               1e308,
                               -1e308};
      for (int round = 0; round < 50; ++round) {
        for (const Seconds now : times) {
          const BlockId id = policy->stats().resident < 16
                                 ? static_cast<BlockId>(policy->stats().resident)
                                 : policy->take_coldest(0);
          REQUIRE(id != kNoBlock);
          if (policy->stats().resident == 16) policy->erase(id, id, Leave::evicted, now);
          policy->insert(id, id, kNoBlock, 0, now);
          policy->touch(id, now);
          CHECK(std::isfinite(policy->temperature(id)));
        }
        policy->check_invariants();
      }
    }
  }
}

TEST_CASE("equal times everywhere: the deeper block goes first, then the smaller id") {
  const auto policy = make(PolicyKind::temperature, 8, 0);
  policy->insert(5, 5, kNoBlock, 0, 0);
  policy->insert(3, 3, kNoBlock, 0, 0);
  policy->insert(4, 4, 3, 0, 0);
  policy->insert(6, 6, 4, 0, 0);
  policy->insert(1, 1, 5, 0, 0);
  CHECK(drain(*policy, 0, 0) == std::vector<BlockId>{6, 1, 4, 3, 5});
}

TEST_CASE("lru: the least recently used goes first, uses counted and not timed") {
  const auto policy = make(PolicyKind::lru, 4);
  for (BlockId id = 0; id < 4; ++id) policy->insert(id, id, kNoBlock, 0, 0);
  policy->touch(0, 0);
  policy->touch(2, 0);
  CHECK(drain(*policy, 0, 0) == std::vector<BlockId>{1, 3, 0, 2});
}

TEST_CASE("fifo: uses do not count") {
  const auto policy = make(PolicyKind::fifo, 3);
  for (BlockId id = 0; id < 3; ++id) policy->insert(id, id, kNoBlock, 0, 0);
  policy->touch(0, 1);
  CHECK(drain(*policy, 0, 2) == std::vector<BlockId>{0, 1, 2});
}

TEST_CASE("lfu: fewer uses first, then the older use") {
  const auto policy = make(PolicyKind::lfu, 4);
  for (BlockId id = 0; id < 4; ++id) policy->insert(id, id, kNoBlock, 0, 0);
  policy->touch(0, 1);
  policy->touch(0, 2);
  policy->touch(1, 3);
  policy->touch(2, 4);
  CHECK(drain(*policy, 0, 5) == std::vector<BlockId>{3, 1, 2, 0});
}

TEST_CASE("s3fifo: one-timers leave early, two uses or a ghost lead to the main queue") {
  const auto policy = make(PolicyKind::s3fifo, 20);
  for (BlockId id = 0; id < 20; ++id) policy->insert(id, id, kNoBlock, 0, 0);
  for (int use = 0; use < 2; ++use) policy->touch(0, 0);
  policy->touch(1, 0);  // One use is not enough to stay.
  REQUIRE(policy->take_coldest(0) == 1);
  policy->erase(1, 1, Leave::evicted, 0);
  CHECK(policy->stats().ghosts == 1);
  policy->insert(1, 1, kNoBlock, 0, 0);
  CHECK(policy->stats().ghost_hits == 1);
  const std::vector<BlockId> order = drain(*policy, 0, 0);
  REQUIRE(order.size() == 20);
  CHECK(order[0] == 2);
  CHECK(order[18] + order[19] <= 20);  // 0 and 1 outlive nearly all one-timers.
  for (std::size_t i = 0; i < 17; ++i) CHECK(order[i] > 1);
}

}  // namespace
}  // namespace kvpool
