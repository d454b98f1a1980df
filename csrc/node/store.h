// What a node holds: records, index, slabs, policy and namespaces, kept consistent. No threads, no
// lock, no waiting, no clock: the Node above adds those.
//
//   free -> reserved -> resident -> free        a block that nobody pins when it goes
//                           \-> zombie -> free  one that somebody still reads
//
// A resident block lies in DRAM, on the SSD, or in both; its record is the same throughout
// (node/ssd_books.h, store_ssd.cc).
//
// Invariants: 1. a key of a namespace has at most one record that is reserved or resident;
//             2. only commit() and restore() make a key visible, only retire() takes one away;
//             3. a slot is given back when its record is neither reserved, resident nor pinned, or
//                when the block has a copy in another tier and nobody pins it; and then only if no
//                client names it (vacate): until then it is held;
//             4. records free + reserved + resident + zombie = records ever used, and the same for
//                slots (check_invariants counts both);
//             5. a block on the SSD has its parent there too, so no suffix survives its prefix.
// Thread rule: the node's lock. Readers run beside it through IndexReader.
#pragma once
#include <bitset>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/lazy_array.h"
#include "base/status.h"
#include "memory/slab_pool.h"
#include "node/changes.h"
#include "node/departures.h"
#include "node/hazards.h"
#include "node/index_writer.h"
#include "node/namespaces.h"
#include "node/ssd_books.h"
#include "policy/policy.h"
#include "policy/reuse_book.h"

namespace kvpool {

struct StoreOptions {
  std::uint64_t bytes_limit = 0;   // payload memory now, whole units
  std::uint64_t bytes_max = 0;     // what it may be resized to
  std::uint64_t blocks_limit = 0;  // resident blocks; 0 = as many as fit
  PolicyKind policy = PolicyKind::temperature;
  double tau_s = 0;        // 0 = follow the workload
  std::uint64_t salt = 0;  // of the index; random, so that keys cannot be chosen to collide
  bool sealed = false;     // memory of a fixed size that no client can map for writing
  std::uint64_t ssd_entries_max = 0;  // blocks that an SSD tier may come to hold; 0 = there is none
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
  std::uint64_t copies = 0;  // of blocks that another node has; not among the puts
  // With an SSD tier. `evictions` counts whatever left DRAM for room; of these:
  std::uint64_t demotions = 0;          // stay on the SSD
  std::uint64_t evicted_unwritten = 0;  // were on their way there, and are gone
  std::uint64_t promotions = 0, ssd_evictions = 0, ssd_moved = 0;
  std::uint64_t not_worth = 0;    // colder than anything on a full SSD
  std::uint64_t ssd_no_room = 0;  // nothing on the SSD could go
  std::uint64_t ssd_lost = 0;     // copies that could not be read
  std::uint64_t restored = 0, restored_hits = 0, restored_orphans = 0;
};

// What one group does, and which records it is about. Made by Store::begin_group() and so on,
// carried out by the node's writer, told to Store::group_settled() and so on.
struct WriteBack {
  struct Item {  // one per write of the group
    BlockId record = kNoBlock;
    bool is_move = false;
    SsdPlace from;               // is_move: where the bytes are, unless they are in DRAM as well
    bool is_unreadable = false;  // is_move: they are not there any more
  };
  SsdGroup group;
  std::vector<Item> items;
  std::unordered_map<BlockId, std::uint32_t> index_of;  // in both
  std::uint64_t bytes = 0;
  bool must_commit = false;  // even if it does nothing: slots wait for one more commit
  bool empty() const {
    return items.empty() && group.deletes.empty() && group.stamps.empty() &&
           group.dropped_spaces.empty() && group.new_spaces.empty() && !must_commit;
  }
};

class Store {
 public:
  static Result<std::unique_ptr<Store>> create(const StoreOptions& options);
  ~Store();

  Namespaces& namespaces() { return namespaces_; }
  Result<Namespace*> open_namespace(const Hash128& id, std::uint64_t block_bytes);
  // Every key of it becomes a miss at once; memory comes back with sweep(). O(1).
  void drop(Namespace& space);
  // Where the coming and going of blocks is noted.
  Listeners& listeners() { return listeners_; }

  const IndexView& view() const { return index_->view(); }
  Arena& arena() { return *arena_; }
  const Arena& index_memory() const { return *index_memory_; }

