// Who holds which block in a simulated cluster: what the directory says, which is at once all that
// nodes told it, and the messages that it would take under either sharding.
//
// As in the product a key has at most kHoldersPerKey holders; who comes later is not known.
// Thread rule: one caller at a time.
#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "cluster/shard_traffic.h"
#include "net/frame.h"

namespace kvpool {

class SimulatedDirectory {
 public:
  using Name = BlockNames::Name;
  static constexpr std::uint16_t kNobody = 0xffff;
  using Holders = std::array<std::uint16_t, kHoldersPerKey>;  // in no order, with gaps

  // 1 <= nodes <= kMembersMax. `names` outlives the directory.
  SimulatedDirectory(std::uint32_t nodes, const BlockNames& names);

  // Before anything else of these: they stand in a chain, from its head.
  void learn(std::span<const Name> chain);
  void advance(Seconds now);
  void finish();

  void ask(std::uint32_t node, std::span<const Name> names);
  void came(std::uint32_t node, Name name, Seconds now);
  void went(std::uint32_t node, Name name, Seconds now);

  const Holders& holders(Name name) const { return entries_[name].holders; }
  bool is_known(Name name) const;
  // Whether the directory knows of them or not.
  std::uint32_t copies(Name name) const { return entries_[name].copies; }
  std::uint64_t crowded() const { return crowded_; }

  const ShardTraffic& by_key() const { return by_key_; }
  const ShardTraffic& by_run() const { return by_run_; }

 private:
  struct Entry {
    Holders holders{kNobody, kNobody, kNobody, kNobody};
    std::uint16_t copies = 0;
  };
  static_assert(kHoldersPerKey == 4);

  const BlockNames& names_;
  std::vector<Entry> entries_;  // by name, as the next
  std::vector<DirectoryKey> keys_;
  OwnerTable table_;
  ShardTraffic by_key_, by_run_;
  std::uint64_t crowded_ = 0;
};

}  // namespace kvpool
