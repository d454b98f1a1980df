// A node of a simulated cluster: a policy and the names of what is resident, no bytes.
//
// The policy is the product's, and so is the rule by which a copy of another node's block is kept
// (node/store_copies.cc), with a capacity of whole blocks in place of slabs.
// Thread rule: one caller at a time.
#pragma once
#include <cstddef>
#include <memory>
#include <unordered_map>
#include <vector>

#include "policy/simulator.h"

namespace kvpool {

class SimulatedNode {
 public:
  using Name = BlockNames::Name;
  // `names` outlives the node.
  SimulatedNode(PolicyKind kind, const PolicyOptions& options, const BlockNames& names);

  // kNoBlock: not resident.
  BlockId find(Name name) const {
    const auto found = records_.find(name);
    return found == records_.end() ? kNoBlock : found->second;
  }
  void touch(BlockId record, Seconds now) { policy_->touch(record, now); }
  double heat(BlockId record, Seconds now) const { return policy_->heat(record, now); }
  // `record`: from make_room(); `parent`: resident here, or kNoBlock.
  void insert(BlockId record, Name name, BlockId parent, Seconds now);

  // Why a block may have to stay.
  class Guard {
   public:
    virtual ~Guard() = default;
    virtual bool is_pinned(Name name) const = 0;
    virtual bool is_last_copy(Name name) const = 0;
  };
  // Room for one more. `spared`: so many last copies, the coldest first, are passed over for a
  // block that others have as well. kNoBlock: all is pinned. `gone`: who had to go, or kNone.
  BlockId make_room(const Guard& guard, std::uint32_t spared, Name& gone, Seconds now);

  // The rule for copies: there is room, or the block is warmer than the coldest quarter here.
  bool is_worth_a_copy(Name name, Seconds now);

  std::size_t resident() const { return records_.size(); }
  double tau_s() const { return policy_->stats().tau_s; }
  void check_invariants() const;

 private:
  BlockId take_victim(const Guard& guard, std::uint32_t spared);
  double coldest_quarter(Seconds now) const;

  const BlockNames& names_;
  const BlockId capacity_;
  std::unique_ptr<Policy> policy_;
  std::unordered_map<Name, BlockId> records_;
  std::vector<Name> residents_;  // by record
  std::vector<BlockId> aside_;   // taken from the policy, to be given back
  double quarter_heat_ = 0;
  Seconds quarter_until_ = -1;
};

}  // namespace kvpool
