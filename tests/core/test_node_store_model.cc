// A store against a dict and a few lists that share no code with it: the same keys are there, with
// the bytes that were put; what is gone was evicted, removed or dropped, and counted; what is
// pinned stays as it is; free and held are the total after every step.
#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "node/store.h"
#include "node_parts.h"

namespace kvpool {
namespace {

using test::key_of;
using test::kKiB;
using test::kMiB;

constexpr std::uint64_t kKeys = 60;
constexpr std::size_t kStrideBytes = 4 * kKiB;  // one word a page is looked at, after every step

struct Shape {
  std::uint64_t units, blocks_limit;
  PolicyKind policy;
  std::vector<std::uint64_t> block_bytes;
};

class StoreAgainstModel {
 public:
  StoreAgainstModel(const Shape& shape, test::Random& random) : shape_(shape), random_(random) {
    StoreOptions options;
    options.bytes_limit = shape.units * kUnitBytes;
    options.blocks_limit = limit_ = shape.blocks_limit;
    options.policy = shape.policy;
    auto made = Store::create(options);
    REQUIRE(made.has_value());
    store_ = std::move(*made);
    for (std::size_t i = 0; i < shape.block_bytes.size(); ++i) {
      const auto space = store_->open_namespace(key_of(1000 + i), shape.block_bytes[i]);
      REQUIRE(space.has_value());
      spaces_.push_back(*space);
    }
  }

  void step() {
    now_ += random_.between(0, 3) * 0.25;
    begin();
    const auto what = random_.between(0, 99);
    if (what < 45)
      put();
    else if (what < 53)
      reserve_only();
    else if (what < 60)
      end_reservation();
    else if (what < 68)
      pin();
    else if (what < 77)
      unpin();
    else if (what < 83)
      remove();
    else if (what < 84)
      drop();
    else if (what < 88)
      resize();
    else if (what < 90)
      evict();
    else if (what < 94)
      sweep();
    else
      touch();
    compare();
  }
  void release_all() {
    begin();
    while (!pins_.empty()) unpin();
    while (!reserved_.empty()) end_reservation();
    compare();
    CHECK(store_->pins() == 0);
    CHECK(store_->zombies() == 0);
    CHECK(store_->reserved() == 0);
  }
  const Store& store() const { return *store_; }

 private:
  struct Block {
    BlockId record;
    std::uint64_t offset, version;
    std::uint64_t parent;  // key number in the same space, 0 = none known
    std::uint64_t generation;
  };
  struct Pin {
    BlockId record;
    std::size_t space;
    std::uint64_t key, offset, version;
    std::uint32_t incarnation;
  };
  struct Reservation {
    BlockId record;
    std::size_t space;
    std::uint64_t key, offset;
    std::uint32_t incarnation;
  };
  using Place = std::pair<std::size_t, std::uint64_t>;  // space, key number

  void begin() {
    before_ = store_->counters();
    removed_ = swept_ = 0;
    may_evict_ = false;
  }
  std::size_t any_space() { return random_.between<std::size_t>(0, spaces_.size() - 1); }
  std::uint64_t any_key() { return random_.between<std::uint64_t>(1, kKeys); }
  std::uint32_t incarnation(std::size_t space) const { return spaces_[space]->incarnation; }

  std::uint64_t record_offset(BlockId record) const {
    return store_->view().record(record).offset.load();
  }

