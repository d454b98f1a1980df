// The slab file: bytes at places. It knows nothing of what they mean, but for its own header.
//
// Promises:  1. a transfer is whole or has failed: interruptions and partial results are gone on
//               with, the end of the file and a transfer of nothing are failures;
//            2. O_DIRECT is used only where a real write and read worked at open; where it is
//               refused later, that transfer is done again through the page cache, and so is
//               every one after it;
//            3. create() and resize() take all the room there and then, so that no write finds the
//               filesystem full (a filesystem that copies on write cannot give that);
//            4. the name is never followed out of its directory.
// Relies on: the caller, for memory, offsets and lengths of whole pages (kSlotAlignBytes).
// Thread-safe, but nothing may be under way in units that resize() takes away, and resize() is
// called by one thread.
//
// Fault points: ssd.write, ssd.read (EIO); ssd.write.short, ssd.read.short (half is moved, then no
// more); ssd.read.flip (a byte that was not read so); ssd.sync; ssd.direct (O_DIRECT: EINVAL).
#pragma once
#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/fault.h"
#include "base/status.h"
#include "tier/descriptor.h"
#include "tier/ssd_format.h"

namespace kvpool {

inline constexpr const char* kSlabFileName = "slabs";

class SlabFile {
 public:
  struct Options {
    int directory = -1;  // descriptor; used by create() and open() only
    bool direct = true;  // wanted
    FaultPoints* faults = nullptr;
  };
  // A new file of that many units, synced; `tier_id` goes into its header. What is left of the
  // file after a failure is the caller's to take away.
  static Result<std::unique_ptr<SlabFile>> create(const Options& options,
                                                  const std::uint8_t (&tier_id)[16],
                                                  std::uint64_t units);
  static Result<std::unique_ptr<SlabFile>> open(const Options& options);

  SlabFile(const SlabFile&) = delete;
  SlabFile& operator=(const SlabFile&) = delete;

  // `offset` is from unit 0. 0, or why it failed as an errno; then the bytes there, or in `into`,
  // are anything. ENODATA: the file ends before, as it may have been cut shorter meanwhile.
  int write_at(std::uint64_t offset, const std::byte* from, std::size_t bytes);
  int read_at(std::uint64_t offset, std::byte* into, std::size_t bytes);
  // Slots that lie one behind the other, in one call: at 64 KiB a call for each costs three times
  // the CPU. False: not all was moved, for whatever reason; the calls above, for each, find out.
  // Always false while a fault point is armed.
  bool write_run(std::uint64_t offset, std::span<const iovec> slots);
  bool read_run(std::uint64_t offset, std::span<const iovec> slots);
  // All writes that have returned are on the device. After a failure nobody knows which are.
  int sync();

  // Growing is synced, and leaves the file as it was where there is no room.
  Result<void> resize(std::uint64_t units);
  // Whole units in the file.
  std::uint64_t units() const { return units_.load(std::memory_order_relaxed); }
  // Makes an opened file exactly so long and takes the room of holes that a copy left. False in
  // nothing but the error: the file is shorter, or there is no room.
  Result<void> restore(std::uint64_t units);

  const SlabHeader& header() const { return header_; }
  bool direct() const { return direct_in_use_.load(std::memory_order_relaxed); }
  std::string why_not_direct() const;  // empty while direct
  std::uint64_t direct_refusals() const { return refusals_.load(std::memory_order_relaxed); }

 private:
  SlabFile() = default;
  Result<void> start(const Options& options, int flags);
  Result<void> write_header(const std::uint8_t (&tier_id)[16]);
  Result<void> read_header();
  void try_direct(int directory);
  void give_up_direct();
  template <typename Call>
  bool move_run(std::uint64_t offset, std::span<const iovec> slots, Call call);
  bool fires(const char* point) { return faults_ != nullptr && faults_->fires(point); }
  template <typename Call>
  int transfer(std::size_t bytes, Call call);

  Descriptor buffered_, direct_;
  std::atomic<bool> direct_in_use_{false};
  std::atomic<std::uint64_t> refusals_{0}, units_{0};
  SlabHeader header_;
  std::string why_not_direct_ = "not wanted";  // as of open
  FaultPoints* faults_ = nullptr;
};

}  // namespace kvpool
