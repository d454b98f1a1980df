#include "cluster/simulated_node.h"

#include <algorithm>
#include <array>

#include "base/check.h"

namespace kvpool {
namespace {

// As in node/store_copies.cc.
constexpr std::size_t kSamples = 64;
constexpr Seconds kQuarterFor = 0.1;

}  // namespace

SimulatedNode::SimulatedNode(PolicyKind kind, const PolicyOptions& options, const BlockNames& names)
    : names_(names), capacity_(options.blocks_max), policy_(make_policy(kind, options)) {}

void SimulatedNode::insert(BlockId record, Name name, BlockId parent, Seconds now) {
  policy_->insert(record, fingerprint_of(names_.id(name)), parent, 0, now);
  residents_[record] = name;
  records_[name] = record;
}

BlockId SimulatedNode::make_room(const Guard& guard, std::uint32_t spared, Name& gone,
                                 Seconds now) {
  gone = BlockNames::kNone;
  if (residents_.size() < capacity_) {
    residents_.push_back(BlockNames::kNone);
    return static_cast<BlockId>(residents_.size() - 1);
  }
  const BlockId victim = take_victim(guard, spared);
  if (victim == kNoBlock) return kNoBlock;
  gone = residents_[victim];
  records_.erase(gone);
  policy_->erase(victim, fingerprint_of(names_.id(gone)), Leave::evicted, now);
  return victim;
}

// The coldest that is not pinned; the coldest of several where all are the last of their kind.
BlockId SimulatedNode::take_victim(const Guard& guard, std::uint32_t spared) {
  BlockId coldest = kNoBlock, chosen = kNoBlock;
  while (chosen == kNoBlock) {
    const BlockId candidate = policy_->take_coldest(0);
    if (candidate == kNoBlock) break;
    aside_.push_back(candidate);
    if (guard.is_pinned(residents_[candidate])) continue;
    if (coldest == kNoBlock) coldest = candidate;
    if (spared == 0 || !guard.is_last_copy(residents_[candidate])) {
      // Behind `spared` last copies there may be none but last copies: then it is the coldest.
      chosen = guard.is_last_copy(residents_[candidate]) ? coldest : candidate;
      break;
    }
    --spared;
  }
  if (chosen == kNoBlock) chosen = coldest;
  for (const BlockId each : aside_)
    if (each != chosen) policy_->give_back(each);
  aside_.clear();
  return chosen;
}

bool SimulatedNode::is_worth_a_copy(Name name, Seconds now) {
  if (residents_.size() < capacity_) return true;
  if (now >= quarter_until_) {
    quarter_heat_ = coldest_quarter(now);
    quarter_until_ = now + kQuarterFor;
  }
  // This use, and those before it, if the block was here once.
  const Fingerprint print = fingerprint_of(names_.id(name));
  return 1 + policy_->ghost_heat(print, now).value_or(0) >= quarter_heat_;
}

double SimulatedNode::coldest_quarter(Seconds now) const {
  std::array<double, kSamples> heats;
  std::size_t count = 0;
  const std::size_t step = std::max<std::size_t>(residents_.size() / kSamples, 1);
  for (std::size_t record = 0; record < residents_.size() && count < kSamples; record += step)
    heats[count++] = policy_->heat(static_cast<BlockId>(record), now);
  if (count == 0) return 0;
  const auto quarter = heats.begin() + static_cast<std::ptrdiff_t>(count / 4);
  std::nth_element(heats.begin(), quarter, heats.begin() + static_cast<std::ptrdiff_t>(count));
  return *quarter;
}

void SimulatedNode::check_invariants() const {
  KVP_CHECK(records_.size() == residents_.size() && residents_.size() <= capacity_);
  for (const auto& [name, record] : records_) KVP_CHECK(residents_[record] == name);
  policy_->check_invariants();
}

}  // namespace kvpool
