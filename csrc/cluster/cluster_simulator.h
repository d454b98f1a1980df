// Replays requests against a cluster of nodes: block names only, no bytes, no network.
//
// A request reaches one node, its gateway, which makes these calls:
//   1. the leading blocks that are there or that the directory knows elsewhere are got. The owners
//      of the keys from the first that is not there are asked, all in one round;
//   2. what another node has is used there and fetched; a copy is kept by the product's rule, in
//      the place behind what is here of its chain;
//   3. the rest is put on the gateway, whoever else has it, as policy/simulator.h says. All blocks
//      of the request are pinned on the gateway;
//   4. a block that is hot on a node that served it is pushed to the node that has served least.
// With one node this is the simulator of one pool, block for block.
//
// Not simulated: time that anything takes, nodes that come, go or fail, the 20 ms in which the
// directory is behind, and what gateways remember of its answers.
// Thread rule: one caller at a time. Simulators that share BlockNames are fed in turn.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cluster/simulated_directory.h"
#include "cluster/simulated_node.h"
#include "policy/simulator.h"

namespace kvpool {

enum class Route : std::uint8_t {
  round_robin,
  random,
  prefix,  // the same leading blocks, the same gateway
};
enum class KeepCopies : std::uint8_t { warm, always, never };
enum class PickHolder : std::uint8_t {
  load,   // the one that has sent least so far; the product sees bytes in flight
  first,  // one for each key: what happens where load is not looked at
};

struct ClusterOptions {
  std::uint32_t nodes = 1;      // at most kMembersMax
  BlockId capacity_blocks = 0;  // of all together; at least one for each
  PolicyKind policy = PolicyKind::temperature;
  double ghosts_factor = 16;  // as SimulatorOptions
  double tau_s = 0;
  Route route = Route::round_robin;
  std::uint32_t route_blocks = 2;  // leading blocks that Route::prefix looks at; at least 1
  std::uint64_t seed = 1;          // of Route::random and ::prefix
  KeepCopies keep = KeepCopies::warm;
  PickHolder pick = PickHolder::load;
  double replicate_above = 0;      // heat on the node that serves it; 0: no replicas
  std::uint32_t replicas_max = 3;  // copies beside the first, whatever made them
  std::uint32_t spare_last = 0;    // SimulatedNode::make_room()
};

struct ClusterReport {
  std::uint64_t requests = 0, blocks = 0;
  std::uint64_t local_hits = 0, remote_hits = 0;  // blocks
  std::uint64_t kept = 0, aside = 0;              // of remote hits: copies made, or not
  std::uint64_t replicas = 0;                     // pushed
  std::uint64_t evictions = 0, last_evicted = 0;  // of these, blocks that nobody else had
  std::uint64_t hidden = 0;   // requests that ended at a block that the directory did not know
  std::uint64_t crowded = 0;  // copies that found no place among a key's holders
  std::uint64_t sources = 0;  // nodes fetched from, summed over requests
  std::uint64_t busiest_window = 0;         // blocks that one node sent in one window, at most
  double tau_s = 0;                         // of the first node, at the end
  std::vector<std::uint64_t> routed, sent;  // by node: requests; blocks to others, replicas too
  ShardCounts by_key, by_run;
};

class ClusterSimulator {
 public:
  using Name = BlockNames::Name;
  static constexpr Seconds kWindow = 10;

  // `names` outlives the simulator.
  ClusterSimulator(const ClusterOptions& options, const BlockNames& names);
  ClusterSimulator(const ClusterSimulator&) = delete;
  ClusterSimulator& operator=(const ClusterSimulator&) = delete;

  void request(std::span<const Name> blocks, Seconds now);
  // No request may follow.
  void finish() { directory_.finish(); }
  ClusterReport report() const;
  // O(resident): aborts when the books do not add up. For tests.
  void check_invariants() const;

 private:
  class Guard;
  struct Use {
    std::uint32_t node;
    Name name;
  };
  struct Hits {
    std::size_t local = 0, all = 0;  // leading ones here; leading ones anywhere
  };

  std::uint32_t gateway(std::span<const Name> blocks) const;
  void learn(std::span<const Name> blocks);
  Hits find(std::span<const Name> blocks) const;
  void use_local(std::span<const Name> hits);
  void fetch(std::span<const Name> blocks, std::size_t at);
  void put(std::span<const Name> blocks, std::size_t from);
  std::uint32_t pick_holder(Name name) const;
  // Makes room and inserts. False: all there is pinned.
  bool insert(std::uint32_t node, Name name);
  void note_use(std::uint32_t node, Name name);
  void replicate_hot();
  std::uint32_t least_loaded_without(Name name) const;
  void note_sent(std::uint32_t node);

  const ClusterOptions options_;
  const BlockNames& names_;
  SimulatedDirectory directory_;
  std::vector<std::unique_ptr<SimulatedNode>> nodes_;
  std::vector<std::uint64_t> pinned_by_;    // by name: the latest request it was in
  std::vector<Name> parents_;               // by name
  std::vector<Use> used_;                   // of the running request: what may be hot
  std::vector<std::uint64_t> source_of_;    // by node: the latest request it sent something for
  std::vector<std::uint64_t> window_sent_;  // by node
  double window_ = -1;
  std::uint32_t at_ = 0;  // the gateway of the running request
  Seconds now_ = 0;
  ClusterReport report_;
};

}  // namespace kvpool
