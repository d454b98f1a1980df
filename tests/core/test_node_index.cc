// The index against an unordered_map, and what its readers may rely on while it changes: a present
// key is found at every moment, nothing that lies in shared memory is trusted, nothing is written.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <unordered_map>

#include "core_interrupt.h"
#include "node/index_reader.h"
#include "node/index_writer.h"
#include "node_parts.h"

namespace kvpool {
namespace {

using test::Index;
using test::key_of;
using test::kMiB;

constexpr std::uint32_t kSpace = 7;

// Keys and records of one namespace, with the free list that a store would keep.
class Entries {
 public:
  Entries(Index& index, std::uint32_t records_max) : writer_(*index.writer) {
    for (std::uint32_t record = records_max; record-- > 0;) free_.push_back(record);
  }
  bool insert(const Hash128& key, std::uint32_t incarnation = kSpace) {
    const std::uint32_t record = free_.back();
    writer_.prepare(record, {key, incarnation, 100, record * kPageBytes});
    const std::uint64_t generation = writer_.publish(record, {});
    REQUIRE(generation > last_generation_);
    last_generation_ = generation;
    if (!writer_.insert(key, incarnation, record)) {
      writer_.withdraw(record);
      return false;
    }
    free_.pop_back();
    return true;
  }
  void erase(const Hash128& key, std::uint32_t record, std::uint32_t incarnation = kSpace) {
    writer_.withdraw(record);
    fence_before_overwrite();
    writer_.erase(key, incarnation, record);
    free_.push_back(record);
  }
  std::uint32_t next_record() const { return free_.back(); }
  bool is_full() const { return free_.empty(); }

