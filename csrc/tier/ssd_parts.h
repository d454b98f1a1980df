// What Ssd is made of, for its own .cc files: ssd_open.cc, ssd_commit.cc, ssd_read.cc, ssd.cc.
//
// Members are declared in the order in which they must outlive each other: the lock on the
// directory is given up last, after the index is closed; the threads, whose tasks use all of the
// others, end first.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/fork_guard.h"
#include "tier/index_store.h"
#include "tier/io_pool.h"
#include "tier/slab_file.h"
#include "tier/ssd.h"
#include "tier/ssd_directory.h"

namespace kvpool {

// Faults of reads, writes and commits, since open, after which the tier only reads. Damage is none:
// it says something about one slot, not about the device.
inline constexpr std::uint64_t kSsdFaultsMax = 16;
// Lock files and what a filesystem adds to files of this kind (lists of their pieces).
inline constexpr std::uint64_t kSsdBooksBytes = 64 << 10;
// 2 PiB of payload: below what a slab's unit number and SlabPool can count.
inline constexpr std::uint64_t kSsdUnitsMax = 1ull << 30;

// How a capacity is divided.
struct SsdSplit {
  std::uint64_t units = 0, index_bytes = 0;
  std::uint64_t bytes() const {
    return kSsdDataOffset + kSsdBooksBytes + index_bytes + units * kUnitBytes;
  }
  // An index never shrinks: it takes at least `index_bytes_now`. units = 0: too little for one.
  static SsdSplit of(std::uint64_t capacity_bytes, std::uint64_t index_bytes_now);
  // The least capacity with a unit.
  static std::uint64_t least(std::uint64_t index_bytes_now);
};

struct Ssd::Parts {
  using Counter = std::atomic<std::uint64_t>;

  explicit Parts(const SsdOptions& wanted) : options(wanted) {}

  // ssd_open.cc
  Result<void> open();
  Result<void> format();
  Result<void> open_existing();
  Result<SsdSplit> split_or_refuse(std::uint64_t capacity_bytes,
                                   std::uint64_t index_bytes_now) const;
  Result<void> check_room(std::uint64_t more_bytes) const;
  Result<void> resize(std::uint64_t capacity_bytes);
  void take_facts();

  // ssd_commit.cc
  void write_payloads(SsdGroup& group);
  bool sync_payloads(const SsdGroup& group);
  bool commit_index(const SsdGroup& group);
  void count_written(const SsdGroup& group);
  void count_fault(Counter& counter, const std::string& what);
  void make_read_only(const std::string& why);
  std::vector<BlockKey> keys_to_forget(std::size_t changes) const;

  // ssd_read.cc
  static void read_cut(const IoTask& task);
  bool read_together(std::span<SsdReads::Item> run);
  void end_read(SsdReads& reads, SsdReads::Item& item);

  bool fires(const char* point) const {
    return options.faults != nullptr && options.faults->fires(point);
  }
  bool is_inside(const BlockEntry& entry) const;

  const SsdOptions options;
  ForkGuard fork_guard;
  std::unique_ptr<SsdDirectory> directory;
  std::unique_ptr<SlabFile> slabs;
  std::unique_ptr<IndexStore> index;

  // The writer's, and of the calls before the first commit.
  std::vector<BlockKey> to_forget;
  std::vector<BlockKey> found_forgotten;
  bool has_looked = false;

  mutable std::mutex mutex;  // guards facts, why_read_only
  SsdFacts facts;
  std::string why_read_only;
  std::atomic<bool> read_only{false};

  Counter groups{0}, syncs{0}, written_blocks{0}, written_bytes{0}, read_blocks{0}, read_bytes{0};
  Counter index_written_bytes{0}, write_faults{0}, read_faults{0}, damaged{0}, commit_faults{0};

  std::unique_ptr<IoPool> pool;
};

}  // namespace kvpool
