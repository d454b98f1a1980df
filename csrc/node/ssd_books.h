// What the node remembers about its SSD tier: who lies where, who is to be written, what is to be
// deleted, and how warm everything is. Moves no bytes, knows no thread and no lock.
//
// Slots of the slab file are given out by a SlabPool. A slot that is not wanted any more is first
// doomed: its entry is deleted by the next group, and only when that group is in the index may the
// slot be written again.
//
//   free -> taken (a write under way) -> an entry's -> doomed -> free
//                         \-> quarantined (the device refused it; until the next open)
//
// Heat: one policy over all blocks of the node, whichever tier they lie in. Its order among those
// on the SSD (group 1 + class) says who leaves the SSD; a block that has children in any tier is in
// no order, so no suffix stays behind its parent. Group 0 holds those that lie in DRAM alone.
//
// Promises:  1. a slot has one owner; free + taken + doomed + quarantined = slots of all slabs;
//            2. a doomed slot is not given out before done_deleting() says so;
//            3. memory follows what is used: some 50 bytes a block beside its record, none
//               without a tier.
// Thread rule: the node's lock.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/lazy_array.h"
#include "memory/slab_pool.h"
#include "node/write_queue.h"
#include "policy/policy.h"
#include "tier/ssd.h"

namespace kvpool {

enum class SsdAdmit : std::uint8_t {
  second_use,  // a block that was used again, or comes back
  all,
};

struct SsdBooksOptions {
  SsdFacts facts;
  std::uint64_t units_max = 0;    // what the slab file may grow to
  std::uint32_t records_max = 0;  // block ids are below
  PolicyKind policy = PolicyKind::temperature;
  double tau_s = 0;
  std::uint64_t ghosts_max = 0;
  SsdAdmit admit = SsdAdmit::second_use;
  bool free_late = false;  // `relaxed`: slots come free one group later
};

class SsdBooks {
 public:
  static constexpr Group kInDramOnly = 0;

  explicit SsdBooks(const SsdBooksOptions& options);

  const SsdBooksOptions& options() const { return options_; }
  Policy& heat() { return *heat_; }
  const Policy& heat() const { return *heat_; }
  static Group group_of(ClassId klass) { return klass + 1; }

  // --- slots ---
  // The class of that slot size, made at its first use; nullopt when there are too many.
  std::optional<ClassId> class_of(std::uint64_t slot_bytes);
  // False: slabs so long cannot be here; restore_slot() then takes nothing of that slot size.
  bool restore_class(const SsdClass& found);
  bool restore_slot(const SsdPlace& place, BlockId owner);
  // nullopt: no free slot, no room for another slab, or as many entries as the index holds.
  std::optional<SsdPlace> take(ClassId klass, BlockId owner, std::uint32_t bytes);
  void give(const SsdPlace& place);
  void quarantine(const SsdPlace& place);
  // To be quarantined when it would come free: what lies there cannot be read.
  void condemn(const SsdPlace& place) { condemned_.push_back(place); }
  // The old slot of a block that a group has moved.
  void left_by_move(const SsdPlace& place);
  // Another end of the slab file. Where it is nearer, settle_end() once nothing lies beyond.
  void set_facts(const SsdFacts& facts);
  void settle_end() { slots_.set_limit(static_cast<std::uint32_t>(options_.facts.units)); }
  static bool is_nobody(std::uint32_t owner) { return owner == kNobody; }
  bool has_nobody(SlabId slab) const;
  // Quarantined slots of a slab that is cut off come free: nobody will write there.
  void give_up_nobodies(SlabId slab);
  SlabPool& slots() { return slots_; }
  const SlabPool& slots() const { return slots_; }
  // Slots that a class should have free, so that a group finds room while its victims' is not free.
  std::uint64_t wanted_free(ClassId klass) const;
  // Free, or about to be.
  std::uint64_t coming_free(ClassId klass) const;
  bool can_add_slab(ClassId klass) const { return slots_.can_add_slab(klass); }
  // A name takes room as an entry does.
  bool is_index_full() const { return entries_ + spaces_ + 1 > options_.facts.entries_max; }

  // --- who lies where ---
  SsdPlace place(BlockId record, std::uint32_t bytes) const {
    return {places_[record].slab_unit, places_[record].slot, bytes};
  }
  void set_place(BlockId record, const SsdPlace& place);
  void entry_added() { ++entries_; }  // or about to be
  void entry_not_added() { --entries_; }
  // In the index, doomed ones included, and those that a group is adding.
  std::uint64_t entries() const { return entries_; }

