// A node with an SSD tier against a dict: whatever is put, evicted, moved, resized, dropped and
// closed, a get delivers the bytes that were put or a miss; what was on the SSD is there after the
// next open; and no block stays when the one before it in its chain was evicted everywhere.
#include <map>
#include <set>

#include "node/node.h"
#include "node_ssd_cases.h"

namespace kvpool {
namespace {

using test::key_of;
using test::kKiB;

constexpr std::uint64_t kChains = 12, kChainLength = 9;

struct Shape {
  std::uint64_t dram_units, ssd_units, blocks_limit;
  PolicyKind policy;
  Durability durability;
  SsdAdmit admit;
  std::vector<std::uint64_t> block_bytes;
};

class NodeAgainstModel {
 public:
  NodeAgainstModel(const Shape& shape, test::Random& random)
      : shape_(shape),
        random_(random),
        pool_(options_of(shape)),
        spaces_(shape.block_bytes.size()) {
    find_spaces();
  }

  void step() {
    const auto what = random_.between(0, 99);
    if (what < 40)
      put();
    else if (what < 65)
      get();
    else if (what < 72)
      acquire();
    else if (what < 77)
      release();
    else if (what < 81)
      remove();
    else if (what < 82)
      drop();
    else if (what < 85)
      resize();
    else if (what < 87)
      resize_ssd();
    else if (what < 93)
      pool_.clock->set(pool_.clock->now() + random_.between(0, 40));
    else if (what < 97)
      look_at_rest();
    else if (what < 99)
      restart(/*flushes=*/false);
    else
      restart(/*flushes=*/true);
    if (pool_.node) pool_.node->check_invariants();
  }
  void end() {
    while (!leases_.empty()) release();
    look_at_rest();
    restart(/*flushes=*/true);
    count();  // what the last restart read back from the SSD: the least there is in a short run
  }
  std::uint64_t from_ssd = 0, restored = 0, moved = 0;

 private:
  using Place = std::tuple<std::size_t, std::uint64_t, std::uint64_t>;  // space, chain, index
  struct Leased {
    Lease lease;
    Place place;
    std::uint64_t version;
  };
  struct Space {
    Namespace* handle = nullptr;
    std::uint64_t version = 0;  // of its bytes: another one after each drop
  };

