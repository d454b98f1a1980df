// A block that another tier has as well may go before the blocks that continue it: let_go() against
// a list of who continues whom.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "policy/policy.h"
#include "policy_testing.h"

namespace kvpool {
namespace {

using testing::Random;

constexpr PolicyKind kWithChains[] = {PolicyKind::temperature, PolicyKind::lru};

std::unique_ptr<Policy> made(PolicyKind kind, BlockId blocks_max = 64) {
  return make_policy(kind, {.blocks_max = blocks_max, .ghosts_max = 0, .tau_s = 60});
}

std::vector<BlockId> all_in_order(Policy& policy, double now) {
  std::vector<BlockId> order;
  for (BlockId id; (id = policy.take_coldest(0)) != kNoBlock;) {
    order.push_back(id);
    policy.erase(id, id, Leave::evicted, now);
    policy.check_invariants();
  }
  return order;
}

TEST_CASE("let go: a parent that another tier has goes in its own turn") {
  for (const PolicyKind kind : kWithChains) {
    const auto policy = made(kind);
    policy->insert(0, 10, kNoBlock, 0, 1);  // the coldest, and the head of the chain
    policy->insert(1, 11, 0, 0, 2);
    policy->insert(2, 12, 1, 0, 3);
    CHECK(policy->peek_coldest(0) == 2);
    policy->let_go(0);
    CHECK(policy->peek_coldest(0) == 0);
    CHECK(policy->parent(1) == kNoBlock);
    CHECK(policy->parent(2) == 1);  // one that nobody else has still waits
    policy->check_invariants();
    CHECK(all_in_order(*policy, 4) == std::vector<BlockId>{0, 2, 1});
  }
}

TEST_CASE("let go: children that come later are waited for again") {
  for (const PolicyKind kind : kWithChains) {
    const auto policy = made(kind);
    policy->insert(0, 10, kNoBlock, 0, 1);
    policy->insert(1, 11, 0, 0, 2);
    policy->let_go(0);
    policy->insert(2, 12, 0, 0, 3);
    CHECK(policy->parent(2) == 0);
    CHECK(policy->peek_coldest(0) == 1);
    policy->erase(1, 11, Leave::evicted, 4);
    CHECK(policy->peek_coldest(0) == 2);
    policy->let_go(0);
    policy->let_go(0);  // nothing left to let go of
    CHECK(policy->peek_coldest(0) == 0);
    policy->check_invariants();
  }
}

TEST_CASE("let go: of a block that is taken, it stays taken, and comes back free to go") {
  for (const PolicyKind kind : kWithChains) {
    const auto policy = made(kind);
    policy->insert(0, 10, kNoBlock, 0, 1);
    REQUIRE(policy->take_coldest(0) == 0);  // pinned
    policy->insert(1, 11, 0, 0, 2);
    policy->let_go(0);
    CHECK(policy->peek_coldest(0) == 1);
    policy->check_invariants();
    policy->give_back(0);
    CHECK(policy->peek_coldest(0) == 0);
    policy->check_invariants();
  }
}

// The id of a block that let go of its children passes to another block: no child of his.
TEST_CASE("let go: the next owner of an id is not taken for the parent") {
  for (const PolicyKind kind : kWithChains) {
    const auto policy = made(kind);
    policy->insert(0, 10, kNoBlock, 0, 1);
    policy->insert(1, 11, 0, 0, 2);
    policy->insert(2, 12, 1, 0, 3);
    policy->let_go(0);
    policy->erase(0, 10, Leave::evicted, 4);
    policy->insert(0, 20, kNoBlock, 0, 5);
    CHECK(policy->parent(1) == kNoBlock);
    policy->let_go(1);
    CHECK(policy->parent(1) == kNoBlock);
    CHECK(policy->parent(2) == kNoBlock);
    policy->check_invariants();
    CHECK(all_in_order(*policy, 6).size() == 3);
  }
}

TEST_CASE("let go: policies that keep no chains have nothing to let go of") {
  for (const PolicyKind kind : {PolicyKind::lfu, PolicyKind::fifo, PolicyKind::s3fifo}) {
    const auto policy = made(kind);
    policy->insert(0, 10, kNoBlock, 0, 1);
    policy->insert(1, 11, 0, 0, 2);
    const BlockId before = policy->peek_coldest(0);
    policy->let_go(0);
    CHECK(policy->peek_coldest(0) == before);
    CHECK(policy->parent(1) == kNoBlock);
    policy->check_invariants();
  }
}

// Inserts, uses, evictions, removals and let_go() at random, beside a map of parents.
class AgainstMap {
 public:
  AgainstMap(PolicyKind kind, std::uint64_t seed) : policy_(made(kind, kIds)), random_(seed) {}

