// Cuts an arena, or a file, into slabs and slabs into equal slots. Moves no bytes, makes no system
// call.
//
// A slab is a run of whole units (2 MiB); each size class picks the run that wastes least, and a
// slab whose last slot is given back leaves its class at once, so classes never calcify. Physical
// memory is what is limited, not addresses: the arena has kAddressFactor times more addresses than
// it may ever commit, so that a run of units is found as the others lie in practice (a history
// that keeps one small slab in every stretch of that length can prevent it). In a file, addresses
// and limit are the same, and what a record of an earlier run names is taken with restore().
//
// Invariants: 1. units committed (in a slab, or free but still backed by pages) <= unit limit,
//                except while a shrink is under way;
//             2. a slot is free or taken, never both; a slab with no taken slot does not exist;
//             3. free + held = total, for slots of a class and for units.
// Thread rule: the owner's lock. Costs: take and give O(1), except when a slab is cut (O(units)).
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/check.h"
#include "memory/arena.h"

namespace kvpool {

using ClassId = std::uint32_t;
using SlabId = std::uint32_t;
inline constexpr SlabId kNoSlab = 0xffffffff;
inline constexpr std::uint64_t kAddressFactor = 4;
inline constexpr std::uint32_t kClassesMax = 256;

struct Slot {
  std::uint64_t offset = 0;  // in the arena
  SlabId slab = kNoSlab;
  std::uint32_t index = 0;  // in the slab
};

// Units that a call found backed by pages and no longer wanted: the caller punches them.
struct UnitRun {
  std::uint32_t first = 0, count = 0;
};

class SlabPool {
 public:
  // `units`: addresses; `limit`: units that may be committed now.
  SlabPool(std::uint32_t units, std::uint32_t limit);

