// Slots, slabs and units against a slow model that only knows which bytes are whose: nothing is
// given twice, nothing is lost, and what may be committed is what is committed.
#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <vector>

#include "block_random.h"
#include "core_build.h"
#include "memory/slab_pool.h"

namespace kvpool {
namespace {

constexpr std::uint64_t kKiB = 1 << 10, kMiB = 1 << 20;

// What is whose, told by the answers alone: taken ranges of bytes, and which units have pages.
class Model {
 public:
  Model(SlabPool& pool, std::uint32_t units) : pool_(pool), backed_(units, false) {}

  struct Taken {
    std::uint64_t bytes;  // of the slot
    ClassId klass;
    Slot slot;
    std::uint32_t owner;
  };

  bool take(ClassId klass) {
    const auto slot = pool_.take(klass, next_owner_);
    if (!slot) return false;
    const std::uint64_t bytes = pool_.slot_bytes_of(klass);
    const auto after = taken_.lower_bound(slot->offset);
    REQUIRE(slot->offset % kPageBytes == 0);
    REQUIRE(slot->offset + bytes <= backed_.size() * kUnitBytes);
    REQUIRE((after == taken_.end() || slot->offset + bytes <= after->first));
    if (after != taken_.begin()) {
      const auto& [offset, before] = *std::prev(after);
      REQUIRE(offset + before.bytes <= slot->offset);
    }
    taken_.emplace(slot->offset, Taken{bytes, klass, *slot, next_owner_++});
    last_offset_ = slot->offset;
    return true;
  }
  // A slab cut and its first slot taken, as a reservation does; false: not enough room.
  bool add_slab(ClassId klass) {
    std::vector<UnitRun> punched;
    if (!pool_.add_slab(klass, punched)) {
      REQUIRE(punched.empty());
      return false;
    }
    forget(punched);
    REQUIRE(take(klass));
    const SlabId slab = pool_.slot_at(last_offset_).slab;
    bool is_cold = false;
    for (std::uint32_t i = 0; i < pool_.slab_units(klass); ++i) {
      is_cold |= !backed_[unit_of(slab) + i];
      backed_[unit_of(slab) + i] = true;
    }
    using Pages = SlabPool::Pages;
    REQUIRE(pool_.claim_pages(slab) == (is_cold ? Pages::missing : Pages::present));
    if (is_cold) pool_.pages_made(slab, true);
    return true;
  }
  void give(std::map<std::uint64_t, Taken>::iterator it) {
    pool_.give(it->second.slot);
    taken_.erase(it);
  }
  void give_random(test::Random& random) {
    if (taken_.empty()) return;
    auto it = taken_.lower_bound(random.between<std::uint64_t>(0, taken_.rbegin()->first));
    give(it == taken_.end() ? taken_.begin() : it);
  }
  void give_all(test::Random& random) {
    std::vector<std::uint64_t> offsets;
    for (const auto& [offset, taken] : taken_) offsets.push_back(offset);
    std::shuffle(offsets.begin(), offsets.end(), random.engine());
    for (const std::uint64_t offset : offsets) give(taken_.find(offset));
  }
  // Units that the pool says to punch: backed until now, and under no taken slot.
  void forget(const std::vector<UnitRun>& runs) {
    for (const UnitRun& run : runs)
      for (std::uint32_t unit = run.first; unit < run.first + run.count; ++unit) {
        REQUIRE(backed_[unit]);
        backed_[unit] = false;
        const auto it = taken_.lower_bound((unit + std::uint64_t{1}) * kUnitBytes);
        if (it == taken_.begin()) continue;
        REQUIRE(std::prev(it)->first + std::prev(it)->second.bytes <= unit * kUnitBytes);
      }
  }
  void warm(std::uint32_t unit) { backed_[unit] = true; }
  bool is_backed(std::uint32_t unit) const { return backed_[unit]; }

