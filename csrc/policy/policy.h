// Which block goes next. One implementation serves the product and the replay; time is an argument.
//
// Relies on: ids are small and dense (the caller's record numbers, below `blocks_max`), recycled by
//            the caller after erase(); one caller at a time (the node's lock, or a simulator).
// Promises:  1. every resident block is either in the order of its group or taken;
//            2. take_coldest never names a block that has resident children, where the policy keeps
//               chains (temperature, lru);
//            3. no clock, no randomness, no I/O: the same calls give the same victims everywhere.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "base/clock.h"

namespace kvpool {

using BlockId = std::uint32_t;
inline constexpr BlockId kNoBlock = 0xffffffff;
inline constexpr BlockId kBlocksMax = BlockId{1} << 30;  // bounds PolicyOptions::blocks_max

// 64 bits drawn from namespace and key; names a block that is gone. A clash costs wrong heat,
// never wrong bytes.
using Fingerprint = std::uint64_t;

// Blocks compete only inside their group (a size class). Groups are small and dense.
using Group = std::uint32_t;
inline constexpr Group kGroupsMax = 2048;

enum class Leave : std::uint8_t {
  evicted,  // room was needed; its heat is worth remembering (a ghost)
  removed,  // somebody asked for it to go; forget it
};

struct PolicyOptions {
  BlockId blocks_max = 0;        // ids are below this
  std::uint64_t ghosts_max = 0;  // entries; 0 = remember nothing
  double tau_s = 0;              // half-life of heat; 0 = follow the workload
};

struct PolicyStats {
  std::uint64_t resident = 0;
  std::uint64_t ghosts = 0;
  std::uint64_t ghost_hits = 0;   // inserts that found their ghost
  std::uint64_t bytes = 0;        // memory the policy holds for residents and ghosts together
  std::uint64_t ghost_bytes = 0;  // of these, for ghosts
  double tau_s = 0;               // half-life of heat now; 0 in policies without heat
  double heat_weight = 0;         // how much heat counts beside recency now: 1 in full, 0 = LRU
};

class Policy {
 public:
  virtual ~Policy() = default;
  Policy() = default;
  Policy(const Policy&) = delete;
  Policy& operator=(const Policy&) = delete;

  // The block becomes resident; that is its first use. `parent`: the resident block that holds the
  // tokens before it, or kNoBlock (unknown, or first of its chain). Never moves later, so parents
  // form a forest. True: it was remembered (its ghost was found).
  virtual bool insert(BlockId id, Fingerprint fp, BlockId parent, Group group, Seconds now) = 0;
  // The block's children, now and so far, keep it from going no longer: another tier has it too.
  virtual void let_go(BlockId id) = 0;
  // One more use. Also allowed while taken: the block stays taken.
  virtual void touch(BlockId id, Seconds now) = 0;
  // The block is gone; its id may be given to another block. A block with resident children may be
  // erased (somebody removed it); its children become first of their chains.
  virtual void erase(BlockId id, Fingerprint fp, Leave why, Seconds now) = 0;
  // The block competes in another group from now on, as cold as before. Also while taken.
  virtual void regroup(BlockId id, Group group) = 0;
  // The parent it was inserted with, kNoBlock when there was none or it is gone. A policy that
  // keeps no chains knows of none.
  virtual BlockId parent(BlockId id) const = 0;

  // Takes the coldest candidate of a group out of the order. The caller then erases it or gives it
  // back (when it turns out to be pinned). kNoBlock when there is none.
  virtual BlockId take_coldest(Group group) = 0;
  virtual void give_back(BlockId id) = 0;
  // The candidate that coldest() speaks of, left where it is. take_coldest() would give the same
  // one, save in s3fifo, where that one may first earn another round.
  virtual BlockId peek_coldest(Group group) const = 0;

  // How cold the coldest candidate is, on a scale shared by all groups: smaller is colder.
  virtual std::optional<double> coldest(Group group) const = 0;
  // The same scale for one resident block.
  virtual double temperature(BlockId id) const = 0;

  // What is left of a block's uses at `now`, for a place where this policy's scale means nothing:
  // another tier, or the next run. temperature: uses, halved every tau. lru: 1 at its last use,
  // halved every hour since. Others: 1. Changes nothing; a time before the latest one counts as it.
  virtual double heat(BlockId id, Seconds now) const = 0;
  // Gives a block that heat as of `now`; no use is counted. Any number is survived: zero and what
  // is no number are the coldest there is. lru: a block put back lies below every block used since,
  // blocks put back lie in order of heat. No effect in policies without heat.
  virtual void set_heat(BlockId id, double heat, Seconds now) = 0;

  // What people ask of one block. Seconds since its last use, to 1/8 s and modulo 36 h; nullopt in
  // policies that keep no times.
  virtual std::optional<Seconds> idle_s(BlockId, Seconds) const { return std::nullopt; }
  // Blocks before it in its chain, as known when it came in; at most 65,535.
  virtual std::uint32_t depth(BlockId id) const = 0;
  // The heat it would go on from, of a block that is gone; nullopt: forgotten, or never remembered.
  virtual std::optional<double> ghost_heat(Fingerprint, Seconds) const { return std::nullopt; }
  // Whether it is able to tell, as it is bounded now.
  virtual bool has_ghosts() const { return false; }
  // A use of a block that is not here and does not come in: what is remembered of it gets as warm
  // as by any other use.
  virtual void use_ghost(Fingerprint, Seconds) {}

  // Bounds the ghosts anew, dropping the oldest (a pool that was resized).
  virtual void set_ghosts_max(std::uint64_t ghosts_max) = 0;

  virtual PolicyStats stats() const = 0;
  // O(resident): aborts when the books do not add up. For tests.
  virtual void check_invariants() const = 0;
};

enum class PolicyKind : std::uint8_t { temperature, lru, lfu, fifo, s3fifo };
inline constexpr std::array kPolicyKinds{PolicyKind::temperature, PolicyKind::lru, PolicyKind::lfu,
                                         PolicyKind::fifo, PolicyKind::s3fifo};

std::optional<PolicyKind> policy_kind(std::string_view name);
std::string_view policy_name(PolicyKind kind);
std::unique_ptr<Policy> make_policy(PolicyKind kind, const PolicyOptions& options);

}  // namespace kvpool
