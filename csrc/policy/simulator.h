// Replays requests against one policy and one capacity: block names only, no bytes.
//
// A request is a list of block ids, head to tail, at one time. A pool would see these calls:
//   1. the leading resident blocks are got: those are the hits. They are touched tail to head, so
//      that a head is never older than what continues it;
//   2. the rest is put head to tail: a block that is resident is touched, any other is inserted
//      after room has been made for it. All blocks of the running request are pinned: taken ones
//      go back. When nothing else can go, the rest of the request is passed over.
// So hits here equal the hits of a pool that is called like that, block for block, under policies
// that keep chains. A put pins what is before it in its own call only, so without the chain rule a
// pool may also evict what the request was just served; its hits then differ by some thousandths.
//
// Belady's rule needs the future: its simulator keeps the requests and replays them at finish().
// It evicts the block whose next use is farthest and does not insert one whose own is no nearer. It
// bounds block hits, and prefix hits where an id names its whole prefix.
//
// Thread rule: one caller at a time. Simulators that share BlockNames are fed in turn.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "policy/policy.h"

namespace kvpool {

// Numbers block ids of a trace 0, 1, 2 … in order of appearance, once for all simulators.
class BlockNames {
 public:
  using Name = std::uint32_t;
  static constexpr Name kNone = 0xffffffff;

  BlockNames();
  Name intern(std::uint64_t id);
  std::uint64_t id(Name name) const { return ids_[name]; }
  std::size_t size() const { return ids_.size(); }

 private:
  std::size_t home(std::uint64_t id) const;
  void grow();

  std::vector<std::uint64_t> ids_;
  std::vector<Name> table_;  // open addressing, at most half full, a power of two long
};

// What a policy knows a block of a trace by; no two ids have the same.
Fingerprint fingerprint_of(std::uint64_t id);

struct SimulatorOptions {
  std::optional<PolicyKind> policy;  // nullopt: Belady
  BlockId capacity_blocks = 0;
  double ghosts_factor = 16;  // ghosts_max = factor x capacity
  double tau_s = 0;           // as PolicyOptions::tau_s
};

struct SimulatorReport {
  std::uint64_t requests = 0;
  std::uint64_t blocks = 0;
  std::uint64_t hit_blocks = 0;
  std::uint64_t evictions = 0;
  std::uint64_t ghosts_peak = 0;
  double tau_s = 0;  // at the end; 0 for policies without one
};

class Simulator {
 public:
  virtual ~Simulator() = default;
  virtual void request(std::span<const BlockNames::Name> blocks, Seconds now) = 0;
  // No request may follow.
  virtual void finish() {}
  virtual SimulatorReport report() const = 0;
};

// `names` must outlive the simulator. 1 <= capacity_blocks <= kBlocksMax; ghosts_factor >= 0.
std::unique_ptr<Simulator> make_simulator(const SimulatorOptions& options, const BlockNames& names);

}  // namespace kvpool