  bool reserve(std::size_t space, std::uint64_t key, Reservation& made) {
    may_evict_ = true;
    using Outcome = Store::Reserved::Outcome;
    auto answer = store_->reserve(*spaces_[space], key_of(key), now_);
    // Room that is made in pieces: fewer of them than there are units.
    for (std::uint64_t pieces = 0; answer.outcome == Outcome::again; ++pieces) {
      REQUIRE(pieces < shape_.units);
      absorb_evictions();
      store_->check_invariants();
      answer = store_->reserve(*spaces_[space], key_of(key), now_);
    }
    const bool is_pending = std::any_of(reserved_.begin(), reserved_.end(), [&](const auto& r) {
      return r.space == space && r.key == key && r.incarnation == incarnation(space);
    });
    REQUIRE((answer.outcome == Outcome::present) == dict_.contains({space, key}));
    REQUIRE((answer.outcome == Outcome::pending) == is_pending);
    absorb_evictions();
    if (answer.outcome == Outcome::no_room) {
      REQUIRE((answer.why == NoRoom::pool_pinned || answer.why == NoRoom::too_large));
      if (answer.why == NoRoom::pool_pinned) refused(space);
    }
    if (answer.outcome != Outcome::reserved) return false;
    REQUIRE(answer.offset % kPageBytes == 0);
    if (answer.makes_slab) store_->pages_made(answer.record, random_.between(0, 9) > 0);
    made = {answer.record, space, key, answer.offset, incarnation(space)};
    return true;
  }
  // No room is an answer only when no block of that size is left that could go, or when it would
  // not help.
  void refused(std::size_t space) {
    if (limit_ != 0 && store_->zombies() + reserved_.size() >= limit_) return;
    std::set<Place> stays;  // pinned, and what the chain of a pinned block needs
    for (const auto& [place, block] : dict_)
      for (Place at = place; is_pinned(block.record) && dict_.contains(at);
           at.second = dict_.at(at).parent)
        if (!stays.insert(at).second) break;
    for (const auto& [place, block] : dict_)
      if (place.first == space) REQUIRE(stays.contains(place));
  }
  bool is_pinned(BlockId record) const {
    return std::any_of(pins_.begin(), pins_.end(),
                       [&](const Pin& pin) { return pin.record == record; });
  }
  void fill(const Reservation& r, std::uint64_t version) {
    const std::uint32_t bytes = spaces_[r.space]->block_bytes;
    const auto made = test::payload_of(key_of(r.key), bytes, version);
    racy_fill(store_->arena().base() + r.offset, made.data(), bytes);
  }
  void commit(const Reservation& r, std::uint64_t parent) {
    const std::uint64_t version = ++versions_;
    fill(r, version);
    BlockId parent_record = kNoBlock;
    if (parent != 0 && dict_.contains({r.space, parent}))
      parent_record = dict_.at({r.space, parent}).record;
    else
      parent = 0;
    const auto done = store_->commit(r.record, {version, r.key}, parent_record, now_);
    const bool was_dropped = r.incarnation != incarnation(r.space);
    REQUIRE(done == (was_dropped ? Store::Committed::dropped : Store::Committed::stored));
    if (was_dropped) return;
    const std::uint64_t generation = store_->view().record(r.record).generation.load();
    REQUIRE(generation > last_generation_);  // never given twice
    last_generation_ = generation;
    dict_[{r.space, r.key}] = {r.record, r.offset, version, parent, generation};
  }