  // --- clients that pin by naming slots ---
  void attach(const Hazards& hazards) { hazards_.add(hazards); }
  void detach(const Hazards& hazards) {
    hazards_.remove(hazards);
    poll_hazards();
  }
  // What clients name no more is given back, or may be evicted again. True: something was.
  bool poll_hazards();
  std::uint64_t held_slots() const { return held_.size(); }
  // Whether these name more than so many bytes of slots, and a few blocks that get() looks at.
  bool names_too_much(const Hazards& hazards, std::uint64_t bytes_max) const;

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
  enum class Committed : std::uint8_t { stored, dropped, index_full, no_memory };
  // Unless stored, the reservation is gone as with abort(). `parent`: the record of the block
  // before, if it is known to be resident.
  Committed commit(BlockId record, const Hash128& sum, BlockId parent, Seconds now);
  void abort(BlockId record);
  // The same for the copy of a block that another node has (store_copies.cc). Asked once for each
  // block that a reader wants here, since an answer of no is remembered as a use.
  bool is_worth_a_copy(const Namespace& space, const Hash128& key, Seconds now);
  // `heat`: of the block where it comes from; 0 = not known.
  Committed commit_copy(BlockId record, const Hash128& sum, BlockId parent, double heat,
                        Seconds now);
  void abandon_copy(BlockId record);
  // Whether a copy of a block of that heat, made here unasked, would outlast the coldest quarter.
  bool is_warm_copy(const Namespace& space, double heat, Seconds now);
  // No other node has it (any more): it is a copy no longer.
  void be_last(BlockId record, Seconds now);
  bool is_copy(BlockId record) const { return private_[record].copy; }

  // --- reading ---
  bool find(const Namespace& space, const Hash128& key, BlockId& record) const;
  void pin(BlockId record);
  void unpin(BlockId record);
  void touch(BlockId record, Seconds now);
  // A touch reported from outside: counts only if that generation is still there.
  void touch(BlockId record, std::uint64_t generation, Seconds now);
  // A put found it here: as good as a use for what stays, but nobody asked for the block.
  void refresh(BlockId record, Seconds now);
  void remove(BlockId record, Seconds now) { retire(record, Gone::removed, now); }

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

  // --- the SSD tier (store_ssd.cc) ---
  // Once, before anything is put.
  void attach_ssd(const SsdBooksOptions& options);
  void detach_ssd();
  bool has_ssd() const { return ssd_ != nullptr; }
  SsdBooks& ssd() { return *ssd_; }
  // Takes in what the tier has. An entry for which this says false cannot be kept. After the last
  // one: an error if there are blocks that this pool has no room to bring back.
  void restore_spaces(const std::vector<SsdSpace>& spaces, const std::vector<SsdClass>& classes,
                      std::uint64_t entries);
  bool restore_entry(const BlockKey& key, const BlockEntry& entry);
  Result<void> entries_restored();
  // After the last entry: chains and heat. `heat_of` is asked once per record, by record.
  using HeatOf = std::function<double(BlockId)>;
  using ParentOf = std::function<Hash128(BlockId)>;
  void restore_chains(const ParentOf& parent_of, const HeatOf& heat_of, Seconds now);

  bool is_in_dram(BlockId record) const { return (private_[record].flags & kInDram) != 0; }
  bool is_loading(BlockId record) const { return (private_[record].flags & kLoading) != 0; }
  bool is_on_ssd(BlockId record) const { return (private_[record].flags & kOnSsd) != 0; }
  // On its way to the SSD, and not yet known to have arrived or failed.
  bool is_due(BlockId record) const { return (private_[record].flags & (kQueued | kWriting)) != 0; }
  std::uint8_t tiers_of(BlockId record) const {
    return private_[record].flags & (kInDram | kOnSsd);
  }
  // Of the block before a resident one, as far as the policy keeps chains; zero: none is known.
  Hash128 parent_key(BlockId record) const;
  void write_soon(BlockId record);
  // What the next group holds, at most so much. Pins what is to be written.
  struct GroupLimits {
    std::size_t blocks = 256;
    std::uint64_t bytes = 32ull << 20;
    bool must = false;  // durable: what is queued is written, worth it or not
    std::uint32_t stamp_s = 0;
  };
  // In pieces, since puts wait meanwhile: begin, fill while it says true, end; after the commit
  // settled, writes_done for all of them, over.
  void begin_group(const GroupLimits& limits, WriteBack& batch, Seconds now);
  bool fill_group(const GroupLimits& limits, WriteBack& batch, std::size_t at_most, Seconds now);
  void end_group(const GroupLimits& limits, WriteBack& batch, Seconds now);
  void group_settled(const WriteBack& batch, bool committed);
  void writes_done(const WriteBack& batch, std::size_t from, std::size_t until, Seconds now);
  void group_over(const WriteBack& batch);
  // False: the writer may sleep.
  bool has_group_work() const {
    return ssd_->queued() > 0 || ssd_->doomed() > 0 || ssd_->has_names() || draining_ ||
           is_ssd_shrinking_;
  }
  // Every block that the tier admits and does not have goes into the queue. O(records).
  void queue_all();
  // So does what could not be written before.
  void queue_unwritten();
  void stop_queueing();  // the tier takes no more writes: nobody is due any more
  void stop_moving() {   // it closes: nothing is evicted or moved for room any more
    draining_.reset();
    is_ssd_shrinking_ = false;
  }

