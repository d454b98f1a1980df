// What the node does to the index. One writer at a time (the node's lock); readers never wait.
//
// Order, per record:   prepare   fence_before_overwrite() -> fields (the caller: then payload)
//                      publish   sum -> sfence -> generation (release)
//                      withdraw  generation 0 -> (the caller: fence, look at pins) -> erase hint
// Order, per table:    insert    `passed` of the full buckets -> hint (release)
//                      erase     hint -> `passed` of the buckets before it
//                      grow      fill the next table in steps while both are kept up to date
//                                -> root (release) -> wipe the old one in steps
// Promises:  1. a generation is never given twice;
//            2. no call does more than a bounded amount of work, however large the table.
#pragma once
#include <cstdint>

#include "memory/arena.h"
#include "node/index_layout.h"

namespace kvpool {

class IndexWriter {
 public:
  // Bytes of index for that many records, the largest table included.
  static std::uint64_t index_bytes(std::uint64_t records_max);
  // Formats an empty index into zeroed memory.
  IndexWriter(Arena& index, const Arena& payload, std::uint64_t records_max, std::uint64_t salt);

  // Begins with a table for so many entries, instead of growing to it. Before the first insert.
  void begin_with(std::uint64_t entries);

  const IndexView& view() const { return view_; }
  std::uint64_t entries() const { return entries_; }
  std::uint64_t table_bytes() const;
  bool growing() const { return next_root_ != 0 || wipe_left_ != 0; }

  // Readers of that namespace look for this incarnation from now on.
  void announce(std::uint32_t space_number, std::uint32_t incarnation);

  // Writes who and where into an unreadable record, before its payload is written.
  struct Fields {
    Hash128 key;
    std::uint32_t incarnation = 0, bytes = 0;
    std::uint64_t offset = 0;
  };
  void prepare(std::uint32_t record, const Fields& fields);
  // Makes a prepared record readable and returns its new generation. The payload is in its slot.
  std::uint64_t publish(std::uint32_t record, const Hash128& sum, std::uint64_t tier = kTierDram);
  Fields fields(std::uint32_t record) const;
  // The record stops being readable; returns the generation it had.
  std::uint64_t withdraw(std::uint32_t record);
  // After the slot's bytes were copied elsewhere: same key, new place, new generation. The record
  // stays readable throughout; the old place may be written again after the next fence.
  std::uint64_t move(std::uint32_t record, std::uint64_t offset);
  // The block's bytes are in DRAM as well, at that offset; or they are there no more, and the slot
  // may be written again after the next fence. New generation; never unreadable either.
  std::uint64_t promote(std::uint32_t record, std::uint64_t offset);
  std::uint64_t demote(std::uint32_t record);
  // Another tier has, or has no more, a copy; what readers hold stays good.
  void set_tier(std::uint32_t record, std::uint64_t tier);
  Hash128 sum(std::uint32_t record) const;

  // False: no place within kProbeMax buckets and the table cannot grow.
  bool insert(const Hash128& key, std::uint32_t incarnation, std::uint32_t record);
  // The hint of that record goes. Must be there.
  void erase(const Hash128& key, std::uint32_t incarnation, std::uint32_t record);
  // The record of a key, published or not; a plain probe under the node's lock.
  bool find(const Hash128& key, std::uint32_t incarnation, std::uint32_t& record) const;
  // Ahead of a find: the first line it needs, and some calls later the second.
  void prefetch_bucket(const Hash128& key, std::uint32_t incarnation) const;
  void prefetch_record(const Hash128& key, std::uint32_t incarnation) const;

  // A bounded piece of growing or wiping; called by insert and by the node's own thread.
  void step(std::uint32_t buckets);

  void check_invariants() const;

 private:
  void start_growing(std::uint64_t log2);
  void finish_growing();
  void abandon_growing();
  bool put(std::uint64_t root, const KeyHash& hash, std::uint64_t hint);
  bool drop(std::uint64_t root, const KeyHash& hash, std::uint32_t record);
  bool holds(std::uint64_t root, const KeyHash& hash, std::uint32_t record) const;
  KeyHash hash_of(std::uint32_t record) const;
  void wipe(std::uint64_t root, std::uint64_t first, std::uint64_t count);

  Arena& index_;
  IndexView view_;
  std::uint64_t entries_ = 0, generation_ = 0;
  std::uint64_t root_ = 0;
  std::uint64_t grow_at_ = 0;                               // entries; 0 = by load
  std::uint64_t next_root_ = 0, copied_ = 0;                // the table being filled, 0 = none
  std::uint64_t old_root_ = 0, wiped_ = 0, wipe_left_ = 0;  // the table being wiped
};

}  // namespace kvpool