 private:
  IndexWriter& writer_;
  std::vector<std::uint32_t> free_;
  std::uint64_t last_generation_ = 0;
};

// Every word of every table: what is left when all keys are gone.
std::uint64_t words_in_tables(const Index& index) {
  const IndexView& view = index.writer->view();
  std::uint64_t used = 0;
  for (std::uint64_t log2 = 0; log2 <= view.header().buckets_log2_max; ++log2) {
    const Bucket* table = view.table(log2);
    for (std::uint64_t i = 0; i < IndexView::buckets(log2); ++i) {
      used += table[i].passed.load() != 0;
      for (const auto& word : table[i].hint) used += word.load() != 0;
    }
  }
  return used;
}

TEST_CASE("index: the same answers as an unordered_map, through every growth") {
  test::Random random("index");
  constexpr std::uint32_t kRecords = 12'000;
  Index index(kRecords, 64 * kMiB, random.engine()());
  const IndexReader reader = index.reader();
  Entries entries(index, kRecords);
  std::unordered_map<std::uint64_t, std::uint32_t> model;  // n of key_of(n) -> record
  std::vector<std::uint64_t> present;
  const std::uint64_t first_root = index.root();
  std::size_t inserts_left = test::scaled(40'000);
  // Grows to full and shrinks back several times; erases while it grows and while it wipes.
  for (int percent = 90; inserts_left > 0;) {
    if (random.between(0, 99) < percent && !entries.is_full()) {
      --inserts_left;
      const std::uint64_t n = random.engine()() | 1;
      const std::uint32_t record = entries.next_record();
      REQUIRE(entries.insert(key_of(n)));
      model.emplace(n, record);
      present.push_back(n);
    } else if (!present.empty()) {
      std::swap(present[random.between<std::size_t>(0, present.size() - 1)], present.back());
      entries.erase(key_of(present.back()), model.at(present.back()));
      model.erase(present.back());
      present.pop_back();
    }
    if (entries.is_full()) percent = 30;
    if (present.size() < 50) percent = 90;
    if (random.between(0, 9) == 0) index.writer->step(random.between(1u, 64u));
    if (!present.empty()) {
      const std::uint64_t n = present[random.between<std::size_t>(0, present.size() - 1)];
      Found found;
      std::uint32_t record = 0;
      REQUIRE(reader.find(key_of(n), kSpace, found));
      REQUIRE(found.record == model.at(n));
      REQUIRE(found.offset == found.record * kPageBytes);
      REQUIRE(index.writer->find(key_of(n), kSpace, record));
      REQUIRE(record == found.record);
      REQUIRE_FALSE(reader.find(key_of(n), kSpace + 1, found));
      REQUIRE_FALSE(reader.find(key_of(n & ~1ull), kSpace, found));
    }
    if (random.between(0, 999) == 0) index.writer->check_invariants();
  }
  CHECK((index.root() >> 8) > (first_root >> 8) + 4);
  for (const auto& [n, record] : model) {
    Found found;
    REQUIRE(reader.find(key_of(n), kSpace, found));
    REQUIRE(found.record == record);
  }
  for (const auto& [n, record] : model) entries.erase(key_of(n), record);
  while (index.writer->growing()) index.writer->step(64);
  CHECK(words_in_tables(index) == 0);  // no tombstones, no counter left behind
}

TEST_CASE("index: outgrown tables give their memory back") {
  constexpr std::uint32_t kRecords = 59'904;
  Index index(kRecords, 256 * kMiB, 1);
  Entries entries(index, kRecords);
  for (std::uint64_t n = 0; n < kRecords; ++n) REQUIRE(entries.insert(key_of(n)));
  while (index.writer->growing()) index.writer->step(64);
  const std::uint64_t expected = kIndexHeaderBytes + kRecords * sizeof(Record) +
                                 IndexView::buckets(index.root()) * sizeof(Bucket);
  // Small tables share pages with their neighbours.
  CHECK(index.memory->committed_bytes() <= expected + 16 * kPageBytes);
}

// Readers look for keys that are always there; the writer puts others in and takes them away until
// the table has grown as far as it can, again and again.
TEST_CASE("index: a present key is found at every moment of growth") {
  test::Random random("index growth");
  constexpr std::uint32_t kRecords = 4'000, kSteady = 40;
  std::atomic<std::uint64_t> asked{0}, missed{0}, growths{0};
  for (std::size_t round = 0; round < test::scaled(60); ++round) {
    Index index(kRecords, 64 * kMiB, random.engine()());
    Entries entries(index, kRecords);
    for (std::uint64_t n = 0; n < kSteady; ++n) REQUIRE(entries.insert(key_of(n)));
    std::atomic<bool> done{false};
    const auto read = [&] {
      const IndexReader reader = index.reader();
      Found found;
      while (!done.load(std::memory_order_relaxed))
        for (std::uint64_t n = 0; n < kSteady; ++n) {
          asked.fetch_add(1, std::memory_order_relaxed);
          if (!reader.find(key_of(n), kSpace, found) || found.record >= kSteady) ++missed;
        }
    };
    std::thread one(read), other(read);
    std::uint64_t oldest = kSteady;
    for (std::uint64_t n = kSteady; !entries.is_full(); ++n) {
      REQUIRE(entries.insert(key_of(n)));
      if (random.between(0, 3) == 0) {  // erased while it grows, and before it was carried over
        std::uint32_t record = 0;
        REQUIRE(index.writer->find(key_of(oldest), kSpace, record));
        entries.erase(key_of(oldest++), record);
      }
      if (random.between(0, 7) == 0) index.writer->step(random.between(1u, 16u));
    }
    while (index.writer->growing()) index.writer->step(1);
    done = true;
    one.join();
    other.join();
    index.writer->check_invariants();
    growths += (index.root() >> 8) - 1;
  }
  MESSAGE("asked " << asked.load() << " times during " << growths.load() << " growths");
  CHECK(growths >= test::scaled(60) * 5);
  CHECK(asked > 1000);
  CHECK(missed == 0);
}

struct Look {
  const Index& index;
  std::uint64_t count, missed = 0;

  static void at_all(void* context) {
    Look& look = *static_cast<Look*>(context);
    const IndexReader reader = look.index.reader();
    Found found;
    for (std::uint64_t n = 0; n < look.count; ++n)
      look.missed += !reader.find(key_of(n), kSpace, found) || found.record != n;
  }
};

TEST_CASE("index: a present key is found wherever the writer stops") {
  test::Random random("index interrupts");
  constexpr std::uint32_t kRecords = 3'000, kSteady = 200;
  const std::uint64_t looks_before = test::Interrupts::count();
  std::uint64_t missed = 0, growths = 0;
  for (std::size_t round = 0; round < test::scaled(100); ++round) {
    Index index(kRecords, 16 * kMiB, random.engine()());
    Entries entries(index, kRecords);
    for (std::uint64_t n = 0; n < kSteady; ++n) REQUIRE(entries.insert(key_of(n)));
    Look look{index, kSteady};
    {
      const test::Interrupts interrupts(Look::at_all, &look);
      std::uint64_t oldest = kSteady;
      for (std::uint64_t n = kSteady; !entries.is_full(); ++n) {
        REQUIRE(entries.insert(key_of(n)));
        if (n % 4 != 0) continue;
        std::uint32_t record = 0;
        REQUIRE(index.writer->find(key_of(oldest), kSpace, record));
        entries.erase(key_of(oldest++), record);
      }
      while (index.writer->growing()) index.writer->step(1);
    }
    missed += look.missed;
    growths += (index.root() >> 8) - 1;
  }
  const std::uint64_t looks = test::Interrupts::count() - looks_before;
  MESSAGE("growths " << growths << ", looked " << looks << " times, missed " << missed);
  CHECK(growths >= test::scaled(100) * 3);
  CHECK(looks > 0);
  CHECK(missed == 0);
}

// Keys that all have one home bucket and one tag, whatever the table's size: as somebody could
// choose them who has read the salt.
Hash128 crowding_key(std::uint64_t n, std::uint64_t salt, std::uint64_t target = 12345) {
  const std::uint64_t high = mix64(n);
  return {target ^ mix64(high ^ salt) ^ kSpace, high};
}

// A `target` whose keys have this home bucket, in tables of up to 2^16 buckets.
std::uint64_t target_with_home(std::uint64_t home) {
  for (std::uint64_t target = 1;; ++target)
    if ((mix64(target) & 0xffff) == home) return target;
}

TEST_CASE("index: keys that crowd one bucket are refused, and the others go on") {
  constexpr std::uint32_t kRecords = 20'000;
  constexpr std::uint64_t kSalt = 99;
  Index index(kRecords, 128 * kMiB, kSalt);
  Entries entries(index, kRecords);
  std::vector<Hash128> crowd;
  const std::uint64_t home = KeyHash::of(crowding_key(0, kSalt), kSpace, kSalt).bucket;
  std::size_t refused = 0, refused_others = 0;
  for (std::uint64_t n = 0; n < 3000; ++n) {
    const Hash128 key = crowding_key(n, kSalt);
    REQUIRE(KeyHash::of(key, kSpace, kSalt).bucket == home);
    if (entries.insert(key))
      crowd.push_back(key);
    else
      ++refused;
    // One that is not there has bucket and tag in common with those that are.
    Found other;
    std::uint32_t record = 0;
    REQUIRE_FALSE(index.reader().find(crowding_key(n + 3000, kSalt), kSpace, other));
    REQUIRE_FALSE(index.writer->find(crowding_key(n + 3000, kSalt), kSpace, record));
    refused_others += !entries.insert(key_of(n));
  }
  index.writer->check_invariants();
  MESSAGE("of the crowd " << crowd.size() << " found a place, " << refused << " did not");
  CHECK(crowd.size() <= kHintsPerBucket * kProbeMax);
  CHECK(crowd.size() > 100);
  // Only who has its home among the crowd can be refused, and its share falls as the table grows.
  std::size_t refused_late = 0;
  for (std::uint64_t n = 3000; n < 15'000; ++n) refused_late += !entries.insert(key_of(n));
  MESSAGE("of the others " << refused_others << " of 3000, then " << refused_late << " of 12000");
  CHECK(refused_others <= 300);
  CHECK(refused_late <= 240);
  refused_others += refused_late;
  const IndexReader reader = index.reader();
  Found found;
  std::size_t lost = 0, lost_others = 0;
  for (const Hash128& key : crowd) lost += !reader.find(key, kSpace, found);
  for (std::uint64_t n = 0; n < 15'000; ++n) lost_others += !reader.find(key_of(n), kSpace, found);
  CHECK(lost == 0);
  CHECK(lost_others == refused_others);
  index.writer->check_invariants();
}

// A crowd that fills all the buckets a reader would look at, and keys that were put among them into
// the next table before the crowd was carried over: then the next table has no place for it.
TEST_CASE("index: growth that a crowd stops is given up, and tried again") {
  constexpr std::uint32_t kRecords = 20'000;
  constexpr std::uint64_t kSalt = 11, kHome = 100, kBuckets = 1024;
  Index index(kRecords, 128 * kMiB, kSalt);
  Entries entries(index, kRecords);
  const IndexReader reader = index.reader();
  const auto home_of = [](const Hash128& key, std::uint64_t buckets) {
    return KeyHash::of(key, kSpace, kSalt).bucket % buckets;
  };
  std::vector<Hash128> held;
  const auto all_found = [&] {
    Found found;
    return std::all_of(held.begin(), held.end(),
                       [&](const Hash128& key) { return reader.find(key, kSpace, found); });
  };
  std::uint64_t n = 0;
  const auto insert_elsewhere = [&] {
    while (home_of(key_of(n), kBuckets) >= kHome - 40 && home_of(key_of(n), kBuckets) <= kHome + 90)
      ++n;
    held.push_back(key_of(n++));
    return entries.insert(held.back());
  };
  while (IndexView::buckets(index.root()) < kBuckets) REQUIRE(insert_elsewhere());
  while (index.writer->growing()) index.writer->step(64);
  const std::uint64_t target = target_with_home(kHome), late = target_with_home(kHome + 60);
  for (std::uint64_t i = 0; i < kHintsPerBucket * kProbeMax; ++i) {
    held.push_back(crowding_key(i, kSalt, target));
    REQUIRE(home_of(held.back(), kBuckets) == kHome);
    REQUIRE(entries.insert(held.back()));
  }
  while (!index.writer->growing()) REQUIRE(insert_elsewhere());
  const std::uint64_t root = index.root();
  std::vector<std::uint32_t> late_records;
  for (std::uint64_t i = 0; i < 70; ++i) {
    late_records.push_back(entries.next_record());
    REQUIRE(entries.insert(crowding_key(i, kSalt, late)));
    if (!index.writer->growing()) break;
  }
  while (index.writer->growing()) index.writer->step(1);
  CHECK(index.root() == root);  // given up
  CHECK(all_found());
  index.writer->check_invariants();
  for (std::uint64_t i = 0; i < late_records.size(); ++i)
    entries.erase(crowding_key(i, kSalt, late), late_records[i]);
  std::size_t refused = 0;
  for (int tries = 0; tries < 2'000 && index.root() == root; ++tries)
    if (!insert_elsewhere()) {
      ++refused;
      held.pop_back();
    }
  CHECK(index.root() != root);
  CHECK(refused <= 10);
  CHECK(all_found());
  index.writer->check_invariants();
}

// Hints in all tables but the one in use. One call may change so many and no more.
struct Work {
  explicit Work(const Index& index) : index_(index) {}
  std::uint64_t next_hints() const {
    const IndexView& view = index_.writer->view();
    const std::uint64_t log2 = (index_.root() & 63) + 1;
    if (log2 > view.header().buckets_log2_max) return 0;
    std::uint64_t hints = 0;
    const Bucket* table = view.table(log2);
    for (std::uint64_t i = 0; i < IndexView::buckets(log2); ++i)
      for (const auto& word : table[i].hint) hints += word.load(std::memory_order_relaxed) != 0;
    return hints;
  }
  const Index& index_;
};

std::uint64_t most_hints_moved(Index& index, Entries& entries, const std::vector<Hash128>& keys,
                               std::uint64_t& growths_at_once) {
  const Work work(index);
  std::uint64_t most = 0;
  for (const Hash128& key : keys) {
    const std::uint64_t root = index.root(), before = work.next_hints(),
                        held = index.writer->entries();
    entries.insert(key);
    growths_at_once = std::max(growths_at_once, (index.root() >> 8) - (root >> 8));
    // When the table changes, what was still to be carried over has been.
    const std::uint64_t after = index.root() == root ? work.next_hints() : held + 1;
    if (after > before) most = std::max(most, after - before);
  }
  return most;
}

TEST_CASE("index: one insert moves a bounded number of hints, however many there are") {
  constexpr std::uint32_t kRecords = 6'000;
  Index index(kRecords, 64 * kMiB, 3);
  Entries entries(index, kRecords);
  std::vector<Hash128> keys;
  for (std::uint64_t n = 0; n < test::scaled(kRecords); ++n) keys.push_back(key_of(n));
  std::uint64_t growths_at_once = 0;
  const std::uint64_t most = most_hints_moved(index, entries, keys, growths_at_once);
  MESSAGE("hints moved by one insert: " << most);
  CHECK(growths_at_once == 1);
  CHECK(most <= 8 * kHintsPerBucket + 1);
}

TEST_CASE("index: not even a crowd makes one insert do more") {
  constexpr std::uint32_t kRecords = 60'000;
  constexpr std::uint64_t kSalt = 4;
  Index index(kRecords, 256 * kMiB, kSalt);
  Entries entries(index, kRecords);
  std::vector<Hash128> keys;
  for (std::uint64_t n = 0; n < 2000; ++n) {
    keys.push_back(crowding_key(n, kSalt));
    if (n % 2 == 0) keys.push_back(key_of(n));
  }
  std::uint64_t growths_at_once = 0;
  const std::uint64_t most = most_hints_moved(index, entries, keys, growths_at_once);
  CHECK(growths_at_once == 1);
  CHECK(most <= 8 * kHintsPerBucket + 1);
}

// A second mapping of an arena's file, as a client has it: any store to it would be a SIGSEGV.
struct ReadOnly {
  explicit ReadOnly(const Arena& arena) : bytes(arena.bytes()) {
    const std::string path = "/proc/self/fd/" + std::to_string(arena.descriptor());
    const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    REQUIRE(descriptor >= 0);
    void* const mapped = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, descriptor, 0);
    REQUIRE(mapped != MAP_FAILED);
    close(descriptor);
    base = static_cast<std::byte*>(mapped);
  }
  ~ReadOnly() { munmap(base, bytes); }
  ReadOnly(const ReadOnly&) = delete;
  ReadOnly& operator=(const ReadOnly&) = delete;
  std::byte* base;
  std::uint64_t bytes;
};

TEST_CASE("index: a reader works on a read-only mapping, so it stores nothing") {
  constexpr std::uint32_t kRecords = 3'000;
  Index index(kRecords, 16 * kMiB, 5);
  Entries entries(index, kRecords);
  const ReadOnly memory(*index.memory), payload(*index.payload);
  const IndexReader reader({memory.base, payload.base});
  std::vector<Hash128> keys;
  for (std::uint64_t n = 0; n < kRecords; ++n) {
    keys.push_back(key_of(n));
    const auto made = test::payload_of(keys.back(), 100);
    racy_fill(index.payload->base() + entries.next_record() * kPageBytes, made.data(), 100);
    REQUIRE(entries.insert(keys.back()));
    std::byte copy[100];
    Found found;
    REQUIRE(reader.find(keys.back(), kSpace, found));
    REQUIRE(reader.copy(found, copy));
    REQUIRE(test::is_payload(copy, 100, keys.back()));
  }
  std::vector<std::uint8_t> tiers(kRecords);
  CHECK(reader.lookup(keys, kSpace, tiers.data()) == kRecords);
  CHECK(std::count(tiers.begin(), tiers.end(), kTierDram) == kRecords);
}

TEST_CASE("index: lookup counts the leading keys and says the tier of each") {
  test::Random random("index lookup");
  Index index(2'000, 16 * kMiB, 6);
  Entries entries(index, 2'000);
  for (std::uint64_t n = 0; n < 1'000; ++n) REQUIRE(entries.insert(key_of(n)));
  const IndexReader reader = index.reader();
  for (std::size_t round = 0; round < test::scaled(2000); ++round) {
    const auto count = random.between<std::size_t>(0, 70),
               hole = random.between<std::size_t>(0, 70);
    std::vector<Hash128> keys;
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t n = random.between<std::uint64_t>(0, 999);
      keys.push_back(key_of(i == hole ? n + 1'000 : n));
    }
    std::vector<std::uint8_t> tiers(count, 77);
    const std::size_t expected = std::min(count, hole);
    REQUIRE(reader.lookup(keys, kSpace, tiers.data()) == expected);
    REQUIRE(reader.lookup(keys, kSpace, nullptr) == expected);
    for (std::size_t i = 0; i < count; ++i)
      REQUIRE(tiers[i] == (i < expected ? std::uint8_t{kTierDram} : 0));
  }
}

// Whatever lies in the shared pages, a reader ends, stays inside them, and hands out no place
// outside the arena.
TEST_CASE("index: garbage in shared memory is at worst a miss") {
  test::Random random("index garbage");
  constexpr std::uint32_t kRecords = 500;
  for (std::size_t round = 0; round < test::scaled(100); ++round) {
    Index index(kRecords, 2 * kMiB, 8);
    const IndexView& view = index.writer->view();
    const IndexReader reader = index.reader();
    const Hash128 key = key_of(1);
    const KeyHash hash = KeyHash::of(key, kSpace, 8);
    for (std::uint32_t record = 0; record < kRecords; ++record) {
      Record& one = view.record(record);
      one.generation = random.coin() ? random.engine()() : 0;
      one.key_low = key.low;
      one.key_high = random.coin() ? key.high : random.engine()();
      one.namespace_and_bytes = std::uint64_t{kSpace} << 32 | (random.engine()() & 0xffff'ffff);
      one.offset = random.engine()() >> random.between(0, 63);
    }
    const std::uint64_t log2_max = view.header().buckets_log2_max;
    for (std::uint64_t i = 0; i < (2ull << log2_max); ++i) {
      Bucket& bucket = (view.table(0) - 1)[i];
      bucket.passed = random.engine()();
      for (auto& word : bucket.hint)
        word =
            random.coin() ? random.engine()() : hint_of(hash.tag, random.between(0u, 2 * kRecords));
    }
    for (int i = 0; i < 70; ++i) {
      view.header().root =
          random.coin() ? random.engine()() : random.between<std::uint64_t>(0, log2_max);
      Found found;
      const bool present = reader.find(key, kSpace, found);
      if (present) REQUIRE((found.offset <= 2 * kMiB && found.bytes <= 2 * kMiB - found.offset));
      reader.lookup({&key, 1}, kSpace, nullptr);
      const Hash128 keys[] = {key, key_of(2)};
      reader.lookup(keys, kSpace, nullptr);
    }
  }
  CHECK(true);
}

TEST_CASE("index: namespaces of one key do not meet") {
  Index index(1'000, 16 * kMiB, 9);
  Entries entries(index, 1'000);
  const IndexReader reader = index.reader();
  std::uint32_t records[3];
  for (std::uint32_t space = 0; space < 3; ++space) {
    records[space] = entries.next_record();
    REQUIRE(entries.insert(key_of(1), space + 1));
  }
  Found found;
  for (std::uint32_t space = 0; space < 3; ++space) {
    REQUIRE(reader.find(key_of(1), space + 1, found));
    CHECK(found.record == records[space]);
  }
  entries.erase(key_of(1), records[1], 2);
  CHECK_FALSE(reader.find(key_of(1), 2, found));
  CHECK(reader.find(key_of(1), 1, found));
  CHECK(reader.find(key_of(1), 3, found));
}

}  // namespace
}  // namespace kvpool