  // A DRAM slot for a pinned block that is on the SSD alone. `forced`: whether or not it is warm
  // enough to stay. no_room: read it past DRAM.
  Reserved reserve_promotion(BlockId record, bool forced, Seconds now);
  // Its bytes are in that slot: readable there from now on. False: it was removed meanwhile, and
  // the slot is given back.
  bool promote(BlockId record, std::uint64_t offset, Seconds now);
  void abandon_promotion(BlockId record, std::uint64_t offset);
  void promotion_pages_made(std::uint64_t offset, bool made);
  // The SSD's copy cannot be read: the block loses it, or is gone if that was all.
  void lose_ssd_copy(BlockId record, bool quarantine, Seconds now);
  SsdPlace ssd_place(BlockId record) const {
    return ssd_->place(record, index_->fields(record).bytes);
  }
  Hash128 sum_of(BlockId record) const;
  // Another length of the slab file. A shorter one is emptied by the groups that follow.
  void set_ssd_units(const SsdFacts& facts);
  bool is_ssd_shrinking() const { return is_ssd_shrinking_; }

  // --- for those who ask about blocks (store_observe.cc) ---
  struct Explained {
    std::uint64_t tiers = 0;  // TierBits; 0 = nowhere, and then only `gone` and `ghost_heat` count
    double heat = 0;
    double temperature = 0;         // of the tier it lies in; the fastest, if there are two
    std::optional<Seconds> idle_s;  // nullopt: this policy keeps no times
    std::uint32_t pins = 0;         // clients that read it in place count as one
    std::optional<Departure> gone;
    std::optional<double> ghost_heat;
  };
  Explained explain(const Namespace& space, const Hash128& key, Seconds now) const;
  // Of the block in DRAM that would leave next; nullopt: nothing can.
  std::optional<double> coldest_heat(Seconds now) const;
  // A put that was turned away, so that this can be said of a block that never came.
  void note_refused(const Namespace& space, const Hash128& key, std::uint8_t status, Seconds now);
  const ReuseBook& reuse() const { return reuse_; }
  std::uint32_t records_used() const { return records_used_; }
  bool is_resident(BlockId record) const { return private_[record].state == State::resident; }
  // Knows every block that is resident, in whichever tier.
  const Policy& uses() const { return ssd_ ? ssd_->heat() : *policy_; }

