// Readers copy without asking while slots and records are recycled under them: what they accept is
// what was put. A writer or reader that leaves out one step of the protocol is caught by the same
// stress, so the stress can fail.
#include <algorithm>
#include <atomic>
#include <thread>

#include "core_interrupt.h"
#include "node/store.h"
#include "node_parts.h"

namespace kvpool {
namespace {

using test::Index;
using test::key_of;
using test::kKiB;
using test::kMiB;

constexpr std::uint32_t kSpace = 3;
constexpr std::size_t kBytes = 4 * kKiB;

// Word 0 names the version; every other word must then be of that key, version and place. So the
// reader needs to know nothing of what the writer does.
void make_versioned(std::byte* to, std::size_t bytes, const Hash128& key, std::uint64_t version) {
  test::make_payload(to, bytes, key, version);
  std::memcpy(to, &version, 8);
}
bool is_versioned(const std::byte* at, std::size_t bytes, const Hash128& key) {
  std::uint64_t version = 0;
  std::memcpy(&version, at, 8);
  for (std::size_t i = 8; i < bytes; i += 8) {
    const std::uint64_t word = test::payload_word(key, version, i / 8);
    if (std::memcmp(at + i, &word, 8) != 0) return false;
  }
  return true;
}

struct Steps {
  bool invalidate = true;     // generation 0 before the slot is written again
  bool fresh = true;          // a generation that no record ever had
  bool payload_first = true;  // all bytes before the generation
  bool final_check = true;    // the reader looks at the generation again after its copy
  std::uint32_t records = 4;  // few: a record comes back at once; many: a slot does
};

// The steps of a node's writer by hand, so that each can be left out. Records and slots are
// recycled separately: a record comes back with another slot, a slot with another record.
class Recycler {
 public:
  static constexpr std::uint32_t kSlots = 4, kKeys = 5;

  Recycler(Index& index, const Steps& steps, test::Random& random)
      : index_(index), steps_(steps), random_(random), buffer_(kBytes) {
    for (std::uint32_t i = 0; i < steps.records; ++i) free_records_.push_back(i);
    for (std::uint32_t i = 0; i < kSlots; ++i) free_slots_.push_back(i * kBytes);
  }

  // Evicts one block once all but one slot are in use, then stores one.
  void put() {
    if (held_.size() == kSlots - 1) evict(random_.between<std::size_t>(0, held_.size() - 1));
    Held block{taken_from(free_records_), taken_from(free_slots_), absent_key()};
    Record& record = index_.writer->view().record(block.record);
    make_versioned(buffer_.data(), kBytes, block.key, ++version_);
    fence_before_overwrite();
    write_fields(record, block);
    if (steps_.payload_first) fill(block);
    fence_before_publish();
    record.generation.store(steps_.fresh ? ++generation_ : block.record + 1,
                            std::memory_order_release);
    REQUIRE(index_.writer->insert(block.key, kSpace, block.record));
    if (!steps_.payload_first) fill(block);
    held_.push_back(block);
  }

 private:
  struct Held {
    std::uint32_t record;
    std::uint64_t offset;
    Hash128 key;
  };

  void evict(std::size_t at) {
    std::swap(held_[at], held_.back());
    const Held& old = held_.back();
    if (steps_.invalidate)
      index_.writer->view().record(old.record).generation.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    index_.writer->erase(old.key, kSpace, old.record);
    free_records_.push_back(old.record);
    free_slots_.push_back(old.offset);
    held_.pop_back();
  }
  template <typename T>
  T taken_from(std::vector<T>& free) {
    std::swap(free[random_.between<std::size_t>(0, free.size() - 1)], free.back());
    const T taken = free.back();
    free.pop_back();
    return taken;
  }
  Hash128 absent_key() {
    for (;;) {
      const Hash128 key = key_of(random_.between<std::uint64_t>(1, kKeys));
      if (std::none_of(held_.begin(), held_.end(), [&](const Held& h) { return h.key == key; }))
        return key;
    }
  }
  static void write_fields(Record& record, const Held& block) {
    record.key_low.store(block.key.low, std::memory_order_relaxed);
    record.key_high.store(block.key.high, std::memory_order_relaxed);
    record.namespace_and_bytes.store(std::uint64_t{kSpace} << 32 | kBytes,
                                     std::memory_order_relaxed);
    record.offset.store(block.offset, std::memory_order_relaxed);
    record.tier.store(kTierDram, std::memory_order_relaxed);
  }
  void fill(const Held& block) {
    std::byte* const slot = index_.payload->base() + block.offset;
    (random_.coin() ? racy_fill : stream_fill)(slot, buffer_.data(), kBytes);
  }

