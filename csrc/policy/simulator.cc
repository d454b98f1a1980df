#include "policy/simulator.h"

#include <algorithm>

#include "base/check.h"
#include "policy/belady.h"

namespace kvpool {

namespace {

using Name = BlockNames::Name;

PolicyOptions policy_options(const SimulatorOptions& options) {
  KVP_CHECK(options.ghosts_factor >= 0);
  PolicyOptions made;
  made.blocks_max = options.capacity_blocks;
  made.ghosts_max =
      static_cast<std::uint64_t>(std::min(options.ghosts_factor * options.capacity_blocks, 0x1p32));
  made.tau_s = options.tau_s;
  return made;
}

class PolicySimulator final : public Simulator {
 public:
  PolicySimulator(const SimulatorOptions& options, const BlockNames& names)
      : names_(names),
        capacity_(options.capacity_blocks),
        policy_(make_policy(*options.policy, policy_options(options))) {}

  void request(std::span<const Name> blocks, Seconds now) override {
    ++report_.requests;
    report_.blocks += blocks.size();
    if (places_.size() < names_.size()) places_.resize(names_.size());
    for (const Name name : blocks) places_[name].pinned_by = report_.requests;
    std::size_t hits = 0;
    while (hits < blocks.size() && id_of(blocks[hits]) != kNoBlock) ++hits;
    report_.hit_blocks += hits;
    for (std::size_t i = hits; i-- > 0;) policy_->touch(id_of(blocks[i]), now);
    put(blocks, hits, now);
  }

  SimulatorReport report() const override {
    SimulatorReport report = report_;
    report.tau_s = policy_->stats().tau_s;
    return report;
  }

 private:
  struct Place {
    BlockId id_plus_one = 0;  // 0: not resident
    std::uint64_t pinned_by = 0;
  };

  BlockId id_of(Name name) const { return places_[name].id_plus_one - 1; }
  static_assert(kNoBlock == BlockId{0} - 1);

  void put(std::span<const Name> blocks, std::size_t from, Seconds now) {
    BlockId parent = from > 0 ? id_of(blocks[from - 1]) : kNoBlock;
    for (std::size_t i = from; i < blocks.size(); ++i) {
      BlockId id = id_of(blocks[i]);
      if (id != kNoBlock) {
        policy_->touch(id, now);
      } else {
        id = make_room(now);
        if (id == kNoBlock) return;
        policy_->insert(id, fingerprint_of(names_.id(blocks[i])), parent, 0, now);
        residents_[id] = blocks[i];
        places_[blocks[i]].id_plus_one = id + 1;
      }
      parent = id;
    }
  }

  // A free record number, or kNoBlock when every block belongs to the running request.
  BlockId make_room(Seconds now) {
    if (residents_.size() < capacity_) {
      residents_.push_back(BlockNames::kNone);
      return static_cast<BlockId>(residents_.size() - 1);
    }
    BlockId victim = policy_->take_coldest(0);
    while (victim != kNoBlock && places_[residents_[victim]].pinned_by == report_.requests) {
      pinned_.push_back(victim);
      victim = policy_->take_coldest(0);
    }
    for (const BlockId id : pinned_) policy_->give_back(id);
    pinned_.clear();
    if (victim == kNoBlock) return kNoBlock;
    places_[residents_[victim]].id_plus_one = 0;
    policy_->erase(victim, fingerprint_of(names_.id(residents_[victim])), Leave::evicted, now);
    ++report_.evictions;
    report_.ghosts_peak = std::max(report_.ghosts_peak, policy_->stats().ghosts);
    return victim;
  }

  const BlockNames& names_;
  BlockId capacity_;
  std::unique_ptr<Policy> policy_;
  std::vector<Place> places_;    // by name
  std::vector<Name> residents_;  // by record number
  std::vector<BlockId> pinned_;
  SimulatorReport report_;
};

}  // namespace

// The finisher of splitmix64: a bijection, so ids of a trace never clash as fingerprints.
Fingerprint fingerprint_of(std::uint64_t id) {
  std::uint64_t x = id + 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

BlockNames::BlockNames() : table_(1024, kNone) {}

std::size_t BlockNames::home(std::uint64_t id) const {
  return fingerprint_of(id) & (table_.size() - 1);
}

BlockNames::Name BlockNames::intern(std::uint64_t id) {
  std::size_t at = home(id);
  for (; table_[at] != kNone; at = (at + 1) & (table_.size() - 1)) {
    if (ids_[table_[at]] == id) return table_[at];
  }
  KVP_CHECK(ids_.size() < kNone);
  const auto name = static_cast<Name>(ids_.size());
  ids_.push_back(id);
  table_[at] = name;
  if (ids_.size() * 2 > table_.size()) grow();
  return name;
}

void BlockNames::grow() {
  table_.assign(table_.size() * 2, kNone);
  for (Name name = 0; name < ids_.size(); ++name) {
    std::size_t at = home(ids_[name]);
    while (table_[at] != kNone) at = (at + 1) & (table_.size() - 1);
    table_[at] = name;
  }
}

std::unique_ptr<Simulator> make_simulator(const SimulatorOptions& options,
                                          const BlockNames& names) {
  KVP_CHECK(options.capacity_blocks > 0 && options.capacity_blocks <= kBlocksMax);
  if (options.policy) return std::make_unique<PolicySimulator>(options, names);
  return std::make_unique<BeladySimulator>(options.capacity_blocks, BeladyRule::guarded);
}

}  // namespace kvpool
