// One directory on an SSD: LMDB says what exists, where and with which checksum; a preallocated
// slab file holds the bytes.
//
// A group, in this order and no other:
//     payload written  ->  fdatasync(slab file)  ->  index commit  ->  the caller makes it visible
//                                                                  ->  the caller frees what was
//                                                                      deleted by this group
// Promises:  1. after commit() has said so, a write survives kill -9, and power loss where the
//               device honours a flush (durable, async); `relaxed` may lose the last group;
//            2. nothing is reachable that was not written and synced before its entry;
//            3. a read gives the payload of the entry, checked, or says damaged / failed;
//            4. files have their full size from open() on: no write here meets a full disk;
//            5. one process per directory.
// Relies on: the caller to give slots out (a SlabPool), to read no slot that it frees, and with
//            `relaxed` to free what a group deleted only after the next group.
// Thread rule: commit() and resize() from one thread (the writer); reads, facts and counters from
// any. Where clean-ups of abandoned reads run, the tier cannot be destroyed.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/fault.h"
#include "base/status.h"
#include "memory/slab_pool.h"
#include "tier/ssd_format.h"
#include "tier/tier.h"

namespace kvpool {

enum class Durability : std::uint8_t {
  async,    // put does not wait; a crash loses what was still queued
  durable,  // put waits for the commit
  relaxed,  // as async, and the newest group may be lost as well: half the flushes
};

struct SsdOptions {
  std::string path;
  std::uint64_t capacity_bytes = 0;    // all files; 0 = as it was when last open
  std::uint64_t free_floor_bytes = 0;  // to be left free on the filesystem
  Durability durability = Durability::async;
  std::uint32_t io_threads = 8;
  bool direct = true;             // O_DIRECT where the filesystem really does it
  FaultPoints* faults = nullptr;  // outlives the tier; nullptr = none
};

// A slot as an entry names it.
struct SsdPlace {
  std::uint32_t slab_unit = 0, slot = 0;
  std::uint32_t bytes = 0;  // of payload
  friend bool operator==(const SsdPlace&, const SsdPlace&) = default;
  std::uint64_t slot_bytes() const { return SlabPool::slot_bytes(bytes); }
  // From the start of unit 0.
  std::uint64_t offset() const { return slab_unit * kUnitBytes + slot * slot_bytes(); }
};

struct SsdWrite {
  static constexpr std::uint32_t kNone = 0xffffffff;
  BlockKey key;
  SsdPlace place;
  Hash128 sum, parent;
  float heat = 0;
  std::uint32_t stamp_s = 0;
  // slot_bytes() readable bytes at a multiple of 4096, unchanged until commit() returns; nullptr:
  // there are none after all, and nothing is written.
  const std::byte* payload = nullptr;
  std::uint32_t after = kNone;  // index in the group of the write this one is useless without
  bool written = false;         // out: false = its slot could not be written; nothing refers to it
  bool failed_io = false;       // out: the device said no: the slot is better left alone
};
// Deletes the entry only if it still names that place.
struct SsdDelete {
  BlockKey key;
  SsdPlace place;
};
// New heat for an entry, only if it still names that place.
struct SsdStamp {
  BlockKey key;
  SsdPlace place;
  float heat = 0;
  std::uint32_t stamp_s = 0;
};
struct SsdSpace {
  std::uint32_t number = 0;
  Hash128 id;
  std::uint64_t block_bytes = 0;
};
struct SsdClass {
  std::uint64_t slot_bytes = 0, slab_units = 0;
};
// deletes + writes + stamps + new spaces: at most IndexStore::kChangesMax (4096).
struct SsdGroup {
  std::vector<SsdSpace> new_spaces;
  std::vector<std::uint32_t> dropped_spaces;  // their records only; their blocks are `deletes`
  std::vector<SsdClass> new_classes;
  std::vector<SsdDelete> deletes;  // done before the writes
  std::vector<SsdWrite> writes;    // a parent before its children
  std::vector<SsdStamp> stamps;
  double tau_s = 0;  // 0 = as it was
};

struct SsdFacts {
  std::uint8_t tier_id[16] = {}, node_id[16] = {};
  std::uint64_t capacity_bytes = 0;
  std::uint64_t units = 0;        // of 2 MiB for payload
  std::uint64_t index_bytes = 0;  // size of index.mdb
  std::uint64_t index_used_bytes = 0;
  std::uint64_t entries = 0;      // of blocks, as of the last commit
  std::uint64_t entries_max = 0;  // what surely fits into the index
  std::uint64_t next_space = 1;
  double tau_s = 0;
  bool direct = false;
  std::string why_not_direct;  // empty while direct
};

struct SsdCounters {  // since open
  std::uint64_t groups = 0, syncs = 0, written_blocks = 0, written_bytes = 0, read_blocks = 0,
                read_bytes = 0;
  std::uint64_t index_written_bytes = 0;  // estimate: pages of the index that commits wrote
  std::uint64_t write_faults = 0, read_faults = 0, damaged = 0, commit_faults = 0;
  std::uint64_t direct_refusals = 0;  // O_DIRECT given up at run time
};

enum class ReadOutcome : std::uint8_t {
  pending,
  whole,    // exactly the payload, checksum compared
  damaged,  // read, but not what was written
  failed,   // the device said no, or gave less
};

// Several slots read at once.
class SsdReads {
 public:
  struct Item {
    SsdPlace place;
    Hash128 sum;
    std::byte* into =
        nullptr;  // nullptr fails; slot_bytes() at a multiple of 4096; holds anything unless whole
    std::atomic<ReadOutcome> outcome{ReadOutcome::pending};
    std::atomic<std::uint32_t> pieces_left{0};
    std::atomic<bool> io_failed{false}, is_behind_end{false};
    Item() = default;
    Item(const Item&) = delete;
    Item& operator=(const Item&) = delete;
  };
  explicit SsdReads(std::size_t count) : items(count) {}