  // --- facts ---
  // Of a reservation or block; nullptr: its namespace was dropped.
  std::pair<const Namespace*, Hash128> name_of(BlockId record) const {
    const IndexWriter::Fields fields = index_->fields(record);
    return {namespaces_.of(fields.incarnation), fields.key};
  }
  std::uint64_t ssd_blocks() const { return on_ssd_; }
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
  // Of a slot that no record has any more.
  static constexpr std::uint32_t kHeldOwner = 0x7ffffffe;
  enum class State : std::uint8_t { free, reserved, resident, zombie };
  struct Private {               // beside the shared record; zero = never used
    std::uint32_t pins_or_next;  // free: next free record + 1
    State state;
    std::uint8_t klass;
    bool parked : 1;    // resident and pinned, found so by an eviction: out of the policy's order
    bool unworthy : 1;  // colder than all on the SSD when it was to be written
    bool copy : 1;      // another node had it when it came, and nobody has put it here since
    std::uint8_t flags;
  };
  static_assert(sizeof(Private) == 8);
  enum Flags : std::uint8_t {
    kInDram = 1,      // has a slot of the arena
    kOnSsd = 2,       // its entry is in the index of the SSD tier
    kLoading = 4,     // a second slot of the arena is being filled from the SSD
    kQueued = 8,      // waits to be written
    kWriting = 16,    // is being written, and pinned for it
    kSsdParked = 32,  // `parked`, of the order in which blocks leave the SSD
    kRestored = 64,   // was on the SSD when the pool was opened
    kUsed = 128,      // used since the index of the SSD tier heard of it
  };
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
  BlockId take_unpinned(ClassId klass);
  BlockId take_victim(ClassId klass);
  using Classes = std::bitset<kClassesMax>;
  std::optional<ClassId> coldest_class(const Classes& except) const;
  Room steal_slab(ClassId klass, Seconds now);
  bool colder_than(ClassId donor, std::uint32_t count, double bound);
  bool free_slab(ClassId donor, double bound, Seconds now);
  bool is_movable(BlockId record) const;
  bool empty_slab(SlabId slab, const std::vector<std::uint32_t>& owners);
  bool sweep_some(Seconds now);
  void retire(BlockId record, Gone why, Seconds now);
  void note_gone(BlockId record, const IndexWriter::Fields& fields, Gone why, Seconds now);
  void use(BlockId record, Seconds now);
  void fit_reach();
  void release_slots(BlockId record);
  void vacate(std::uint64_t offset);
  bool is_named(BlockId record) const { return hazards_.names(index_->fields(record).offset); }
  void free_record(BlockId record);
  std::optional<BlockId> take_record();
  void claim_pages(const Slot& slot, ClassId klass, Reserved& answer);
  void leave_dram(BlockId record, Seconds now);
  void demote(BlockId record, Seconds now);
  void doom(BlockId record);
  Namespace* restored_space(std::uint32_t number);
  std::vector<BlockId> restored_parents(const ParentOf& parent_of) const;
  bool enter_dram_order(BlockId record, BlockId parent, Seconds now);
  bool enter_orders(BlockId record, BlockId parent, bool& is_remembered, Seconds now);
  void leave_orders(BlockId record, Seconds now);
  bool is_warm_enough(BlockId record) const;
  bool is_full(ClassId klass) const;
  bool has_room_for_copies(ClassId klass) const;
  double coldest_quarter(Seconds now) const;
  std::optional<ClassId> ssd_class(BlockId record) const;
  // not_now: when the group before it is done. never: it cannot be written, or is not worth it.
  enum class Added : std::uint8_t { yes, not_now, never, no_room };
  Added add_chain(BlockId record, const GroupLimits& limits, WriteBack& batch, Seconds now);
  Added may_be_named(std::uint32_t incarnation);
  Added add_write(BlockId record, const GroupLimits& limits, WriteBack& batch, Seconds now);
  Added make_ssd_room(BlockId record, ClassId klass, bool must, Seconds now);
  std::optional<ClassId> coldest_ssd_class() const;
  bool evict_from_ssd(ClassId klass, Seconds now, int uncover_max = 0);
  bool drop_coldest_unwritten(Seconds now);
  void unqueue(BlockId record);
  void drop_ssd_copy(BlockId record);
  void free_ssd_ahead(Seconds now);
  bool start_draining(ClassId klass, double bound, Seconds now);
  std::optional<SlabId> slab_to_empty();
  void add_moves(const GroupLimits& limits, WriteBack& batch, Seconds now);
  bool add_move(BlockId record, const GroupLimits& limits, WriteBack& batch, Seconds now);
  void make_room_to_move(ClassId klass, Seconds now);
  void begin_write(BlockId record, const SsdPlace& place, const GroupLimits& limits,
                   WriteBack& batch, Seconds now);
  void add_stamps(const GroupLimits& limits, WriteBack& batch, Seconds now);
  void write_done(const SsdWrite& write, const WriteBack::Item& item, Seconds now);
  Hash128 parent_hash(BlockId record) const;
  void check_ssd_invariants() const;
  void punch(const std::vector<UnitRun>& runs);
  void fit_ghosts();
  void announce(const Namespace& space);
  void note_tiers(BlockId record, std::uint8_t before) const;

  Listeners listeners_;
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
  std::uint64_t in_dram_ = 0, on_ssd_ = 0, loading_ = 0;  // in_dram_: slots of resident blocks
  std::unique_ptr<SsdBooks> ssd_;
  bool takes_writes_ = false;    // the SSD tier
  std::uint32_t due_later_ = 0;  // evictions until a victim that is not due is looked for again
  bool is_ssd_shrinking_ = false;
  std::uint32_t idle_moves_ = 0, drain_later_ = 0;
  // The heat below which a quarter of the blocks in DRAM lie, about, and when to look again.
  double quarter_heat_ = 0;
  Seconds quarter_until_ = 0;
  std::optional<SlabId> draining_;  // of the slab file: its blocks are being moved out
  struct Restoring {
    SsdSpace found;
    Namespace* space;  // nullptr: no entry of it has come
  };
  std::unordered_map<std::uint32_t, Restoring> restoring_;  // by number, during restore
  std::optional<Error> restore_error_;
  HazardBoard hazards_;
  std::vector<std::uint64_t> held_;         // slots of nobody, that some client may be reading
  std::vector<BlockId> named_;              // resident, parked because a client names them
  std::vector<std::uint32_t> steal_later_;  // per class: reservations to wait before trying again
  StoreCounters counters_;
  Departures departures_;
  ReuseBook reuse_;
};

}  // namespace kvpool