  // A chain of up to five keys, each pinned until the call is over, as a put does.
  void put() {
    const std::size_t space = any_space();
    const std::uint64_t first = any_key();
    const auto length = random_.between<std::uint64_t>(1, 5);
    std::uint64_t parent = 0;
    std::vector<BlockId> held;
    for (std::uint64_t i = 0; i < length; ++i) {
      const std::uint64_t key = (first + i * i) % kKeys + 1;
      Reservation made{};
      if (reserve(space, key, made)) commit(made, parent);
      if (!dict_.contains({space, key})) break;
      held.push_back(dict_.at({space, key}).record);
      store_->pin(held.back());
      pins_.push_back({held.back(), space, key, dict_.at({space, key}).offset,
                       dict_.at({space, key}).version, incarnation(space)});
      parent = key;
    }
    for (std::size_t i = held.size(); i-- > 0;) {
      store_->unpin(held[i]);
      pins_.pop_back();
    }
  }
  void reserve_only() {
    Reservation made{};
    if (reserved_.size() < 6 && reserve(any_space(), any_key(), made)) reserved_.push_back(made);
  }
  void end_reservation() {
    if (reserved_.empty()) return;
    const auto at = random_.between<std::size_t>(0, reserved_.size() - 1);
    const Reservation r = reserved_[at];
    reserved_.erase(reserved_.begin() + static_cast<std::ptrdiff_t>(at));
    if (random_.coin())
      commit(r, any_key());
    else
      store_->abort(r.record);
  }
  void pin() {
    const Place place{any_space(), any_key()};
    BlockId record = kNoBlock;
    const bool found = store_->find(*spaces_[place.first], key_of(place.second), record);
    REQUIRE(found == dict_.contains(place));
    if (!found || pins_.size() >= 12) return;
    const Block& block = dict_.at(place);
    REQUIRE(record == block.record);
    store_->pin(record);
    store_->touch(record, now_);
    pins_.push_back({record, place.first, place.second, record_offset(record), block.version,
                     incarnation(place.first)});
  }
  void unpin() {
    if (pins_.empty()) return;
    const auto at = random_.between<std::size_t>(0, pins_.size() - 1);
    const Pin pin = pins_[at];
    pins_.erase(pins_.begin() + static_cast<std::ptrdiff_t>(at));
    store_->unpin(pin.record);
  }
  void remove() {
    const Place place{any_space(), any_key()};
    if (!dict_.contains(place)) return;
    store_->remove(dict_.at(place).record, now_);
    forget(place);
    removed_ = 1;
  }
  void forget(const Place& place) {
    dict_.erase(place);
    for (auto& [other, block] : dict_)
      if (other.first == place.first && block.parent == place.second) block.parent = 0;
  }
  void drop() {
    const std::size_t space = any_space();
    const std::uint32_t old = incarnation(space);
    store_->drop(*spaces_[space]);
    REQUIRE(incarnation(space) != old);
    for (auto it = dict_.begin(); it != dict_.end();)
      it = it->first.first == space ? (++dead_, dict_.erase(it)) : std::next(it);
  }
  void sweep() {
    const bool more = store_->sweep(random_.between(1u, 100u), now_);
    REQUIRE(more == (store_->dead() > 0));
    swept();
  }
  // Dropped blocks may go at any moment that makes room.
  void swept() {
    REQUIRE(store_->dead() <= dead_);
    swept_ += dead_ - store_->dead();
    dead_ = store_->dead();
  }
  void resize() {
    may_evict_ = true;
    const auto units = random_.between<std::uint64_t>(1, shape_.units);
    limit_ = shape_.blocks_limit == 0 ? 0 : random_.between<std::uint64_t>(1, shape_.blocks_limit);
    store_->set_limit(units * kUnitBytes, limit_);
    while (store_->shrink_step(now_)) {
    }
    REQUIRE(store_->bytes_limit() == units * kUnitBytes);
    if (pins_.empty() && reserved_.empty()) {
      REQUIRE(store_->bytes_committed() <= store_->bytes_limit());
      REQUIRE((limit_ == 0 || store_->resident() <= limit_));
    }
  }
  void evict() {
    may_evict_ = true;
    if (random_.coin())
      store_->evict_one(now_);
    else
      store_->evict_ahead(random_.between(0, 5) * 0.1, random_.between(0u, 20u), now_);
  }
  void touch() {
    const Place place{any_space(), any_key()};
    if (!dict_.contains(place)) return;
    const Block& block = dict_.at(place);
    const std::uint64_t other = random_.coin() ? 0 : 1;  // a generation that is gone
    store_->touch(block.record, block.generation + other * 1'000'000, now_);
  }

