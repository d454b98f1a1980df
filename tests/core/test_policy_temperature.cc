// Temperature against a model that keeps exact heats and scans them all.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <list>
#include <map>
#include <memory>
#include <vector>

#include "policy/policy.h"
#include "policy_testing.h"

namespace kvpool {
namespace {

using testing::Random;

// Shares nothing with the policy but the half-life and the weight of heat that it reports, which
// the model cannot know.
class Model {
 public:
  struct Block {
    Group group = 0;
    Fingerprint fp = 0;
    double heat = 0;
    double at = 0;  // half-lives since the start, of the last use
    bool is_taken = false;
    std::shared_ptr<int> chain_mark;  // alive as long as this very block
    std::weak_ptr<int> parent_mark;   // its parent's
  };

  explicit Model(std::size_t ghosts_max) : ghosts_max_(ghosts_max) {}

  // Time begins with the first one told, which may lie before zero.
  void pass(Seconds now, double tau_s) {
    if (!is_started_) now_ = now;
    is_started_ = true;
    if (now <= now_) return;
    half_lives_ += (now - now_) / tau_s;
    now_ = now;
  }

  void insert(BlockId id, Fingerprint fp, BlockId parent, Group group, double weight) {
    Block block{group, fp, 0, half_lives_, false, std::make_shared<int>(0), {}};
    if (parent != kNoBlock) block.parent_mark = blocks[parent].chain_mark;
    for (auto ghost = ghosts_.begin(); ghost != ghosts_.end(); ++ghost) {
      if (ghost->fp != fp) continue;
      block.heat = ghost->heat;
      block.at = ghost->at;
      ghosts_.erase(ghost);
      break;
    }
    blocks[id] = block;
    use(id, weight);
  }

  void use(BlockId id, double weight) {
    Block& block = blocks[id];
    block.heat = std::pow(heat(block) + 1, weight);
    block.at = half_lives_;
  }

  void erase(BlockId id, Leave why) {
    const Block block = blocks[id];
    blocks.erase(id);
    if (why != Leave::evicted || ghosts_max_ == 0) return;
    ghosts_.remove_if([&](const Ghost& ghost) { return ghost.fp == block.fp; });
    if (ghosts_.size() == ghosts_max_) ghosts_.pop_front();
    ghosts_.push_back({block.fp, block.heat, block.at});
  }

  bool may_go(BlockId id) const {
    const Block& block = blocks.at(id);
    if (block.is_taken) return false;
    for (const auto& [other, child] : blocks) {
      if (child.parent_mark.lock() == block.chain_mark) return false;
    }
    return true;
  }

  double heat(const Block& block) const {
    return block.heat * std::pow(2.0, block.at - half_lives_);
  }

  std::size_t ghosts() const { return ghosts_.size(); }

  std::map<BlockId, Block> blocks;

 private:
  struct Ghost {
    Fingerprint fp;
    double heat;
    double at;
  };

