// What a node holds: records, index, slabs, policy and namespaces, kept consistent. No threads, no
// lock, no waiting, no clock: the Node above adds those.
//
//   free -> reserved -> resident -> free        a block that nobody pins when it goes
//                           \-> zombie -> free  one that somebody still reads
//
// Invariants: 1. a key of a namespace has at most one record that is reserved or resident;
//             2. only commit() makes a key visible, only retire() takes one away;
//             3. a slot is given back when its record is neither reserved, resident nor pinned;
//             4. records free + reserved + resident + zombie = records ever used, and the same for
//                slots (check_invariants counts both).
// Thread rule: the node's lock. Readers run beside it through IndexReader.
#pragma once
#include <bitset>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/lazy_array.h"
#include "base/status.h"
#include "memory/slab_pool.h"
#include "node/index_writer.h"
#include "node/namespaces.h"
#include "policy/policy.h"

namespace kvpool {

struct StoreOptions {
  std::uint64_t bytes_limit = 0;   // payload memory now, whole units
  std::uint64_t bytes_max = 0;     // what it may be resized to
  std::uint64_t blocks_limit = 0;  // resident blocks; 0 = as many as fit
  PolicyKind policy = PolicyKind::temperature;
  double tau_s = 0;        // 0 = follow the workload
  std::uint64_t salt = 0;  // of the index; random, so that keys cannot be chosen to collide
};

enum class NoRoom : std::uint8_t {
  none,
  pool_pinned,  // everything that could go is being read or written
  too_large,    // the block's slab is larger than the pool is now
  index_full,   // no record left, or keys crowd one neighbourhood of the index
};

struct StoreCounters {
  std::uint64_t puts = 0, present = 0, evictions = 0, removed = 0, aborted = 0;
  std::uint64_t slabs_moved = 0, blocks_moved = 0;
};

class Store {
 public:
  static Result<std::unique_ptr<Store>> create(const StoreOptions& options);
  ~Store();

  Namespaces& namespaces() { return namespaces_; }
  Result<Namespace*> open_namespace(const Hash128& id, std::uint64_t block_bytes);
  // Every key of it becomes a miss at once; memory comes back with sweep(). O(1).
  void drop(Namespace& space);

  const IndexView& view() const { return index_->view(); }
  Arena& arena() { return *arena_; }

  // --- writing ---
  struct Reserved {
    // `again`: room is being made in pieces; let others have the lock, then ask once more.
    enum class Outcome : std::uint8_t { reserved, present, pending, again, no_room } outcome;
    NoRoom why = NoRoom::none;
    BlockId record = kNoBlock;  // the new one, or the present one
    std::uint64_t offset = 0;
    // Pages to be made before anything is written; 0 bytes = they are there. `makes_slab`: those
    // of the whole slab, and pages_made() waits for the outcome.
    std::uint64_t pages_offset = 0, pages_bytes = 0;
    bool makes_slab = false;
  };
  Reserved reserve(const Namespace& space, const Hash128& key, Seconds now);
  // How it went; before commit() or abort().
  void pages_made(BlockId record, bool made);
  enum class Committed : std::uint8_t { stored, dropped, index_full };
  // Unless stored, the reservation is gone as with abort(). `parent`: the record of the block
  // before, if it is known to be resident.
  Committed commit(BlockId record, const Hash128& sum, BlockId parent, Seconds now);
  void abort(BlockId record);

  // --- reading ---
  bool find(const Namespace& space, const Hash128& key, BlockId& record) const;
  void pin(BlockId record);
  void unpin(BlockId record);
  void touch(BlockId record, Seconds now) { policy_->touch(record, now); }
  // A touch reported from outside: counts only if that generation is still there.
  void touch(BlockId record, std::uint64_t generation, Seconds now);
  void remove(BlockId record, Seconds now) { retire(record, Leave::removed, now); }

  // --- making room ---
  bool evict_one(Seconds now);
  // Keeps `share` of each class's slots free where the pool is full. Returns the evictions it took:
  // `at_most`, and a slab's worth more where a slab passes to another class.
  std::uint32_t evict_ahead(double share, std::uint32_t at_most, Seconds now);
  // Less than half of that is free: time to wake whoever evicts ahead. O(1).
  bool is_short(ClassId klass, double share) const;
  // Looks at some records and frees those of dropped namespaces. True: more are left.
  bool sweep(std::uint32_t records, Seconds now);
  // Bounded work; call again while it returns true. False: done, or nothing more can go now.
  void set_limit(std::uint64_t bytes, std::uint64_t blocks_limit);
  bool shrink_step(Seconds now);
  void step_index() { index_->step(kIndexBucketsPerStep); }
  bool index_busy() const { return index_->growing(); }
  std::optional<std::uint32_t> start_warming() { return slabs_.start_warming(); }
  void warmed(std::uint32_t unit, bool has_pages);
  std::uint32_t warm_units() const { return slabs_.free_committed(); }
  // Gives back pages that late reads brought into ranges that should have none.
  void punch_strays();
  // Gives back some of the free units that are backed by pages; how many.
  std::uint32_t trim_step();
  // A piece of dropping everything and giving all memory back but what is pinned or being written.
  // False: done.
  bool empty_step(Seconds now);

