#include "node/index_writer.h"

#include <algorithm>

#include "base/check.h"
#include "block/copy.h"

namespace kvpool {
namespace {

constexpr std::uint64_t kFirstLog2 = 4;
// Hints a table holds before it grows, in tenths of its places: above this probes lengthen.
constexpr std::uint64_t kLoadTenths = 7;
// Old buckets carried over per insert. At load 0.7 the old table has room for 2.1 inserts per
// bucket left, so any number above 1 is done in time.
constexpr std::uint32_t kBucketsPerInsert = 8;

std::uint64_t places(std::uint64_t log2) { return kHintsPerBucket << log2; }

std::uint64_t log2_for(std::uint64_t records) {
  std::uint64_t log2 = kFirstLog2;
  while (places(log2) * kLoadTenths < records * 10) ++log2;
  return log2;
}

}  // namespace

std::uint64_t IndexWriter::index_bytes(std::uint64_t records_max) {
  return kRecordsOffset + records_max * sizeof(Record) +
         (2ull << log2_for(records_max)) * sizeof(Bucket);
}

IndexWriter::IndexWriter(Arena& index, const Arena& payload, std::uint64_t records_max,
                         std::uint64_t salt)
    : index_(index), view_{index.base(), payload.base()} {
  KVP_CHECK(index.bytes() >= index_bytes(records_max));
  IndexHeader& header = view_.header();
  header.magic = kIndexMagic;
  header.version = kIndexVersion;
  header.records_max = records_max;
  header.buckets_log2_max = log2_for(records_max);
  header.records_offset = kRecordsOffset;
  header.tables_offset = kRecordsOffset + records_max * sizeof(Record);
  header.arena_bytes = payload.bytes();
  header.salt = salt;
  root_ = 1ull << 8 | kFirstLog2;
  header.root.store(root_, std::memory_order_release);
}

void IndexWriter::begin_with(std::uint64_t entries) {
  KVP_CHECK(entries_ == 0 && !growing());
  const std::uint64_t log2 = std::min(log2_for(entries), view_.header().buckets_log2_max);
  if (log2 <= (root_ & 63)) return;
  root_ = ((root_ >> 8) + 1) << 8 | log2;  // the table before it is empty and stays so
  view_.header().root.store(root_, std::memory_order_release);
}

std::uint64_t IndexWriter::table_bytes() const {
  return IndexView::buckets(root_) * sizeof(Bucket) +
         (next_root_ != 0 ? IndexView::buckets(next_root_) * sizeof(Bucket) : 0) +
         wipe_left_ * sizeof(Bucket);
}

void IndexWriter::announce(std::uint32_t space_number, std::uint32_t incarnation) {
  view_.incarnation(space_number).store(incarnation, std::memory_order_release);
}

void IndexWriter::prepare(std::uint32_t number, const Fields& fields) {
  Record& record = view_.record(number);
  KVP_CHECK(record.generation.load(std::memory_order_relaxed) == 0);
  fence_before_overwrite();
  record.key_low.store(fields.key.low, std::memory_order_relaxed);
  record.key_high.store(fields.key.high, std::memory_order_relaxed);
  record.namespace_and_bytes.store(std::uint64_t{fields.incarnation} << 32 | fields.bytes,
                                   std::memory_order_relaxed);
  record.offset.store(fields.offset, std::memory_order_relaxed);
}

std::uint64_t IndexWriter::publish(std::uint32_t number, const Hash128& sum, std::uint64_t tier) {
  Record& record = view_.record(number);
  record.sum_low.store(sum.low, std::memory_order_relaxed);
  record.sum_high.store(sum.high, std::memory_order_relaxed);
  record.tier.store(tier, std::memory_order_relaxed);
  fence_before_publish();
  record.generation.store(++generation_, std::memory_order_release);
  return generation_;
}

IndexWriter::Fields IndexWriter::fields(std::uint32_t number) const {
  const Record& record = view_.record(number);
  const std::uint64_t both = record.namespace_and_bytes.load(std::memory_order_relaxed);
  return {{record.key_low.load(std::memory_order_relaxed),
           record.key_high.load(std::memory_order_relaxed)},
          static_cast<std::uint32_t>(both >> 32),
          static_cast<std::uint32_t>(both),
          record.offset.load(std::memory_order_relaxed)};
}

std::uint64_t IndexWriter::withdraw(std::uint32_t number) {
  Record& record = view_.record(number);
  const std::uint64_t generation = record.generation.load(std::memory_order_relaxed);
  KVP_CHECK(generation != 0);
  record.generation.store(0, std::memory_order_relaxed);
  return generation;
}

std::uint64_t IndexWriter::move(std::uint32_t number, std::uint64_t offset) {
  // Never unreadable: while the bytes are at both places, either offset is right under either
  // generation. The new one sends away who still copies from the old place.
  Record& record = view_.record(number);
  fence_before_publish();
  record.offset.store(offset, std::memory_order_relaxed);
  record.generation.store(++generation_, std::memory_order_release);
  return generation_;
}

// Readers load the tier before the offset, and look at the offset only if the tier says DRAM. So
// the offset is there before the tier says so, and is left as it is when the tier stops saying so:
// whoever read it a moment ago finds another generation before the slot is written again. The fence
// at the start keeps a second change from being seen without the first one's generation.
std::uint64_t IndexWriter::promote(std::uint32_t number, std::uint64_t offset) {
  Record& record = view_.record(number);
  fence_before_publish();
  record.offset.store(offset, std::memory_order_relaxed);
  record.tier.store(kTierDram | kTierSsd, std::memory_order_release);
  record.generation.store(++generation_, std::memory_order_release);
  return generation_;
}

std::uint64_t IndexWriter::demote(std::uint32_t number) {
  Record& record = view_.record(number);
  fence_before_publish();
  record.tier.store(kTierSsd, std::memory_order_relaxed);
  record.generation.store(++generation_, std::memory_order_release);
  return generation_;
}

void IndexWriter::set_tier(std::uint32_t number, std::uint64_t tier) {
  view_.record(number).tier.store(tier, std::memory_order_relaxed);
}

Hash128 IndexWriter::sum(std::uint32_t number) const {
  const Record& record = view_.record(number);
  return {record.sum_low.load(std::memory_order_relaxed),
          record.sum_high.load(std::memory_order_relaxed)};
}

bool IndexWriter::insert(const Hash128& key, std::uint32_t incarnation, std::uint32_t record) {
  if (growing()) step(kBucketsPerInsert);
  const std::uint64_t log2 = root_ & 63, log2_max = view_.header().buckets_log2_max;
  if (!growing() && entries_ * 10 >= places(log2) * kLoadTenths && entries_ >= grow_at_ &&
      log2 < log2_max)
    start_growing(log2 + 1);
  const KeyHash hash = KeyHash::of(key, incarnation, view_.header().salt);
  const std::uint64_t hint = hint_of(hash.tag, record);
  // Keys that crowd one neighbourhood: a larger table would not part them either.
  if (!put(root_, hash, hint)) return false;
  if (next_root_ != 0 && !put(next_root_, hash, hint)) {
    drop(root_, hash, record);
    return false;
  }
  ++entries_;
  return true;
}

void IndexWriter::erase(const Hash128& key, std::uint32_t incarnation, std::uint32_t record) {
  const KeyHash hash = KeyHash::of(key, incarnation, view_.header().salt);
  KVP_CHECK(drop(root_, hash, record));
  if (next_root_ != 0) drop(next_root_, hash, record);  // or not carried over yet
  --entries_;
}

void IndexWriter::prefetch_bucket(const Hash128& key, std::uint32_t incarnation) const {
  const KeyHash hash = KeyHash::of(key, incarnation, view_.header().salt);
  __builtin_prefetch(&view_.table(root_)[hash.bucket & (IndexView::buckets(root_) - 1)]);
}

void IndexWriter::prefetch_record(const Hash128& key, std::uint32_t incarnation) const {
  const KeyHash hash = KeyHash::of(key, incarnation, view_.header().salt);
  const Bucket& bucket = view_.table(root_)[hash.bucket & (IndexView::buckets(root_) - 1)];
  for (const auto& word : bucket.hint)
    if (const std::uint64_t hint = word.load(std::memory_order_relaxed);
        hint_matches(hint, hash.tag))
      __builtin_prefetch(&view_.record(hint_record(hint)));
}

bool IndexWriter::find(const Hash128& key, std::uint32_t incarnation, std::uint32_t& number) const {
  const KeyHash hash = KeyHash::of(key, incarnation, view_.header().salt);
  const Bucket* table = view_.table(root_);
  const std::uint64_t mask = IndexView::buckets(root_) - 1;
  for (std::uint32_t probe = 0; probe < kProbeMax; ++probe) {
    const Bucket& bucket = table[(hash.bucket + probe) & mask];
    for (const auto& word : bucket.hint) {
      const std::uint64_t hint = word.load(std::memory_order_relaxed);
      if (!hint_matches(hint, hash.tag)) continue;
      const Fields facts = fields(hint_record(hint));
      if (facts.key != key || facts.incarnation != incarnation) continue;
      number = hint_record(hint);
      return true;
    }
    if (bucket.passed.load(std::memory_order_relaxed) == 0) break;
  }
  return false;
}

void IndexWriter::start_growing(std::uint64_t log2) {
  KVP_CHECK(wipe_left_ == 0);  // the region to be filled must be empty
  next_root_ = ((root_ >> 8) + 1) << 8 | log2;
  copied_ = 0;
}

void IndexWriter::step(std::uint32_t buckets) {
  if (next_root_ == 0) {
    const std::uint64_t count = std::min<std::uint64_t>(wipe_left_, std::uint64_t{buckets} * 64);
    if (count == 0) return;
    wipe(old_root_, wiped_, count);
    wiped_ += count;
    wipe_left_ -= count;
    return;
  }
  const std::uint64_t old_buckets = IndexView::buckets(root_);
  const std::uint64_t until = std::min(old_buckets, copied_ + buckets);
  for (; copied_ < until; ++copied_)
    for (const auto& word : view_.table(root_)[copied_].hint) {
      const std::uint64_t hint = word.load(std::memory_order_relaxed);
      if (hint == 0) continue;
      const KeyHash hash = hash_of(hint_record(hint));
      if (holds(next_root_, hash, hint_record(hint))) continue;  // inserted since growth began
      if (!put(next_root_, hash, hint)) return abandon_growing();
    }
  if (copied_ == old_buckets) finish_growing();
}

void IndexWriter::finish_growing() {
  view_.header().root.store(next_root_, std::memory_order_release);
  // A reader that meets a zero of the old table must see that there is a new one. Free on x86.
  std::atomic_thread_fence(std::memory_order_release);
  old_root_ = root_;
  wiped_ = 0;
  wipe_left_ = IndexView::buckets(old_root_);
  root_ = next_root_;
  next_root_ = 0;
}

// Keys that crowd a neighbourhood of the next table too. Only a client that read the salt can do
// that; it costs such keys their place and the others a longer probe.
void IndexWriter::abandon_growing() {
  old_root_ = next_root_;
  wiped_ = 0;
  wipe_left_ = IndexView::buckets(next_root_);
  next_root_ = 0;
  grow_at_ = entries_ + entries_ / 8;  // from load 0.7: room for two more tries
}

// Whole pages become a hole, so that an outgrown table costs no memory; the rest by hand.
void IndexWriter::wipe(std::uint64_t root, std::uint64_t first, std::uint64_t count) {
  Bucket* table = view_.table(root);
  const auto begin =
      static_cast<std::uint64_t>(reinterpret_cast<std::byte*>(table + first) - view_.index);
  const std::uint64_t end = begin + count * sizeof(Bucket);
  const std::uint64_t hole = (begin + kPageBytes - 1) / kPageBytes * kPageBytes;
  const std::uint64_t hole_end = end / kPageBytes * kPageBytes;
  for (std::uint64_t i = first; i < first + count; ++i) {
    const auto at =
        static_cast<std::uint64_t>(reinterpret_cast<std::byte*>(table + i) - view_.index);
    if (at >= hole && at < hole_end) continue;
    table[i].passed.store(0, std::memory_order_relaxed);
    for (auto& word : table[i].hint) word.store(0, std::memory_order_relaxed);
  }
  if (hole_end > hole) index_.punch(hole, hole_end - hole);
}

bool IndexWriter::put(std::uint64_t root, const KeyHash& hash, std::uint64_t hint) {
  Bucket* table = view_.table(root);
  const std::uint64_t mask = IndexView::buckets(root) - 1;
  const std::uint32_t probes =
      static_cast<std::uint32_t>(std::min<std::uint64_t>(kProbeMax, mask + 1));
  for (std::uint32_t probe = 0; probe < probes; ++probe)
    for (auto& word : table[(hash.bucket + probe) & mask].hint) {
      if (word.load(std::memory_order_relaxed) != 0) continue;
      for (std::uint32_t before = 0; before < probe; ++before) {  // readers are sent on first
        auto& passed = table[(hash.bucket + before) & mask].passed;
        passed.store(passed.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
      }
      word.store(hint, std::memory_order_release);
      return true;
    }
  return false;
}

bool IndexWriter::drop(std::uint64_t root, const KeyHash& hash, std::uint32_t record) {
  Bucket* table = view_.table(root);
  const std::uint64_t mask = IndexView::buckets(root) - 1;
  for (std::uint32_t probe = 0; probe < kProbeMax; ++probe) {
    Bucket& bucket = table[(hash.bucket + probe) & mask];
    for (auto& word : bucket.hint) {
      if (word.load(std::memory_order_relaxed) != hint_of(hash.tag, record)) continue;
      word.store(0, std::memory_order_relaxed);
      // After the hint: a reader may look too far, never not far enough.
      for (std::uint32_t before = probe; before-- > 0;) {
        auto& passed = table[(hash.bucket + before) & mask].passed;
        passed.store(passed.load(std::memory_order_relaxed) - 1, std::memory_order_release);
      }
      return true;
    }
    if (bucket.passed.load(std::memory_order_relaxed) == 0) return false;
  }
  return false;
}

bool IndexWriter::holds(std::uint64_t root, const KeyHash& hash, std::uint32_t record) const {
  const Bucket* table = view_.table(root);
  const std::uint64_t mask = IndexView::buckets(root) - 1;
  for (std::uint32_t probe = 0; probe < kProbeMax; ++probe) {
    const Bucket& bucket = table[(hash.bucket + probe) & mask];
    for (const auto& word : bucket.hint)
      if (word.load(std::memory_order_relaxed) == hint_of(hash.tag, record)) return true;
    if (bucket.passed.load(std::memory_order_relaxed) == 0) return false;
  }
  return false;
}

KeyHash IndexWriter::hash_of(std::uint32_t number) const {
  const Fields facts = fields(number);
  return KeyHash::of(facts.key, facts.incarnation, view_.header().salt);
}

void IndexWriter::check_invariants() const {
  const auto count = [&](std::uint64_t root) {
    std::uint64_t hints = 0;
    const Bucket* table = view_.table(root);
    for (std::uint64_t i = 0; i < IndexView::buckets(root); ++i)
      for (const auto& word : table[i].hint) {
        const std::uint64_t hint = word.load(std::memory_order_relaxed);
        if (hint == 0) continue;
        ++hints;
        KVP_CHECK(holds(root, hash_of(hint_record(hint)), hint_record(hint)));
      }
    return hints;
  };
  KVP_CHECK(count(root_) == entries_);
  if (next_root_ != 0) KVP_CHECK(count(next_root_) <= entries_);
}

}  // namespace kvpool