  // What the store no longer knows, and may have evicted.
  void absorb_evictions() {
    for (auto it = dict_.begin(); it != dict_.end();) {
      BlockId record = kNoBlock;
      if (store_->find(*spaces_[it->first.first], key_of(it->first.second), record)) {
        REQUIRE(record == it->second.record);
        ++it;
        continue;
      }
      REQUIRE(may_evict_);
      REQUIRE_FALSE(is_pinned_now(it->first, it->second));
      evicted_.push_back(it->first);
      it = dict_.erase(it);
    }
    // Where chains are kept, nothing evicted has left a resident child behind.
    for (const auto& [place, block] : dict_) {
      if (block.parent == 0 || dict_.contains({place.first, block.parent})) continue;
      REQUIRE_FALSE(keeps_chains());
    }
    for (auto& [place, block] : dict_)
      if (block.parent != 0 && !dict_.contains({place.first, block.parent})) block.parent = 0;
    swept();
  }
  bool keeps_chains() const {
    return shape_.policy == PolicyKind::temperature || shape_.policy == PolicyKind::lru;
  }
  bool is_pinned_now(const Place& place, const Block& block) const {
    return std::any_of(pins_.begin(), pins_.end(), [&](const Pin& pin) {
      return pin.space == place.first && pin.key == place.second && pin.version == block.version;
    });
  }

  void compare() {
    absorb_evictions();
    store_->check_invariants();
    const StoreCounters& counts = store_->counters();
    const std::uint64_t gone =
        (counts.evictions - before_.evictions) + (counts.removed - before_.removed);
    REQUIRE(gone == evicted_.size() + removed_ + swept_);
    REQUIRE(counts.puts - counts.evictions - counts.removed == store_->resident());
    evicted_.clear();
    REQUIRE(store_->resident() == dict_.size() + dead_);
    REQUIRE(store_->pins() == pins_.size());
    REQUIRE(store_->reserved() == reserved_.size());
    std::uint64_t blocks = 0;
    for (std::size_t i = 0; i < spaces_.size(); ++i) {
      const auto in_space = std::count_if(dict_.begin(), dict_.end(),
                                          [&](const auto& e) { return e.first.first == i; });
      REQUIRE(spaces_[i]->blocks == static_cast<std::uint64_t>(in_space));
      blocks += spaces_[i]->blocks;
    }
    REQUIRE(blocks == dict_.size());
    compare_bytes();
    compare_slots();
  }
  void compare_bytes() {
    const IndexReader reader(store_->view());
    for (auto& [place, block] : dict_) {
      Found found;
      REQUIRE(reader.find(key_of(place.second), incarnation(place.first), found));
      REQUIRE(found.record == block.record);
      REQUIRE(found.bytes == spaces_[place.first]->block_bytes);
      REQUIRE(found.generation >= block.generation);  // a move gives a new one
      block.generation = found.generation;
      block.offset = found.offset;
      last_generation_ = std::max(last_generation_, found.generation);
      const Record& record = store_->view().record(found.record);
      REQUIRE(record.sum_low.load() == block.version);
      REQUIRE(test::is_payload(reader.payload(found), found.bytes, key_of(place.second),
                               block.version, kStrideBytes));
    }
    for (const Pin& pin : pins_)
      REQUIRE(test::is_payload(store_->arena().base() + pin.offset, spaces_[pin.space]->block_bytes,
                               key_of(pin.key), pin.version, kStrideBytes));
  }
  // Every slot in use, each once: resident, reserved, or gone but pinned.
  void compare_slots() {
    std::map<std::uint64_t, std::uint64_t> slots;  // offset -> bytes
    const auto slot_bytes = [&](std::size_t space) {
      return SlabPool::slot_bytes(spaces_[space]->block_bytes);
    };
    for (const auto& [place, block] : dict_) slots.emplace(block.offset, slot_bytes(place.first));
    REQUIRE(slots.size() == dict_.size());
    for (const Reservation& r : reserved_)
      REQUIRE(slots.emplace(r.offset, slot_bytes(r.space)).second);
    std::set<BlockId> zombies;
    for (const Pin& pin : pins_)
      if (slots.emplace(pin.offset, slot_bytes(pin.space)).second) zombies.insert(pin.record);
    std::uint64_t bytes = 0, end = 0;
    for (const auto& [offset, length] : slots) {
      REQUIRE(offset >= end);
      end = offset + length;
      bytes += length;
    }
    if (dead_ == 0) {
      REQUIRE(store_->zombies() == zombies.size());
      REQUIRE(store_->bytes_taken() == bytes);
    }
    if (limit_ != 0 && limit_ == shape_.blocks_limit)
      REQUIRE(store_->resident() + store_->zombies() + store_->reserved() <= limit_);
    REQUIRE(store_->bytes_in_slabs() >= store_->bytes_taken());
  }

