// The slab pool over a file: slots taken where an earlier run left them, against a model that can
// foretell every answer; and a file whose end moves.
#include <algorithm>
#include <ctime>
#include <map>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "block_random.h"
#include "core_build.h"
#include "memory/slab_pool.h"

namespace kvpool {
namespace {

constexpr std::uint64_t kKiB = 1 << 10, kMiB = 1 << 20;

TEST_CASE("slab pool: a class with the slabs of an earlier run, or a refusal") {
  SlabPool pool(64, 64);
  const ClassId klass = *pool.class_with(65'536, 3);
  CHECK(pool.slab_slots(klass) == 96);
  CHECK(pool.slab_units(klass) == 3);
  CHECK(pool.class_with(65'536, 3) == klass);
  CHECK(pool.class_of(65'000) == klass);
  CHECK(pool.class_with(3 * kMiB, 2).has_value());
  CHECK(pool.class_with(64 * kUnitBytes, 64).has_value());
  const std::uint32_t made = pool.class_count();
  const std::pair<std::uint64_t, std::uint32_t> bad[] = {
      {65'536, 2},  // there with another length
      {0, 1},           {kPageBytes, 0},
      {0, 0},           {kPageBytes + 1, 1},  // not whole pages
      {3 * kMiB, 1},                          // longer than its slab
      {kPageBytes, 65},                       // longer than all there is
      {~0ull, 1},       {~0ull - 4095, ~0u},
      {kPageBytes, ~0u}};
  for (const auto& [slot_bytes, slab_units] : bad) {
    CAPTURE(slot_bytes);
    CAPTURE(slab_units);
    CHECK_FALSE(pool.class_with(slot_bytes, slab_units).has_value());
  }
  CHECK(pool.class_count() == made);
  // A slab of more slots than can be numbered, in a file of 32 TiB.
  SlabPool huge(1u << 24, 64);
  CHECK_FALSE(huge.class_with(kPageBytes, 1u << 22).has_value());
  for (std::uint64_t i = 1; i <= kClassesMax; ++i)
    REQUIRE(huge.class_with(i * kPageBytes, 1) == static_cast<ClassId>(i - 1));
  CHECK_FALSE(huge.class_with((kClassesMax + 1) * kPageBytes, 2).has_value());
  CHECK(huge.class_with(kPageBytes, 1) == 0u);
}

TEST_CASE("slab pool: restore takes one slot where it is told to, or changes nothing") {
  SlabPool pool(16, 12);
  const ClassId small = *pool.class_with(1 * kMiB, 2);  // 4 slots
  const ClassId large = *pool.class_with(6 * kMiB, 3);
  REQUIRE(pool.restore(small, 4, 2, 7));
  CHECK(pool.owner(pool.slot_at(4 * kUnitBytes + 2 * kMiB)) == 7);
  CHECK(pool.units_in_slabs() == 2);
  CHECK(pool.free_slots(small) == 3);
  CHECK_FALSE(pool.restore(small, 4, 2, 8));   // taken
  CHECK_FALSE(pool.restore(small, 4, 4, 8));   // no such slot
  CHECK_FALSE(pool.restore(small, 5, 0, 8));   // not where the slab begins
  CHECK_FALSE(pool.restore(small, 3, 0, 8));   // runs into it
  CHECK_FALSE(pool.restore(large, 4, 0, 8));   // of another class
  CHECK_FALSE(pool.restore(large, 2, 0, 8));   // runs into it
  CHECK_FALSE(pool.restore(small, 15, 0, 8));  // runs past the end
  CHECK_FALSE(pool.restore(small, 16, 0, 8));
  CHECK_FALSE(pool.restore(small, ~0u, ~0u, 8));
  CHECK_FALSE(pool.restore(large, ~0u - 1, 0, 8));
  pool.check_invariants();
  CHECK(pool.units_in_slabs() == 2);
  CHECK(pool.owner(pool.slot_at(4 * kUnitBytes + 2 * kMiB)) == 7);
  for (const std::uint32_t unit : {0u, 6u, 9u}) REQUIRE(pool.restore(large, unit, 0, unit));
  CHECK_FALSE(pool.restore(small, 12, 0, 8));  // past the limit
  pool.set_limit(13);
  REQUIRE(pool.restore(small, 12, 0, 8));
  // What is left of a slab is given out like any other, and comes back like any other.
  std::set<std::uint64_t> offsets;
  for (int i = 0; i < 6; ++i) offsets.insert(pool.take(small, 9)->offset / kMiB);
  CHECK(offsets == std::set<std::uint64_t>{8, 9, 11, 25, 26, 27});
  CHECK_FALSE(pool.take(small, 9).has_value());
  pool.check_invariants();
  pool.give(pool.slot_at(4 * kUnitBytes + 2 * kMiB));
  CHECK(pool.take(small, 10)->offset == 4 * kUnitBytes + 2 * kMiB);
  pool.check_invariants();
}

TEST_CASE("slab pool: nothing is cut beyond the end that is set, and what lies there is named") {
  SlabPool pool(16, 16);
  const ClassId klass = *pool.class_with(2 * kMiB, 2);
  std::vector<UnitRun> punched;
  for (const std::uint32_t unit : {12u, 2u, 7u}) REQUIRE(pool.restore(klass, unit, 0, 0));
  const auto units = [&](std::uint32_t from) {
    std::vector<std::uint64_t> found;
    for (const SlabId id : pool.slabs_beyond(from))
      found.push_back(pool.slab_offset(id) / kUnitBytes);
    return found;
  };
  CHECK(units(0) == std::vector<std::uint64_t>{2, 7, 12});
  CHECK(units(3) == std::vector<std::uint64_t>{2, 7, 12});
  CHECK(units(4) == std::vector<std::uint64_t>{7, 12});
  CHECK(units(13) == std::vector<std::uint64_t>{12});
  CHECK(units(14).empty());
  CHECK(units(~0u).empty());
  pool.set_end(8);  // within the slab at 7
  CHECK_FALSE(pool.restore(klass, 14, 0, 0));
  CHECK(pool.restore(klass, 12, 1, 0));  // its slab is there
  for (const std::uint64_t unit : {0, 4}) {
    REQUIRE(pool.add_slab(klass, punched));
    CHECK(pool.take(klass, 0).has_value());
    while (const auto slot = pool.take(klass, 0)) CHECK(slot->offset / kUnitBytes < 14);
    CHECK(pool.slot_at(unit * kUnitBytes).slab != kNoSlab);
  }
  CHECK_FALSE(pool.add_slab(klass, punched));  // 6 alone is free
  pool.set_end(~0u);
  REQUIRE(pool.add_slab(klass, punched));
  CHECK(pool.take(klass, 0)->offset / kUnitBytes == 9);
  pool.check_invariants();
}

// A file's slots as a map says they lie. Nothing is ever warmed here, so units are free or in a
// slab, and every answer can be foretold.
class FileModel {
 public:
  static constexpr std::uint32_t kUnits = 48;

  FileModel(test::Random& random, std::uint32_t limit)
      : random_(random), pool_(kUnits, limit), limit_(limit) {
    for (const auto& [slot_bytes, units] : {std::pair{64 * kKiB, 1u},
                                            {700 * kKiB, 3u},
                                            {2 * kMiB, 1u},
                                            {3 * kMiB, 7u},
                                            {20 * kMiB, 10u}}) {
      classes_.push_back(*pool_.class_with(slot_bytes, units));
    }
  }

  void step() {
    const ClassId klass = classes_[random_.between<std::size_t>(0, classes_.size() - 1)];
    switch (random_.between(0, 11)) {
      case 0:
        return set_bounds();
      case 1:
        return drain_or_not();
      case 2:
      case 3:
        return take(klass);
      case 4:
        return give();
      default:
        for (int i = random_.between(1, 12); i > 0; --i) restore(klass);
    }
  }

  void check() const {
    pool_.check_invariants();
    std::uint32_t units = 0;
    std::vector<SlabId> beyond;
    for (const auto& [first, slab] : slabs_) {
      REQUIRE(pool_.slab_offset(slab.id) == first * kUnitBytes);
      REQUIRE(pool_.slab_class(slab.id) == slab.klass);
      REQUIRE(pool_.owners(slab.id).size() == slab.owners.size());
      for (const auto& [index, owner] : slab.owners)
        REQUIRE(pool_.owner({0, slab.id, index}) == owner);
      units += pool_.slab_units(slab.klass);
      if (first + pool_.slab_units(slab.klass) > end_) beyond.push_back(slab.id);
    }
    REQUIRE(pool_.units_in_slabs() == units);
    REQUIRE(pool_.committed() == units);
    REQUIRE(pool_.slabs_beyond(end_) == beyond);
  }

 private:
  struct Slab {
    SlabId id;
    ClassId klass;
    bool is_draining = false;
    std::map<std::uint32_t, std::uint32_t> owners;  // by index
  };

  bool are_free(std::uint32_t first, std::uint32_t count) const {
    for (const auto& [other, slab] : slabs_)
      if (first < other + pool_.slab_units(slab.klass) && other < first + count) return false;
    return first + count <= end_ && pool_.units_in_slabs() + count <= limit_;
  }

  void restore(ClassId klass) {
    auto first = random_.between(0u, kUnits + 1);
    if (!slabs_.empty() && random_.coin()) {  // else hardly any slab is filled
      auto near = slabs_.lower_bound(first);
      if (near == slabs_.end()) near = slabs_.begin();
      first = near->first;
      if (random_.between(0, 9) > 0) klass = near->second.klass;
    }
    const auto index = random_.between(0u, pool_.slab_slots(klass));
    const auto found = slabs_.find(first);
    const bool is_there = found != slabs_.end() && found->second.klass == klass;
    const bool is_right =
        index < pool_.slab_slots(klass) && (is_there ? !found->second.owners.contains(index)
                                                     : are_free(first, pool_.slab_units(klass)));
    REQUIRE(pool_.restore(klass, first, index, next_owner_) == is_right);
    if (!is_right) return;
    if (!is_there) slabs_[first] = {pool_.slot_at(first * kUnitBytes).slab, klass, false, {}};
    slabs_[first].owners[index] = next_owner_++;
  }

  void take(ClassId klass) {
    std::vector<UnitRun> punched;
    auto slot = pool_.take(klass, next_owner_);
    const bool has_room = std::any_of(slabs_.begin(), slabs_.end(), [&](const auto& entry) {
      const Slab& slab = entry.second;
      return slab.klass == klass && !slab.is_draining &&
             slab.owners.size() < pool_.slab_slots(klass);
    });
    REQUIRE(slot.has_value() == has_room);
    if (!slot) {
      bool is_room = false;
      for (std::uint32_t first = 0; first < kUnits; ++first)
        is_room |= are_free(first, pool_.slab_units(klass));
      REQUIRE(pool_.add_slab(klass, punched) == is_room);
      REQUIRE(punched.empty());
      if (!is_room) return;
      slot = pool_.take(klass, next_owner_);
      REQUIRE(slot.has_value());
      const auto first = static_cast<std::uint32_t>(pool_.slab_offset(slot->slab) / kUnitBytes);
      REQUIRE(first + pool_.slab_units(klass) <= end_);
      slabs_[first] = {slot->slab, klass, false, {}};
    }
    Slab& slab = slabs_.at(static_cast<std::uint32_t>(pool_.slab_offset(slot->slab) / kUnitBytes));
    REQUIRE_FALSE(slab.is_draining);
    REQUIRE(slab.owners.emplace(slot->index, next_owner_++).second);
  }

  void give() {
    for (int i = random_.between(1, 30); i > 0 && !slabs_.empty(); --i) {
      auto at = slabs_.lower_bound(random_.between(0u, kUnits));
      if (at == slabs_.end()) at = slabs_.begin();
      Slab& slab = at->second;
      auto one = slab.owners.lower_bound(random_.between(0u, 31u));
      if (one == slab.owners.end()) one = slab.owners.begin();
      pool_.give(
          pool_.slot_at(at->first * kUnitBytes + one->first * pool_.slot_bytes_of(slab.klass)));
      slab.owners.erase(one);
      if (slab.owners.empty()) slabs_.erase(at);
    }
  }

  void drain_or_not() {
    for (auto& [first, slab] : slabs_) {
      if (random_.between(0, 3) > 0) continue;
      slab.is_draining = !slab.is_draining;
      pool_.set_draining(slab.id, slab.is_draining);
    }
  }

  void set_bounds() {
    end_ = random_.between(0u, kUnits);
    limit_ = random_.between(kUnits / 4, kUnits);
    pool_.set_end(end_ == kUnits ? ~0u : end_);
    pool_.set_limit(limit_);
  }

  test::Random& random_;
  SlabPool pool_;
  std::uint32_t limit_;
  std::uint32_t end_ = kUnits;
  std::vector<ClassId> classes_;
  std::map<std::uint32_t, Slab> slabs_;  // by first unit
  std::uint32_t next_owner_ = 0;
};

TEST_CASE("slab pool: restored slots among taken ones, every answer foretold") {
  test::Random random("slab pool restore");
  for (std::size_t round = 0; round < test::scaled(40); ++round) {
    FileModel model(random, random.between(8u, FileModel::kUnits));
    for (int step = 0; step < 400; ++step) {
      model.step();
      model.check();
    }
  }
}

// What a start costs: a million blocks, in the order of their hashes.
TEST_CASE("slab pool: a million slots are restored in any order at a cost that does not grow") {
  test::Random random("slab pool restores");
  constexpr std::uint32_t kSlots = 1'000'000;
  constexpr std::uint32_t kPerSlab = 512;
  const std::uint32_t units = kSlots / kPerSlab + 1;
  SlabPool pool(units, units);
  const ClassId klass = *pool.class_with(kPageBytes, 1);
  std::vector<std::uint32_t> order(kSlots);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), random.engine());
  const std::clock_t begin = std::clock();
  std::uint32_t restored = 0;
  for (const std::uint32_t slot : order)
    restored += pool.restore(klass, slot / kPerSlab, slot % kPerSlab, slot);
  const double cost_s = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  MESSAGE("1,000,000 restores: " << cost_s << " s");
  CHECK(restored == kSlots);
  CHECK(cost_s < 2);  // a walk along free lists would take minutes
  CHECK(pool.taken_slots(klass) == kSlots);
  for (std::uint32_t i = 0; i < pool.slab_slots(klass) - kSlots % kPerSlab; ++i)
    REQUIRE(pool.take(klass, i).has_value());
  CHECK_FALSE(pool.take(klass, 0).has_value());
  pool.check_invariants();
}

}  // namespace
}  // namespace kvpool