  static NodeOptions options_of(const Shape& shape) {
    NodeOptions options = test::SsdPool::small(shape.dram_units, shape.ssd_units);
    options.store.blocks_limit = shape.blocks_limit;
    options.store.policy = shape.policy;
    options.ssd.durability = shape.durability;
    options.ssd_admit = shape.admit;
    options.evict_ahead = 0.1;
    return options;
  }
  void find_spaces() {
    units_at_open_ = pool_.node->stats().ssd_facts.units;
    for (std::size_t i = 0; i < spaces_.size(); ++i)
      spaces_[i].handle = &pool_.space(i, shape_.block_bytes[i]);
  }
  static Hash128 key(const Place& place) {
    const auto& [space, chain, index] = place;
    return key_of(space * 10'000 + chain * 100 + index);
  }
  std::vector<Place> any_chain() {
    const auto space = random_.between<std::size_t>(0, spaces_.size() - 1);
    const auto chain = random_.between<std::uint64_t>(0, kChains - 1);
    const auto length = random_.between<std::uint64_t>(1, kChainLength);
    std::vector<Place> places;
    for (std::uint64_t i = 0; i < length; ++i) places.emplace_back(space, chain, i);
    return places;
  }
  static std::vector<Hash128> keys_of(const std::vector<Place>& places) {
    std::vector<Hash128> keys;
    for (const Place& place : places) keys.push_back(key(place));
    return keys;
  }
  Space& space_of(const Place& place) { return spaces_[std::get<0>(place)]; }

  void put() {
    const auto places = any_chain();
    const auto keys = keys_of(places);
    Space& space = space_of(places[0]);
    const auto statuses = pool_.put(*space.handle, keys, nullptr, space.version);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const bool is_readable =
          statuses[i] <= PutStatus::present || statuses[i] == PutStatus::not_durable;
      if (statuses[i] == PutStatus::present) REQUIRE(may_be_there_.contains(places[i]));
      if (is_readable) may_be_there_.insert(places[i]);
      const bool is_known = is_readable || statuses[i] == PutStatus::pool_pinned ||
                            statuses[i] == PutStatus::chain_broken ||
                            statuses[i] == PutStatus::too_large;
      REQUIRE(is_known);
    }
  }
  void get() {
    const auto places = any_chain();
    const Space& space = space_of(places[0]);
    const std::size_t count = pool_.get(*space.handle, keys_of(places), space.version);
    for (std::size_t i = 0; i < count; ++i) REQUIRE(may_be_there_.contains(places[i]));
  }
  void acquire() {
    if (leases_.size() > 6) return release();
    const auto places = any_chain();
    const Space& space = space_of(places[0]);
    std::vector<Lease> leases(places.size());
    leases.resize(pool_.node->acquire(*space.handle, keys_of(places), leases.data()));
    for (std::size_t i = 0; i < leases.size(); ++i) {
      REQUIRE(may_be_there_.contains(places[i]));
      leases_.push_back({leases[i], places[i], space.version});
    }
  }
  // Whatever happened since, the bytes are those of its key.
  void release() {
    if (leases_.empty()) return;
    const auto at = random_.between<std::size_t>(0, leases_.size() - 1);
    const Leased held = leases_[at];
    leases_.erase(leases_.begin() + static_cast<std::ptrdiff_t>(at));
    REQUIRE(test::is_payload(pool_.node->arena() + held.lease.offset, held.lease.bytes,
                             key(held.place), held.version));
    pool_.node->release({&held.lease, 1});
  }
  void remove() {
    const Place place = any_chain().back();
    const Hash128 gone = key(place);
    pool_.node->remove(*space_of(place).handle, {&gone, 1});
    may_be_there_.erase(place);
    removed_.insert(place);
    was_removed_ = true;
    REQUIRE(pool_.tier(*space_of(place).handle, gone) == 0);
  }
  void drop() {
    const auto at = random_.between<std::size_t>(0, spaces_.size() - 1);
    REQUIRE(pool_.node->drop_namespace(*spaces_[at].handle, test::never_hung()).has_value());
    ++spaces_[at].version;
    std::erase_if(may_be_there_, [&](const Place& place) { return std::get<0>(place) == at; });
    std::erase_if(removed_, [&](const Place& place) { return std::get<0>(place) == at; });
  }
  void resize() {
    const auto units = random_.between<std::uint64_t>(1, shape_.dram_units);
    const std::uint64_t limit =
        shape_.blocks_limit == 0 ? 0 : random_.between<std::uint64_t>(2, shape_.blocks_limit);
    REQUIRE(
        pool_.node->resize(units * kUnitBytes, limit, test::after(std::chrono::milliseconds(50)))
            .has_value());
  }
  void resize_ssd() {
    // A slab of the largest block fits always; a removed block that is leased may hold it up.
    const std::uint64_t most = std::min(2 * shape_.ssd_units, 4 * units_at_open_ - 2);
    const auto units = random_.between<std::uint64_t>(4, most);
    const auto deadline =
        leases_.empty() ? test::never_hung() : test::after(std::chrono::milliseconds(100));
    const auto resized = pool_.node->resize_ssd(test::capacity_of(units), deadline);
    REQUIRE_MESSAGE(resized.has_value(), resized.error().message);
    if (leases_.empty()) REQUIRE(*resized == test::capacity_of(units));
  }

  void look_at_rest() {
    if (!pool_.node->flush(leases_.empty() ? test::never_hung()
                                           : test::after(std::chrono::milliseconds(200)))) {
      REQUIRE_FALSE(leases_.empty());  // what is pinned can be in the way of what is queued
      return;
    }
    pool_.settle();
    pool_.flush();
    for (std::size_t space = 0; space < spaces_.size(); ++space)
      for (std::uint64_t chain = 0; chain < kChains; ++chain) look_at_chain(space, chain);
  }
  void look_at_chain(std::size_t space, std::uint64_t chain) {
    bool is_gone = false, is_broken = !keeps_chains();
    for (std::uint64_t i = 0; i < kChainLength; ++i) {
      const Place place{space, chain, i};
      const bool is_there = pool_.tier(*spaces_[space].handle, key(place)) != 0;
      if (is_there) REQUIRE(may_be_there_.contains(place));
      if (is_there && !is_broken) REQUIRE_FALSE(is_gone);
      is_gone |= !is_there;
      is_broken |= removed_.contains(place);  // what hung on it was let off
    }
  }
  bool keeps_chains() const {
    return shape_.policy == PolicyKind::temperature || shape_.policy == PolicyKind::lru;
  }