  // True: every item has an outcome. False: the deadline came first; reads are still under way.
  bool wait(std::chrono::steady_clock::time_point deadline);
  // For who will not wait any longer. True: `clean_up` will be called, once, by the thread that
  // ends the last read. False: all is done already, it will not be called.
  bool abandon(std::function<void()> clean_up);

  std::vector<Item> items;

 private:
  friend class Ssd;
  void item_done();
  std::mutex mutex_;
  std::condition_variable done_;
  std::size_t left_ = 0;  // of items
  std::function<void()> clean_up_;
};

class Ssd {
 public:
  // Opens or formats. Refuses (Code::refused) a directory that is locked, foreign, damaged or of
  // another version; Code::no_resource where the machine has no room. What it made in a directory
  // it could not finish formatting, it takes away again. More capacity than last time grows the
  // tier here; less leaves it as it is, since only the owner of the blocks can empty the end of it:
  // resize().
  static Result<std::unique_ptr<Ssd>> open(const SsdOptions& options);
  ~Ssd();
  Ssd(const Ssd&) = delete;
  Ssd& operator=(const Ssd&) = delete;

  // What is there. After open(), before the first commit(). Entries whose check is wrong, or whose
  // space is unknown, are not shown but counted: forgotten() names them for deletion.
  std::vector<SsdSpace> spaces() const;
  std::vector<SsdClass> classes() const;
  using VisitEntry = std::function<void(const BlockKey&, const BlockEntry&)>;
  Result<void> for_each_entry(const VisitEntry& visit) const;
  std::vector<BlockKey> forgotten() const;
  // Commits delete some with each group, an empty one too, as long as there are any.
  bool has_forgotten() const;
  void forget_these(std::vector<BlockKey> keys);  // deleted with the next group, whatever they say

  // True: in the index, but for writes that are not `written`; a group of nothing is true and
  // touches no file. False: nothing of the group is (writes[i].written is false for all).
  bool commit(SsdGroup& group);

  // With `relaxed`: what was committed so far survives power loss too, as with the others anyway.
  // From the writer's thread. False: it may not.
  bool sync();

  void read(const std::shared_ptr<SsdReads>& reads);

  // Growing takes the room first, and fails with everything as it was. When shrinking, nothing may
  // lie in units from the new end on: units_for() says where that is. An error of shrinking may
  // leave the slab file longer than facts() say, until the next open.
  std::uint64_t units_for(std::uint64_t capacity_bytes) const;
  Result<void> resize(std::uint64_t capacity_bytes);

  SsdFacts facts() const;
  SsdCounters counters() const;
  // Set for good after too many faults or a failed flush: commit() then refuses, reads go on.
  bool is_read_only() const;
  std::string why_read_only() const;

 private:
  struct Parts;
  explicit Ssd(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

}  // namespace kvpool