  Index& index_;
  const Steps steps_;
  test::Random& random_;
  std::vector<std::byte> buffer_;
  std::vector<Held> held_;
  std::vector<std::uint32_t> free_records_;
  std::vector<std::uint64_t> free_slots_;
  std::uint64_t version_ = 0, generation_ = 0;
};

struct Counts {
  std::atomic<std::uint64_t> accepted{0}, wrong{0};
};

// The real reader, or one without its last look.
bool read_block(const IndexReader& reader, const IndexView& view, const Steps& steps,
                const Hash128& key, std::byte* to) {
  Found found;
  if (!reader.find(key, kSpace, found)) return false;
  if (steps.final_check) return found.bytes == kBytes && reader.copy(found, to);
  racy_copy(to, view.arena + found.offset, kBytes);
  return true;
}

void read_until(const std::atomic<bool>& done, const Index& index, const Steps& steps,
                Counts& counts) {
  const IndexReader reader = index.reader();
  std::vector<std::byte> copy(kBytes);
  for (std::uint64_t n = 0; !done.load(std::memory_order_relaxed); ++n) {
    const Hash128 key = key_of(n % Recycler::kKeys + 1);
    if (!read_block(reader, index.writer->view(), steps, key, copy.data())) continue;
    counts.accepted.fetch_add(1, std::memory_order_relaxed);
    if (!is_versioned(copy.data(), kBytes, key)) ++counts.wrong;
  }
}

// Recycles `puts` times, or until something wrong was accepted.
void stress(const Steps& steps, std::size_t puts, Counts& counts) {
  test::Random random("litmus");
  Index index(20'000, 2 * kMiB, 1);
  std::atomic<bool> done{false};
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) readers.emplace_back([&] { read_until(done, index, steps, counts); });
  Recycler writer(index, steps, random);
  std::size_t left = puts;
  for (; left > 0 && counts.wrong == 0; --left) writer.put();
  done = true;
  for (std::thread& reader : readers) reader.join();
  MESSAGE("puts " << puts - left << ", accepted " << counts.accepted.load() << ", wrong "
                  << counts.wrong.load());
}

TEST_CASE("litmus: the complete protocol accepts nothing wrong") {
  Counts counts;
  stress({}, test::scaled(70'000), counts);
  stress({.records = 20'000}, test::scaled(70'000), counts);
  CHECK(counts.accepted > 1000);
  CHECK(counts.wrong == 0);
}

constexpr std::size_t kPutsToCatch = 20'000'000;

// The real writer: a store that evicts, removes, moves blocks between slabs, passes slabs from one
// block size to the other, shrinks, grows and drops.
class Churn {
 public:
  static constexpr std::uint64_t kKeys = 150, kUnits = 8;
  static constexpr std::uint32_t kBlockBytes[] = {64 * kKiB, 300 * kKiB};

  explicit Churn(test::Random& random) : random_(random) {
    StoreOptions options;
    options.bytes_limit = kUnits * kUnitBytes;
    options.policy = PolicyKind::lru;
    auto made = Store::create(options);
    REQUIRE(made.has_value());
    store_ = std::move(*made);
    for (std::uint64_t i = 0; i < 2; ++i) {
      const auto space = store_->open_namespace(key_of(1000 + i), kBlockBytes[i]);
      REQUIRE(space.has_value());
      spaces_[i] = *space;
    }
  }

  void step() {
    ++now_;
    // One size for a while, then the other, so that slabs have to pass between them.
    Namespace& space = *spaces_[random_.between(0, 9) == 0 ? 0 : (now_ / 150) % 2];
    const Hash128 key = key_of(random_.between<std::uint64_t>(1, kKeys));
    BlockId record = kNoBlock;
    switch (random_.between(0, 29)) {
      case 0:
        if (store_->find(space, key, record)) store_->remove(record, static_cast<Seconds>(now_));
        break;
      case 1:
        resize(random_.between<std::uint64_t>(kUnits / 2, kUnits));
        break;
      case 2:
        if (random_.between(0, 19) == 0) store_->drop(space);
        break;
      case 3:
        store_->evict_ahead(0.1, 8, static_cast<Seconds>(now_));
        break;
      default:
        put(space, key);
    }
    store_->step_index();
    store_->sweep(16, static_cast<Seconds>(now_));
  }
  const Store& store() const { return *store_; }
  const Namespace& space(std::size_t i) const { return *spaces_[i]; }

 private:
  void put(Namespace& space, const Hash128& key) {
    const auto reserved = store_->reserve(space, key, static_cast<Seconds>(now_));
    if (reserved.outcome != Store::Reserved::Outcome::reserved) return;
    if (reserved.makes_slab) store_->pages_made(reserved.record, true);
    buffer_.resize(space.block_bytes);
    make_versioned(buffer_.data(), buffer_.size(), key, ++version_);
    std::byte* const slot = store_->arena().base() + reserved.offset;
    (random_.coin() ? racy_fill : stream_fill)(slot, buffer_.data(), buffer_.size());
    store_->commit(reserved.record, {}, kNoBlock, static_cast<Seconds>(now_));
  }
  void resize(std::uint64_t units) {
    store_->set_limit(units * kUnitBytes, 0);
    while (store_->shrink_step(static_cast<Seconds>(now_))) {
    }
  }

  test::Random& random_;
  std::unique_ptr<Store> store_;
  Namespace* spaces_[2];
  std::vector<std::byte> buffer_;
  std::uint64_t version_ = 0, now_ = 0;
};

void read_store_until(const std::atomic<bool>& done, const Churn& churn, Counts& counts) {
  const IndexReader reader(churn.store().view());
  std::vector<std::byte> copy(Churn::kBlockBytes[1]);
  for (std::uint64_t n = 0; !done.load(std::memory_order_relaxed); ++n) {
    const Namespace& space = churn.space(n % 2);
    const Hash128 key = key_of(n / 2 % Churn::kKeys + 1);
    Found found;
    if (!reader.find(key, space.incarnation.load(std::memory_order_acquire), found)) continue;
    if (found.bytes != space.block_bytes) ++counts.wrong;
    if (found.bytes > copy.size() || !reader.copy(found, copy.data())) continue;
    counts.accepted.fetch_add(1, std::memory_order_relaxed);
    if (!is_versioned(copy.data(), found.bytes, key)) ++counts.wrong;
  }
}

TEST_CASE("litmus: a store that evicts and moves and resizes and drops gives nothing wrong") {
  test::Random random("litmus store");
  Churn churn(random);
  Counts counts;
  std::atomic<bool> done{false};
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) readers.emplace_back([&] { read_store_until(done, churn, counts); });
  for (std::size_t left = std::max<std::size_t>(1'500, test::scaled(6'000)); left > 0; --left)
    churn.step();
  done = true;
  for (std::thread& reader : readers) reader.join();
  churn.store().check_invariants();
  const StoreCounters& did = churn.store().counters();
  MESSAGE("accepted " << counts.accepted.load() << "; evictions " << did.evictions << ", moved "
                      << did.blocks_moved << ", slabs moved " << did.slabs_moved << ", removed "
                      << did.removed);
  CHECK(counts.accepted > 100);
  CHECK(did.evictions > 100);
  CHECK(did.blocks_moved > 0);
  CHECK(did.slabs_moved > 0);
  CHECK(counts.wrong == 0);
}

// One block in seven stays, so that nearly all of them have to move while the pool shrinks.
void move_all(Store& store, Namespace& space, std::uint64_t count) {
  for (std::uint64_t n = 0; n < count; ++n) {
    BlockId record = kNoBlock;
    REQUIRE(store.find(space, key_of(n), record));
    if (n % 7 != 0) store.remove(record, 0);
  }
  for (std::uint64_t units = store.bytes_limit() / kUnitBytes; units-- > 1;) {
    store.set_limit(units * kUnitBytes, 0);
    while (store.shrink_step(0)) {
    }
  }
}

struct Look {
  const Store& store;
  const Namespace& space;
  std::uint64_t count, missed = 0;