  // Slot size of a block: whole pages, so that a slot can be given back and read with O_DIRECT.
  static std::uint64_t slot_bytes(std::uint64_t block_bytes) {
    return (block_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  }
  // The class of a block size, made at its first use; nullopt when there are kClassesMax already.
  std::optional<ClassId> class_of(std::uint64_t block_bytes);
  // The class of a slot size whose slabs have a given length, as an earlier run chose it. nullopt:
  // the class is there with another length, there are kClassesMax already, or the numbers are none
  // of ours. Any numbers may be asked about.
  std::optional<ClassId> class_with(std::uint64_t slot_bytes, std::uint32_t slab_units);
  std::uint32_t class_count() const { return static_cast<std::uint32_t>(classes_.size()); }

  // A free slot of an existing slab; nullopt when the class has none. `owner`: below 2^31.
  std::optional<Slot> take(ClassId id, std::uint32_t owner);
  bool has_room(ClassId id) const { return classes_[id].with_room != kNoSlab; }
  // Adds a slab to the class. `punch` receives free units that must be given back for it. False:
  // not enough units under the limit, or no run of addresses long enough.
  bool add_slab(ClassId id, std::vector<UnitRun>& punch);
  // Whether it would. O(units).
  bool can_add_slab(ClassId id) const;
  void give(const Slot& slot);
  // Takes exactly this slot, and cuts the slab at exactly these units when it is not there. False,
  // and nothing changed: the slot is taken or does not exist, the units belong to another slab, are
  // not free or beyond the end, or more would be committed than the limit. Any numbers may be asked
  // for but `id`. At any time; O(1), but the slab's next take() is O(slots).
  bool restore(ClassId id, std::uint32_t first_unit, std::uint32_t index, std::uint32_t owner);

  // Who makes the pages of a slab that was cut without: its first writer (`missing`) all of them,
  // a writer that comes meanwhile (`being_made`) those of its own slot. The first one says how it
  // went while it still has its slot; where the machine refused, the next writer tries again.
  enum class Pages : std::uint8_t { missing, being_made, present };
  Pages claim_pages(SlabId slab);
  void pages_made(SlabId slab, bool made);
  bool has_pages(SlabId slab) const { return slabs_[slab]->pages == Pages::present; }

  Slot slot_at(std::uint64_t offset) const;
  // Of the slot that lies there; 0: there is none. Any number may be asked about.
  std::uint64_t slot_bytes_at(std::uint64_t offset) const {
    const std::uint64_t unit = offset / kUnitBytes;
    if (unit >= slab_of_unit_.size() || slab_of_unit_[unit] == kNoSlab) return 0;
    return classes_[slabs_[slab_of_unit_[unit]]->klass].slot_bytes;
  }
  std::uint32_t owner(const Slot& slot) const { return slabs_[slot.slab]->owners[slot.index]; }
  // A taken slot passes to another owner.
  void set_owner(const Slot& slot, std::uint32_t owner);

  // --- what a caller needs to empty slabs ---
  std::uint32_t slab_units(ClassId id) const { return classes_[id].slab_units; }
  std::uint32_t slab_slots(ClassId id) const { return classes_[id].slab_slots; }
  std::uint64_t slot_bytes_of(ClassId id) const { return classes_[id].slot_bytes; }
  std::uint64_t slab_bytes(SlabId id) const { return slabs_[id]->units * kUnitBytes; }
  std::uint64_t slab_offset(SlabId id) const { return slabs_[id]->first_unit * kUnitBytes; }
  ClassId slab_class(SlabId id) const { return slabs_[id]->klass; }
  std::uint32_t slabs_of(ClassId id) const { return classes_[id].slabs; }
  std::uint64_t free_slots(ClassId id) const { return classes_[id].slots - classes_[id].taken; }
  std::uint64_t taken_slots(ClassId id) const { return classes_[id].taken; }
  // Slabs of a class, emptiest first, at most `at_most`. O(slabs).
  std::vector<SlabId> emptiest(ClassId id, std::size_t at_most) const;
  // Owners of the taken slots of a slab.
  std::vector<std::uint32_t> owners(SlabId id) const;
  // While set, take() passes the slab by: its blocks are being moved out.
  void set_draining(SlabId id, bool draining);
  // False also for a slab that is gone, or came under the same id since.
  bool is_draining(SlabId id) const { return slabs_[id] != nullptr && slabs_[id]->draining; }

  // --- elasticity ---
  std::uint32_t limit() const { return limit_; }
  std::uint32_t committed() const { return committed_; }
  std::uint32_t units_in_slabs() const { return used_; }
  // Growing is at once. After shrinking the caller empties slabs and trims while committed() >
  // limit().
  void set_limit(std::uint32_t limit) { limit_ = limit; }
  // From this unit on no slab is cut any more, as where a file is to end; slabs that reach beyond
  // stay until they are emptied. May be raised again, up to the addresses there are.
  void set_end(std::uint32_t units);
  bool is_beyond_end(SlabId id) const {
    return slabs_[id] != nullptr && slabs_[id]->first_unit + slabs_[id]->units > end_;
  }
  // Slabs with a unit at or beyond this one, in the order they lie. O(units).
  std::vector<SlabId> slabs_beyond(std::uint32_t unit) const;
  // Takes the pages of free units away, down to `keep` units or what the limit allows, but of
  // `at_most` units: punching one costs 0.4 ms.
  void trim(std::uint32_t keep, std::uint32_t at_most, std::vector<UnitRun>& punch);
  void trim_to_limit(std::uint32_t at_most, std::vector<UnitRun>& punch);
  std::uint32_t free_committed() const { return committed_ - used_; }
  // A free unit without pages that may be committed ahead of need; it is marked as being warmed
  // and is not given out until warmed() says so. Slabs that are cut meanwhile come first: false =
  // the unit is not wanted any more, and its pages must be given back.
  std::optional<std::uint32_t> start_warming();
  bool warmed(std::uint32_t unit, bool has_pages);
  // Every unit that should have no pages, as runs. For punching what stale reads brought back.
  std::vector<UnitRun> empty_units() const;

  void check_invariants() const;

 private:
  struct Slab {
    std::uint32_t first_unit = 0, units = 0;
    ClassId klass = 0;
    std::uint32_t taken = 0;
    std::uint32_t free_head = 0;  // index of the first free slot; owners[] links the rest
    Pages pages = Pages::missing;
    bool draining = false, listed = false;
    bool threaded = true;  // false: free_head and the links of free slots mean nothing
    SlabId previous = kNoSlab, next = kNoSlab;  // in the class's list of slabs with room
    std::vector<std::uint32_t> owners;          // taken: the owner; free: next free | kFreeBit
  };
  struct SizeClass {
    std::uint64_t slot_bytes = 0;
    std::uint32_t slab_units = 0, slab_slots = 0, slabs = 0;
    std::uint64_t slots = 0, taken = 0;
    SlabId with_room = kNoSlab;  // head of the list
  };
  enum class Unit : std::uint8_t { cold, warming, warm, in_slab };

  ClassId make_class(std::uint64_t slot_bytes, std::uint32_t slab_units);
  std::optional<std::uint32_t> find_run(std::uint32_t count) const;
  bool may_cut(std::uint32_t first, std::uint32_t count) const;
  SlabId cut(ClassId id, std::uint32_t first);
  static void thread(Slab& slab);
  static std::uint32_t check_free_slots(const Slab& slab);
  void list(SlabId id);
  void unlist(SlabId id);
  void free_slab(SlabId id);

  std::vector<SizeClass> classes_;
  std::vector<std::unique_ptr<Slab>> slabs_;
  std::vector<SlabId> free_slab_ids_;
  std::vector<Unit> state_;           // per unit
  std::vector<SlabId> slab_of_unit_;  // per unit; kNoSlab outside slabs
  std::uint32_t limit_, committed_ = 0, used_ = 0, warming_ = 0;
  std::uint32_t end_;            // no slab is cut from here on
  std::uint32_t cold_from_ = 0;  // no cold unit lies below
  std::uint32_t high_ = 0;       // units from here on never had pages
  std::uint32_t low_ = 0;        // no free unit lies below
};

}  // namespace kvpool