  // --- who is to be written, oldest first ---
  WriteQueue& queue() { return queue_; }
  std::size_t queued() const { return queue_.size(); }

  // Those that could not be written, until somebody tries again.
  void note_unwritten(BlockId record) { unwritten_.push_back(record); }
  std::vector<BlockId> take_unwritten() {
    retries_ += unwritten_.size();
    return std::exchange(unwritten_, {});
  }
  std::uint64_t last_retry() const { return retries_; }  // counts them
  bool has_unwritten() const { return !unwritten_.empty(); }

  // --- what is to be deleted ---
  void doom(const BlockKey& key, const SsdPlace& place);
  void take_doomed(std::size_t at_most, std::vector<SsdDelete>& out);
  void done_deleting(std::span<const SsdDelete> deletes, bool committed);
  std::size_t doomed() const { return doomed_.size(); }
  // Also those whose group is under way.
  std::uint64_t doomed_in_class(ClassId klass) const { return doomed_in_class_[klass]; }
  // `relaxed`: slots that wait for one more commit.
  bool owes_commit() const { return !free_next_.empty(); }

  // --- names in the index ---
  static constexpr std::size_t kNamesPerGroup = 256;
  // New names must wait for the next group.
  bool is_naming_full() const { return new_spaces_.size() >= kNamesPerGroup; }
  // No more names at all: those that have no blocks left go at the next open, and until then the
  // other half of the index is for entries.
  bool has_all_names() const { return spaces_ >= options_.facts.entries_max / 2; }
  // Records of namespaces in the index, or about to be.
  std::uint64_t spaces() const { return spaces_; }
  // What was there at open. One without entries is deleted, some with each group.
  void restore_space(std::uint32_t incarnation, std::uint32_t number);
  void forget_space(std::uint32_t number);
  // Number of the namespace with that incarnation; 0 = it has none yet.
  std::uint32_t number(std::uint32_t incarnation) const;
  std::uint32_t name_space(std::uint32_t incarnation, const Hash128& id, std::uint64_t block_bytes);
  void drop_space(std::uint32_t incarnation);
  // Moves what the index does not know yet into the group; back with done_naming() if it failed.
  void take_names(SsdGroup& group);
  void done_naming(const SsdGroup& group, bool committed);
  bool drops_pending() const { return !dropped_.empty() || drops_in_group_ > 0; }
  // Some wait to be deleted.
  bool has_names() const { return !dropped_.empty() || !unused_.empty(); }

  // --- uses that the index does not know yet, newest last, at most kStampsMax ---
  static constexpr std::size_t kStampsMax = 1 << 16;
  bool note_use(BlockId record);  // false: the list is full
  std::optional<BlockId> next_used();

  std::uint64_t quarantined() const { return quarantined_; }
  std::uint64_t bytes_taken() const;
  std::uint64_t bytes() const;  // memory
  void check_invariants() const;

 private:
  void set_number(std::uint32_t incarnation, std::uint32_t number);
  void free_now(const SsdPlace& place);
  ClassId class_at(const SsdPlace& place) const;

  // An owner that is no record: above all ids, below the bit that a SlabPool keeps for itself.
  static constexpr std::uint32_t kNobody = 0x7ffffffe;
  struct Place {
    std::uint32_t slab_unit, slot;
  };

  SsdBooksOptions options_;
  SlabPool slots_;
  std::unique_ptr<Policy> heat_;
  LazyArray<Place> places_;
  WriteQueue queue_;
  std::deque<BlockId> used_;
  std::vector<BlockId> unwritten_;
  std::uint64_t retries_ = 0;
  std::vector<SsdDelete> doomed_;
  std::vector<SsdPlace> free_next_, condemned_;
  std::vector<std::uint64_t> doomed_in_class_;
  std::vector<std::uint32_t> number_of_;  // by incarnation
  std::uint64_t next_number_;
  std::vector<SsdSpace> new_spaces_;
  std::vector<SsdClass> new_classes_;
  std::vector<std::uint32_t> dropped_, unused_;
  std::size_t drops_in_group_ = 0;
  std::uint64_t entries_ = 0, spaces_ = 0, quarantined_ = 0;
};

}  // namespace kvpool