  static void at_all(void* context) {
    Look& look = *static_cast<Look*>(context);
    const IndexReader reader(look.store.view());
    Found found;
    for (std::uint64_t n = 0; n < look.count; n += 7)
      look.missed += !reader.find(key_of(n), look.space.incarnation, found);
  }
};

TEST_CASE("litmus: a block is found wherever its writer stops while it moves it") {
  constexpr std::uint64_t kCount = 3'500;
  const std::uint64_t looks_before = test::Interrupts::count();
  std::uint64_t moved = 0, missed = 0;
  for (std::size_t round = 0; round < test::scaled(100); ++round) {
    StoreOptions options;
    options.bytes_limit = 8 * kUnitBytes;
    const auto store = std::move(*Store::create(options));
    Namespace& space = **store->open_namespace(key_of(~1ull), 4 * kKiB);
    for (std::uint64_t n = 0; n < kCount; ++n)
      store->commit(store->reserve(space, key_of(n), 0).record, {}, kNoBlock, 0);
    Look look{*store, space, kCount};
    {
      const test::Interrupts interrupts(Look::at_all, &look);
      move_all(*store, space, kCount);
    }
    missed += look.missed;
    moved += store->counters().blocks_moved;
    REQUIRE(store->counters().evictions == 0);
  }
  const std::uint64_t looks = test::Interrupts::count() - looks_before;
  MESSAGE("moved " << moved << ", looked " << looks << " times, missed " << missed);
  CHECK(moved > test::scaled(100) * 100);
  CHECK(looks > 0);
  CHECK(missed == 0);
}

TEST_CASE("litmus: a slot written again while its record is readable is caught") {
  Counts counts;
  stress({.invalidate = false, .records = 20'000}, kPutsToCatch, counts);
  CHECK(counts.wrong > 0);
}

TEST_CASE("litmus: a generation given twice is caught") {
  Counts counts;
  stress({.fresh = false}, kPutsToCatch, counts);
  CHECK(counts.wrong > 0);
}

TEST_CASE("litmus: a generation before its payload is caught") {
  Counts counts;
  stress({.payload_first = false}, kPutsToCatch, counts);
  CHECK(counts.wrong > 0);
}

TEST_CASE("litmus: a reader that does not look at the generation again is caught") {
  Counts counts;
  stress({.final_check = false}, kPutsToCatch, counts);
  CHECK(counts.wrong > 0);
}

}  // namespace
}  // namespace kvpool