  // Everything the pool says about itself, counted again from the taken ranges.
  void check() {
    pool_.check_invariants();
    std::map<ClassId, std::set<SlabId>> slabs;
    std::map<ClassId, std::uint64_t> slots;
    std::set<std::uint32_t> units;
    for (const auto& [offset, taken] : taken_) {
      const Slot found = pool_.slot_at(offset + taken.bytes - 1);
      REQUIRE(found.slab == taken.slot.slab);
      REQUIRE(found.index == taken.slot.index);
      REQUIRE(pool_.owner(taken.slot) == taken.owner);
      slabs[taken.klass].insert(taken.slot.slab);
      ++slots[taken.klass];
    }
    for (ClassId klass = 0; klass < pool_.class_count(); ++klass) {
      REQUIRE(pool_.slabs_of(klass) == slabs[klass].size());  // so none of them is empty
      REQUIRE(pool_.taken_slots(klass) == slots[klass]);
      REQUIRE(pool_.free_slots(klass) ==
              slabs[klass].size() * pool_.slab_slots(klass) - slots[klass]);
      for (const SlabId slab : slabs[klass]) {
        REQUIRE(pool_.slab_class(slab) == klass);
        for (std::uint32_t i = 0; i < pool_.slab_units(klass); ++i) units.insert(unit_of(slab) + i);
      }
    }
    for (const std::uint32_t unit : units) REQUIRE(backed_[unit]);
    REQUIRE(pool_.units_in_slabs() == units.size());
    const auto committed =
        static_cast<std::size_t>(std::count(backed_.begin(), backed_.end(), true));
    REQUIRE(pool_.committed() == committed);
    REQUIRE(pool_.free_committed() == committed - units.size());
  }
  std::uint64_t taken_bytes() const {
    return std::accumulate(
        taken_.begin(), taken_.end(), std::uint64_t{0},
        [](std::uint64_t sum, const auto& one) { return sum + one.second.bytes; });
  }
  std::map<std::uint64_t, Taken>& taken() { return taken_; }

 private:
  std::uint32_t unit_of(SlabId slab) const {
    return static_cast<std::uint32_t>(pool_.slab_offset(slab) / kUnitBytes);
  }