  std::size_t ghosts_max_;
  std::list<Ghost> ghosts_;  // oldest first
  bool is_started_ = false;
  Seconds now_ = 0;
  double half_lives_ = 0;
};

// Each use rounds a temperature by 2^-15 half-lives at most, and later uses halve what came before.
constexpr double kRounding = 1e-3;

void check_victim(const Model& model, BlockId victim, Group group) {
  double coldest = INFINITY;
  for (const auto& [id, block] : model.blocks) {
    if (block.group == group && model.may_go(id)) coldest = std::min(coldest, model.heat(block));
  }
  REQUIRE((victim == kNoBlock) == std::isinf(coldest));
  if (victim == kNoBlock) return;
  REQUIRE(model.blocks.contains(victim));
  REQUIRE(model.blocks.at(victim).group == group);
  REQUIRE(model.may_go(victim));
  REQUIRE(std::log2(model.heat(model.blocks.at(victim))) <= std::log2(coldest) + kRounding);
}

void compare_with_model(double tau_s, std::uint64_t seed) {
  Random random(seed);
  constexpr BlockId kIds = 48;
  constexpr std::size_t kGhosts = 40;
  const auto policy = make_policy(PolicyKind::temperature, {kIds, kGhosts, tau_s});
  Model model(kGhosts);
  Seconds now = 0;
  for (int step = 0; step < 20'000; ++step) {
    if (random.one_in(4)) now += static_cast<double>(random.below(400)) / 16;
    const Seconds told = random.one_in(50) ? now - 100 : now;
    const auto id = static_cast<BlockId>(random.below(kIds));
    const double tau_before_s = policy->stats().tau_s;
    const auto found = model.blocks.find(id);
    if (found == model.blocks.end()) {
      auto parent = static_cast<BlockId>(random.below(kIds));
      if (!model.blocks.contains(parent) || random.one_in(4)) parent = kNoBlock;
      const Fingerprint fp = random.below(200);
      const auto group = static_cast<Group>(random.below(2));
      policy->insert(id, fp, parent, group, told);
      model.pass(told, tau_before_s);
      model.insert(id, fp, parent, group, policy->stats().heat_weight);
    } else if (random.one_in(4)) {
      const auto group = static_cast<Group>(random.below(2));
      const BlockId victim = policy->take_coldest(group);
      check_victim(model, victim, group);
      if (victim == kNoBlock) continue;
      if (random.one_in(4)) {
        model.blocks[victim].is_taken = true;
        continue;
      }
      policy->erase(victim, model.blocks[victim].fp, Leave::evicted, told);
      model.pass(told, tau_before_s);
      model.erase(victim, Leave::evicted);
    } else if (found->second.is_taken && random.one_in(2)) {
      policy->give_back(id);
      found->second.is_taken = false;
    } else if (random.one_in(30)) {
      policy->erase(id, found->second.fp, Leave::removed, told);
      model.pass(told, tau_before_s);
      model.erase(id, Leave::removed);
    } else {
      policy->touch(id, told);
      model.pass(told, tau_before_s);
      model.use(id, policy->stats().heat_weight);
    }
    REQUIRE(policy->stats().ghosts == model.ghosts());
    REQUIRE(policy->stats().resident == model.blocks.size());
  }
  policy->check_invariants();
  // Differences of temperature are differences of log2(heat), whatever tau was in between.
  const auto& [first_id, first] = *model.blocks.begin();
  for (const auto& [id, block] : model.blocks) {
    const double expected = std::log2(model.heat(block) / model.heat(first));
    CHECK(policy->temperature(id) - policy->temperature(first_id) ==
          doctest::Approx(expected).epsilon(0).scale(1).epsilon(kRounding));
  }
}

TEST_CASE("temperature evicts what a scan of exact heats would: fixed half-life") {
  const std::uint64_t seed = testing::seed();
  for (std::uint64_t run = 0; run < 4; ++run) compare_with_model(40, seed + run);
}

TEST_CASE("temperature evicts what a scan of exact heats would: half-life that follows") {
  const std::uint64_t seed = testing::seed();
  for (std::uint64_t run = 0; run < 4; ++run) compare_with_model(0, seed + run);
}

TEST_CASE("two uses outweigh one until a half-life has passed") {
  const auto policy = make_policy(PolicyKind::temperature, {4, 0, 100});
  policy->insert(0, 0, kNoBlock, 0, 0);
  policy->touch(0, 0);
  policy->insert(1, 1, kNoBlock, 0, 99);
  CHECK(policy->take_coldest(0) == 1);
  policy->erase(1, 1, Leave::removed, 99);
  policy->insert(2, 2, kNoBlock, 0, 101);
  CHECK(policy->take_coldest(0) == 0);
}

TEST_CASE("an evicted block goes on from its heat, a removed one starts anew") {
  const auto policy = make_policy(PolicyKind::temperature, {4, 4, 100});
  for (const Leave why : {Leave::evicted, Leave::removed}) {
    policy->insert(0, 77, kNoBlock, 0, 0);
    for (int use = 0; use < 3; ++use) policy->touch(0, 0);
    const double before = policy->temperature(0);
    policy->erase(0, 77, why, 0);
    policy->insert(1, 77, kNoBlock, 0, 0);
    const double expected = why == Leave::evicted ? std::log2(5.0) : 0.0;
    CHECK(policy->temperature(1) - before + 2 == doctest::Approx(expected).epsilon(1e-3));
    policy->erase(1, 77, Leave::removed, 0);
  }
  CHECK(policy->stats().ghost_hits == 1);
}

TEST_CASE("the half-life follows the median reuse interval, within its bounds") {
  const auto policy = make_policy(PolicyKind::temperature, {64, 0, 0});
  for (BlockId id = 0; id < 64; ++id) policy->insert(id, id, kNoBlock, 0, 0);
  Seconds now = 0;
  auto reuse_every = [&](double interval_s, int rounds) {
    for (int round = 0; round < rounds; ++round) {
      now += interval_s;
      for (BlockId id = 0; id < 64; ++id) policy->touch(id, now);
    }
    return policy->stats().tau_s;
  };
  CHECK(reuse_every(60, 100) == doctest::Approx(90).epsilon(0.1));
  CHECK(reuse_every(600, 300) == doctest::Approx(900).epsilon(0.1));
  CHECK(reuse_every(20, 300) == doctest::Approx(30).epsilon(0.1));
  CHECK(reuse_every(1, 300) == 10);
  CHECK(reuse_every(8000, 300) == 3600);
}

TEST_CASE("the half-life counts blocks that were gone in between") {
  const auto policy = make_policy(PolicyKind::temperature, {1, 16, 0});
  for (int round = 0; round < 400; ++round) {
    const auto fp = static_cast<Fingerprint>(round % 10);
    policy->insert(0, fp, kNoBlock, 0, round * 10.0);
    REQUIRE(policy->take_coldest(0) == 0);
    policy->erase(0, fp, Leave::evicted, round * 10.0);
  }
  CHECK(policy->stats().tau_s == doctest::Approx(150).epsilon(0.1));
}

TEST_CASE("a new half-life moves no block past another") {
  const auto policy = make_policy(PolicyKind::temperature, {128, 0, 0});
  Random random(testing::seed());
  Seconds now = 0;
  for (BlockId id = 0; id < 64; ++id) {
    policy->insert(id, id, kNoBlock, 0, now);
    if (random.one_in(2)) policy->touch(id, now);
    now += static_cast<double>(random.below(50));
  }
  std::vector<double> before;
  for (BlockId id = 0; id < 64; ++id) before.push_back(policy->temperature(id));
  const double tau_before_s = policy->stats().tau_s;
  for (BlockId id = 64; id < 128; ++id) policy->insert(id, id, kNoBlock, 1, now);
  for (int round = 0; round < 100; ++round) {
    now += 1000;
    for (BlockId id = 64; id < 128; ++id) policy->touch(id, now);
  }
  REQUIRE(policy->stats().tau_s > 2 * tau_before_s);
  for (BlockId id = 0; id < 64; ++id) CHECK(policy->temperature(id) == before[id]);
  // And it is still old: what is used once now is warmer than all of it.
  policy->erase(127, 127, Leave::removed, now);
  policy->insert(127, 127, kNoBlock, 1, now);
  for (BlockId id = 0; id < 64; ++id) CHECK(policy->temperature(127) > before[id]);
}

}  // namespace
}  // namespace kvpool