  void restart(bool flushes) {
    while (!leases_.empty()) release();
    pool_.rest();
    const NodeStats before = pool_.node->stats();
    REQUIRE(before.dead == 0);
    REQUIRE(before.ssd_blocks <= before.blocks);
    count();
    std::vector<Place> on_ssd;
    for (const Place& place : may_be_there_)
      if (pool_.tier(*space_of(place).handle, key(place)) == kTierSsd) on_ssd.push_back(place);
    pool_.options.ssd.capacity_bytes = 0;  // as it is by now
    pool_.reopen(flushes);
    find_spaces();
    const NodeStats now = pool_.node->stats();
    restored += now.store.restored;
    if (!flushes) REQUIRE(now.store.restored + now.store.restored_orphans == before.ssd_blocks);
    if (!was_removed_) REQUIRE(now.store.restored_orphans == 0);
    REQUIRE(now.ssd_blocks == now.store.restored);
    std::set<Place> there;
    for (const Place& place : may_be_there_)
      if (pool_.tier(*space_of(place).handle, key(place)) != 0) there.insert(place);
    REQUIRE(there.size() == now.blocks);  // nothing that was removed or dropped is back
    if (!was_removed_ && !flushes)
      for (const Place& place : on_ssd) REQUIRE(there.contains(place));
    for (const Place& place : there)
      REQUIRE(pool_.gets(*space_of(place).handle, key(place), space_of(place).version));
    if (now.store.restored_orphans > 0) may_be_there_ = there;
    was_removed_ = !removed_.empty();
  }

  // What this node did, before the next one takes its place.
  void count() {
    const NodeStats stats = pool_.node->stats();
    from_ssd += stats.ssd_hits;
    moved += stats.store.ssd_moved;
  }

  const Shape shape_;
  test::Random& random_;
  test::SsdPool pool_;
  std::vector<Space> spaces_;
  std::set<Place> may_be_there_;
  std::set<Place> removed_;  // since their namespace was last dropped
  std::vector<Leased> leases_;
  bool was_removed_ = false;
  std::uint64_t units_at_open_ = 0;  // it may grow to four times that
};

void run_against_model(const char* name, const std::vector<Shape>& shapes, std::size_t steps) {
  test::Random random(name);
  std::uint64_t from_ssd = 0, restored = 0, moved = 0;
  for (std::size_t number = 0; number < shapes.size(); ++number) {
    CAPTURE(number);
    NodeAgainstModel run(shapes[number], random);
    for (std::size_t i = 0; i < steps; ++i) {
      CAPTURE(i);
      run.step();
    }
    run.end();
    from_ssd += run.from_ssd;
    restored += run.restored;
    moved += run.moved;
  }
  MESSAGE("from the SSD " << from_ssd << ", moved " << moved << ", restored " << restored);
  CHECK(from_ssd > 0);
  CHECK(restored > 0);
}

TEST_CASE("node ssd: one block size against a dict, under every contract") {
  std::vector<Shape> shapes;
  for (const Durability durability : {Durability::async, Durability::durable, Durability::relaxed})
    for (const PolicyKind policy : {PolicyKind::temperature, PolicyKind::lru})
      shapes.push_back({2, 6, 0, policy, durability, SsdAdmit::all, {100 * kKiB}});
  run_against_model("node ssd one size", shapes, test::scaled(400));
}

TEST_CASE("node ssd: several block sizes against a dict, under every contract") {
  std::vector<Shape> shapes;
  for (const Durability durability : {Durability::async, Durability::durable, Durability::relaxed})
    for (const SsdAdmit admit : {SsdAdmit::all, SsdAdmit::second_use})
      shapes.push_back({6,
                        9,
                        0,
                        PolicyKind::temperature,
                        durability,
                        admit,
                        {20 * kKiB, 65'537, 300 * kKiB, 300 * kKiB - 5}});
  run_against_model("node ssd sizes", shapes, test::scaled(400));
}

TEST_CASE("node ssd: a limit of blocks in DRAM against a dict, under every policy") {
  std::vector<Shape> shapes;
  for (const PolicyKind policy : kPolicyKinds)
    for (const std::uint64_t limit : {3, 24})
      shapes.push_back(
          {2, 4, limit, policy, Durability::async, SsdAdmit::all, {64 * kKiB, 40 * kKiB}});
  run_against_model("node ssd block limit", shapes, test::scaled(300));
}

}  // namespace
}  // namespace kvpool