  // --- facts ---
  const StoreCounters& counters() const { return counters_; }
  PolicyStats policy_stats() const { return policy_->stats(); }
  double temperature(BlockId record) const { return policy_->temperature(record); }
  std::uint64_t resident() const { return resident_; }
  std::uint64_t reserved() const { return pending_.size(); }
  std::uint64_t zombies() const { return zombies_; }
  std::uint64_t pins() const { return pins_; }
  std::uint64_t dead() const { return dead_; }
  std::uint64_t bytes_limit() const { return slabs_.limit() * kUnitBytes; }
  std::uint64_t bytes_max() const { return bytes_max_; }
  std::uint64_t bytes_committed() const { return slabs_.committed() * kUnitBytes; }
  std::uint64_t bytes_in_slabs() const { return slabs_.units_in_slabs() * kUnitBytes; }
  std::uint64_t bytes_taken() const;
  std::uint64_t blocks_limit() const { return blocks_limit_; }
  // Memory for what is resident beside its payload: records, table, policy, books.
  std::uint64_t bytes_of_books() const;
  void check_invariants() const;

 private:
  static constexpr std::uint32_t kIndexBucketsPerStep = 1024;
  enum class State : std::uint8_t { free, reserved, resident, zombie };
  struct Private {               // beside the shared record; zero = never used
    std::uint32_t pins_or_next;  // free: next free record + 1
    State state;
    std::uint8_t klass;
    bool parked;  // resident and pinned, found so by an eviction: out of the policy's order
    std::uint8_t unused;
  };
  static_assert(sizeof(Private) == 8);
  struct PendingKey {
    Hash128 key;
    std::uint32_t incarnation;
    friend bool operator==(const PendingKey&, const PendingKey&) = default;
  };
  struct PendingHash {
    std::size_t operator()(const PendingKey& k) const { return fingerprint(k.incarnation, k.key); }
  };

  Store(const StoreOptions& options, std::unique_ptr<Arena> arena, std::unique_ptr<Arena> index,
        std::uint32_t records_max);

  enum class Room : std::uint8_t { made, again, none };
  Room make_room(ClassId klass, Seconds now);
  std::uint64_t wanted_slots(ClassId klass, double share) const;
  std::uint64_t wanted_blocks(double share) const;
  std::uint64_t spare_blocks() const;
  bool evict_from(ClassId klass, Seconds now);
  using Classes = std::bitset<kClassesMax>;
  std::optional<ClassId> coldest_class(const Classes& except) const;
  Room steal_slab(ClassId klass, Seconds now);
  bool colder_than(ClassId donor, std::uint32_t count, double bound);
  bool free_slab(ClassId donor, double bound, Seconds now);
  bool is_movable(BlockId record) const;
  bool empty_slab(SlabId slab, const std::vector<std::uint32_t>& owners);
  bool sweep_some(Seconds now);
  void retire(BlockId record, Leave why, Seconds now);
  void free_record(BlockId record);
  std::optional<BlockId> take_record();
  void punch(const std::vector<UnitRun>& runs);
  void fit_ghosts();

  std::uint64_t bytes_max_, blocks_limit_;
  std::unique_ptr<Arena> arena_, index_memory_;
  std::unique_ptr<IndexWriter> index_;
  SlabPool slabs_;
  std::unique_ptr<Policy> policy_;
  Namespaces namespaces_;
  LazyArray<Private> private_;
  std::uint32_t records_max_, records_used_ = 0, free_head_ = 0, free_count_ = 0;
  std::uint32_t sweep_at_ = 0;
  std::unordered_map<PendingKey, BlockId, PendingHash> pending_;
  std::uint64_t resident_ = 0, zombies_ = 0, pins_ = 0, dead_ = 0;
  std::vector<std::uint32_t> steal_later_;  // per class: reservations to wait before trying again
  StoreCounters counters_;
};

}  // namespace kvpool