  SlabPool& pool_;
  std::map<std::uint64_t, Taken> taken_;  // by offset
  std::vector<bool> backed_;
  std::uint32_t next_owner_ = 0;
  std::uint64_t last_offset_ = 0;
};

struct Warming {
  std::vector<std::uint32_t> units;
  bool start(SlabPool& pool, const Model& model) {
    const auto unit = pool.start_warming();
    if (!unit) return false;
    REQUIRE_FALSE(model.is_backed(*unit));
    REQUIRE(std::find(units.begin(), units.end(), *unit) == units.end());
    units.push_back(*unit);
    return true;
  }
  void end(SlabPool& pool, Model& model, test::Random& random) {
    if (units.empty()) return;
    std::swap(units[random.between<std::size_t>(0, units.size() - 1)], units.back());
    const bool has_pages = random.between(0, 4) > 0;
    const bool is_room = pool.committed() + units.size() <= pool.limit();
    REQUIRE(pool.warmed(units.back(), has_pages) == (has_pages && is_room));
    if (has_pages && is_room) model.warm(units.back());
    units.pop_back();
  }
};

TEST_CASE("slab pool: free and held are the total after every random step") {
  test::Random random("slab pool");
  constexpr std::uint32_t kUnits = 96;
  for (std::size_t round = 0; round < test::scaled(24); ++round) {
    SlabPool pool(kUnits * kAddressFactor, random.between(8u, kUnits));
    Model model(pool, kUnits * kAddressFactor);
    Warming warming;
    std::vector<ClassId> classes;
    for (const std::uint64_t bytes : {1 * kKiB, 64 * kKiB, 65'537ul, 300 * kKiB, 1400 * kKiB,
                                      2 * kMiB, 3'460'300ul, 9 * kMiB, 70 * kMiB})
      classes.push_back(*pool.class_of(bytes));
    for (int step = 0; step < 400; ++step) {
      const ClassId klass = classes[random.between<std::size_t>(0, classes.size() - 1)];
      std::vector<UnitRun> punched;
      switch (random.between(0, 11)) {
        case 0:
          pool.set_limit(random.between(1u, kUnits));
          pool.trim_to_limit(random.between(0u, kUnits), punched);
          break;
        case 1:
          pool.trim(random.between(0u, 8u), random.between(0u, 20u), punched);
          break;
        case 2:
          warming.start(pool, model);
          break;
        case 3:
          warming.end(pool, model, random);
          break;
        case 4:
        case 5:
        case 6:
          for (int i = random.between(1, 40); i > 0; --i) model.give_random(random);
          break;
        default:
          for (int i = random.between(1, 40); i > 0; --i)
            if (!model.take(klass) && !model.add_slab(klass)) break;
      }
      model.forget(punched);
      model.check();
    }
    model.give_all(random);
    while (!warming.units.empty()) warming.end(pool, model, random);
    model.check();
    CHECK(pool.units_in_slabs() == 0);
    std::vector<UnitRun> punched;
    pool.trim(0, kUnits, punched);
    model.forget(punched);
    model.check();
    CHECK(pool.committed() == 0);
  }
}

TEST_CASE(
    "slab pool: never more units committed than the limit, and a shrink gives back what is free") {
  test::Random random("slab pool limit");
  SlabPool pool(4 * 64, 64);
  Model model(pool, 4 * 64);
  const ClassId klass = *pool.class_of(2 * kMiB);
  std::vector<UnitRun> punched;
  std::uint32_t limit = 64;
  for (std::size_t step = 0; step < test::scaled(4000); ++step) {
    if (random.between(0, 3) > 0) {
      if (!model.take(klass)) model.add_slab(klass);
    } else {
      model.give_random(random);
    }
    if (random.between(0, 19) == 0) {
      limit = random.between(pool.units_in_slabs() + 1, 70u);
      punched.clear();
      pool.set_limit(limit);
      pool.trim_to_limit(64, punched);
      model.forget(punched);
    }
    model.check();
    REQUIRE(pool.committed() <= limit);
  }
}

// Fills with one size after the other until none of them fits any more; bytes of blocks held.
std::uint64_t fill(SlabPool& pool, Model& model, const std::vector<std::uint64_t>& sizes,
                   test::Random& random) {
  std::vector<std::uint64_t> fitting = sizes;
  std::uint64_t bytes = 0;
  while (!fitting.empty()) {
    const auto at = random.between<std::size_t>(0, fitting.size() - 1);
    const ClassId klass = *pool.class_of(fitting[at]);
    if (model.take(klass) || model.add_slab(klass))
      bytes += fitting[at];
    else
      fitting.erase(fitting.begin() + static_cast<std::ptrdiff_t>(at));
  }
  return bytes;
}

TEST_CASE("slab pool: nine tenths of the limit usable whatever the mix of sizes") {
  test::Random random("slab pool mixes");
  constexpr std::uint32_t kUnits = 512;  // 1 GiB
  SlabPool pool(kUnits * kAddressFactor, kUnits);
  Model model(pool, kUnits * kAddressFactor);
  const std::vector<std::vector<std::uint64_t>> phases = {
      {64 * kKiB},
      {2 * kMiB},
      {65'537},
      {64 * kKiB, 2 * kMiB},
      {3'460'300},  // 3.3 MiB
      {64 * kKiB, 65'537, 300 * kKiB, 2 * kMiB, 3'460'300},
      {100 * kMiB},
      {100 * kMiB, 1 * kMiB, 3'460'300},
      {64 * kKiB}};
  for (std::size_t phase = 0; phase < phases.size(); ++phase) {
    CAPTURE(phase);
    const std::uint64_t bytes = fill(pool, model, phases[phase], random);
    model.check();
    const double share = static_cast<double>(bytes) / (kUnits * kUnitBytes);
    CAPTURE(share);
    CHECK(share >= 0.9);
    // Half of the phases leave some of the old blocks behind.
    if (phase % 2 == 0)
      model.give_all(random);
    else
      while (pool.units_in_slabs() > 0) model.give_random(random);
    model.check();
  }
}

TEST_CASE("slab pool: a draining slab gives no slots, takes them back, and goes with the last") {
  SlabPool pool(64, 16);
  Model model(pool, 64);
  const ClassId klass = *pool.class_of(512 * kKiB);
  REQUIRE(model.add_slab(klass));
  for (int i = 1; i < 6; ++i) REQUIRE((model.take(klass) || model.add_slab(klass)));
  REQUIRE(pool.slabs_of(klass) == 2);
  const SlabId emptier = pool.emptiest(klass, 1).at(0);
  CHECK(pool.owners(emptier).size() == 2);
  pool.set_draining(emptier, true);
  pool.check_invariants();
  CHECK_FALSE(pool.take(klass, 1).has_value());  // the other is full
  pool.set_draining(emptier, false);
  CHECK(model.take(klass));
  pool.set_draining(emptier, true);
  std::vector<std::uint64_t> offsets;
  for (const auto& [offset, taken] : model.taken())
    if (taken.slot.slab == emptier) offsets.push_back(offset);
  for (const std::uint64_t offset : offsets) model.give(model.taken().find(offset));
  model.check();
  CHECK(pool.slabs_of(klass) == 1);
}

TEST_CASE("slab pool: memory that is being made does not keep a slab from being cut") {
  SlabPool pool(16, 4);
  std::vector<UnitRun> punched;
  std::vector<std::uint32_t> warming;
  while (const auto unit = pool.start_warming()) warming.push_back(*unit);
  CHECK(warming.size() == 4);
  const ClassId klass = *pool.class_of(2 * kMiB);
  for (int i = 0; i < 4; ++i) {
    REQUIRE(pool.add_slab(klass, punched));
    REQUIRE(pool.take(klass, 1).has_value());
  }
  CHECK(punched.empty());
  for (const std::uint32_t unit : warming) CHECK_FALSE(pool.warmed(unit, true));
  pool.check_invariants();
  CHECK(pool.committed() == 4);
}

TEST_CASE("slab pool: one writer of a slab without pages is told to make them, until it has") {
  using Pages = SlabPool::Pages;
  SlabPool pool(64, 8);
  std::vector<UnitRun> punched;
  const ClassId klass = *pool.class_of(1 * kMiB);
  REQUIRE(pool.add_slab(klass, punched));
  const Slot first = *pool.take(klass, 1);
  CHECK(pool.claim_pages(first.slab) == Pages::missing);
  CHECK(pool.claim_pages(first.slab) == Pages::being_made);
  pool.pages_made(first.slab, false);
  CHECK(pool.claim_pages(first.slab) == Pages::missing);  // the next one tries again
  pool.pages_made(first.slab, false);
  pool.give(first);
  CHECK(pool.committed() == 0);  // no pages, so none are counted
  REQUIRE(pool.add_slab(klass, punched));
  const Slot second = *pool.take(klass, 1);
  CHECK(pool.claim_pages(second.slab) == Pages::missing);
  pool.pages_made(second.slab, true);
  pool.give(second);
  CHECK(pool.committed() == 1);
  REQUIRE(pool.add_slab(klass, punched));  // the same unit, warm now
  const Slot again = *pool.take(klass, 1);
  CHECK(again.offset == first.offset);
  CHECK(pool.claim_pages(again.slab) == Pages::present);
}

// Blocks of every length come and go at random until addresses lie as scattered as they can.
TEST_CASE("slab pool: a long slab fits however the others lie") {
  test::Random random("slab pool fragmentation");
  constexpr std::uint32_t kUnits = 2048;  // 4 GiB
  SlabPool pool(kUnits * kAddressFactor, kUnits);
  std::vector<ClassId> classes;
  for (const std::uint64_t units : {1, 2, 3, 5, 8, 13, 21, 32, 40})
    classes.push_back(*pool.class_of(units * kUnitBytes));
  const ClassId longest = *pool.class_of(256 * kUnitBytes);
  std::vector<Slot> held;
  std::vector<UnitRun> punched;
  std::uint64_t cut = 0;
  for (std::size_t round = 0; round < test::scaled(3000); ++round) {
    for (;;) {
      const ClassId klass = classes[random.between<std::size_t>(0, classes.size() - 1)];
      if (!pool.add_slab(klass, punched)) {
        REQUIRE(pool.units_in_slabs() + pool.slab_units(klass) > pool.limit());
        break;
      }
      held.push_back(*pool.take(klass, 0));
      ++cut;
    }
    std::shuffle(held.begin(), held.end(), random.engine());
    while (pool.units_in_slabs() > kUnits - 256) {
      pool.give(held.back());
      held.pop_back();
    }
    REQUIRE(pool.add_slab(longest, punched));
    pool.give(*pool.take(longest, 0));
    // Now and then most of it goes, so that what stays lies far apart.
    while (round % 8 == 7 && pool.units_in_slabs() > kUnits / 16) {
      pool.give(held.back());
      held.pop_back();
    }
  }
  pool.check_invariants();
  MESSAGE("slabs cut: " << cut);
}

// The adversary of every allocator that moves nothing: leave holes just too short for what is
// asked next, twice as long each time.
TEST_CASE(
    "slab pool: holes too short at every length up to a whole slab do not exhaust addresses") {
  constexpr std::uint32_t kUnits = 2048;
  SlabPool pool(kUnits * kAddressFactor, kUnits);
  std::vector<UnitRun> punched;
  std::map<std::uint64_t, Slot> held;
  std::map<std::uint64_t, std::uint32_t> length;
  for (std::uint32_t units = 1; units <= 32; units *= 2) {
    // Of every aligned window keep the least that spoils it for a run of `units`.
    std::map<std::uint64_t, std::vector<std::uint64_t>> windows;
    for (const auto& [offset, slot] : held) windows[offset / kUnitBytes / units].push_back(offset);
    for (auto& [window, offsets] : windows)
      for (std::size_t i = 1; i < offsets.size(); ++i) {
        pool.give(held.at(offsets[i]));
        held.erase(offsets[i]);
      }
    const ClassId klass = *pool.class_of(units * kUnitBytes);
    while (pool.units_in_slabs() + units <= kUnits) {
      CAPTURE(units);
      REQUIRE(pool.add_slab(klass, punched));
      const Slot slot = *pool.take(klass, 0);
      held.emplace(slot.offset, slot);
    }
  }
  pool.check_invariants();
  MESSAGE("addresses used, of the limit: "
          << static_cast<double>(held.rbegin()->first / kUnitBytes) / kUnits);
}

TEST_CASE("slab pool: as many sizes as there are classes, then a refusal") {
  SlabPool pool(64, 16);
  for (std::uint64_t i = 1; i <= kClassesMax; ++i) {
    REQUIRE(pool.class_of(i * kPageBytes) == static_cast<ClassId>(i - 1));
    REQUIRE(pool.class_of(i * kPageBytes - 1) == static_cast<ClassId>(i - 1));
  }
  CHECK_FALSE(pool.class_of((kClassesMax + 1) * kPageBytes).has_value());
  CHECK(pool.class_of(kPageBytes) == 0u);
}

TEST_CASE("slab pool: the largest block takes one slab and wastes less than a unit") {
  SlabPool pool(4096 * 4, 4096);
  const std::uint64_t bytes = 1ull << 31;
  const ClassId klass = *pool.class_of(bytes);
  CHECK(pool.slab_slots(klass) == 1);
  CHECK(pool.slab_units(klass) * kUnitBytes == bytes);
  const ClassId odd = *pool.class_of(bytes - 4095);
  CHECK(odd == klass);
  std::vector<UnitRun> punched;
  for (int i = 0; i < 4; ++i) {
    REQUIRE(pool.add_slab(klass, punched));
    CHECK(pool.take(klass, 1)->offset == static_cast<std::uint64_t>(i) * bytes);
  }
  CHECK_FALSE(pool.add_slab(klass, punched));
}

}  // namespace
}  // namespace kvpool