  const Shape shape_;
  test::Random& random_;
  std::unique_ptr<Store> store_;
  std::vector<Namespace*> spaces_;
  std::map<Place, Block> dict_;
  std::vector<Pin> pins_;
  std::vector<Reservation> reserved_;
  std::vector<Place> evicted_;
  StoreCounters before_;
  std::uint64_t dead_ = 0, swept_ = 0, removed_ = 0, versions_ = 0, last_generation_ = 0,
                limit_ = 0;
  bool may_evict_ = false;
  Seconds now_ = 0;
};

void run_against_model(const char* name, const std::vector<Shape>& shapes, std::size_t steps) {
  test::Random random(name);
  std::uint64_t puts = 0;
  for (const Shape& shape : shapes) {
    CAPTURE(shape.units);
    CAPTURE(shape.blocks_limit);
    CAPTURE(std::string(policy_name(shape.policy)));
    StoreAgainstModel run(shape, random);
    for (std::size_t i = 0; i < steps; ++i) {
      CAPTURE(i);
      run.step();
    }
    run.release_all();
    puts += run.store().counters().puts;
  }
  // Of all shapes together: a pool of one block whose block is pinned takes none for long.
  CHECK(puts > shapes.size() * steps / 50);
}

TEST_CASE("store: a use that arrives after its block is gone heats nobody else") {
  StoreOptions options;
  options.bytes_limit = kUnitBytes;
  const auto store = std::move(*Store::create(options));
  Namespace& space = **store->open_namespace(key_of(~1ull), 4 * kKiB);
  const auto put = [&](std::uint64_t n) {
    const BlockId record = store->reserve(space, key_of(n), 0).record;
    store->commit(record, {}, kNoBlock, 0);
    return record;
  };
  const auto generation_of = [&](BlockId record) {
    return store->view().record(record).generation.load();
  };
  const BlockId gone = put(1);
  const std::uint64_t old = generation_of(gone);
  store->remove(gone, 0);
  const BlockId record = put(2);
  REQUIRE(record == gone);
  const double before = store->temperature(record);
  store->touch(record, old, 1);
  store->touch(record + 1, old, 1);  // a record that was never used
  CHECK(store->temperature(record) == before);
  store->touch(record, generation_of(record), 1);
  CHECK(store->temperature(record) > before);
}

TEST_CASE("store: one block size against a dict and lists, under every policy") {
  std::vector<Shape> shapes;
  for (const PolicyKind policy : kPolicyKinds) shapes.push_back({2, 0, policy, {200 * kKiB}});
  run_against_model("store one size", shapes, test::scaled(1'500));
}

TEST_CASE("store: a limit of blocks against a dict and lists, under every policy") {
  std::vector<Shape> shapes;
  for (const PolicyKind policy : kPolicyKinds)
    for (const std::uint64_t limit : {1, 3, 20}) shapes.push_back({2, limit, policy, {4 * kKiB}});
  run_against_model("store block limit", shapes, test::scaled(800));
}

TEST_CASE("store: several block sizes against a dict and lists, under every policy") {
  std::vector<Shape> shapes;
  for (const PolicyKind policy : kPolicyKinds)
    shapes.push_back({8, 0, policy, {64 * kKiB, 900 * kKiB, 65'537, 3 * kMiB}});
  run_against_model("store sizes", shapes, test::scaled(700));
}

}  // namespace
}  // namespace kvpool