  void step() {
    now_ += static_cast<double>(random_.below(3));
    switch (random_.below(10)) {
      case 0:
      case 1:
      case 2:
      case 3:
        insert();
        break;
      case 4:
        if (const BlockId id = any(); id != kNoBlock) policy_->touch(id, now_);
        break;
      case 5:
      case 6:
        if (const BlockId id = any(); id != kNoBlock) let_go(id);
        break;
      case 7:
        if (const BlockId id = any(); id != kNoBlock) erase(id);
        break;
      case 8:
        take();
        break;
      default:
        evict();
    }
    compare();
  }

 private:
  static constexpr BlockId kIds = 24;

  BlockId any() {
    if (parents_.empty()) return kNoBlock;
    auto it = parents_.begin();
    std::advance(it, static_cast<std::ptrdiff_t>(random_.below(parents_.size())));
    return it->first;
  }
  bool has_children(BlockId id) const {
    return std::any_of(parents_.begin(), parents_.end(),
                       [&](const auto& each) { return each.second == id; });
  }
  void insert() {
    const auto id = static_cast<BlockId>(random_.below(kIds));
    if (parents_.contains(id)) return;
    const BlockId parent = random_.one_in(4) ? kNoBlock : any();
    policy_->insert(id, id, parent, 0, now_);
    parents_[id] = parent;
  }
  void let_go(BlockId id) {
    policy_->let_go(id);
    for (auto& [child, parent] : parents_)
      if (parent == id) parent = kNoBlock;
  }
  void erase(BlockId id) {
    policy_->erase(id, id, random_.one_in(2) ? Leave::evicted : Leave::removed, now_);
    parents_.erase(id);
    taken_.erase(id);
    for (auto& [child, parent] : parents_)
      if (parent == id) parent = kNoBlock;
  }
  void evict() {
    const BlockId id = policy_->take_coldest(0);
    if (id == kNoBlock) return;
    REQUIRE_FALSE(has_children(id));
    erase(id);
  }
  void take() {
    if (!taken_.empty() && random_.one_in(2)) {
      policy_->give_back(*taken_.begin());
      taken_.erase(taken_.begin());
    } else if (const BlockId id = policy_->take_coldest(0); id != kNoBlock) {
      taken_.insert(id);
    }
  }
  void compare() {
    policy_->check_invariants();
    REQUIRE(policy_->stats().resident == parents_.size());
    bool may_any_go = false;
    for (const auto& [id, parent] : parents_) {
      REQUIRE(policy_->parent(id) == parent);
      may_any_go |= !has_children(id) && !taken_.contains(id);
    }
    REQUIRE((policy_->peek_coldest(0) != kNoBlock) == may_any_go);
  }

  std::unique_ptr<Policy> policy_;
  Random random_;
  std::map<BlockId, BlockId> parents_;
  std::set<BlockId> taken_;
  double now_ = 0;
};

TEST_CASE("let go: at random against a map of parents") {
  for (const PolicyKind kind : kWithChains)
    for (std::uint64_t round = 0; round < 30; ++round) {
      CAPTURE(round);
      AgainstMap run(kind, testing::seed() + round);
      for (int i = 0; i < 600; ++i) run.step();
    }
}

}  // namespace
}  // namespace kvpool
