// One run of addresses whose physical pages come and go: a memfd, mapped once.
//
// Promises:  1. base() never changes while pages are committed and given back;
//            2. the file can neither grow nor shrink (sealed) and is mode 0400, so another uid
//               cannot reopen it for writing. Our own descriptor is writable and is never to be
//               handed out; open_read_only() makes one that is not. Sealed, no process can map it
//               for writing any more, but pages never go back to the system;
//            3. pages that were punched read as zeros.
// Relies on: the caller, to never punch what a reader may still be looking at.
// Thread-safe: every call is a system call on a range; the caller keeps ranges apart.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/status.h"

namespace kvpool {

// What pages are committed and punched by: the size of a huge page, so that a unit can be one.
inline constexpr std::uint64_t kUnitBytes = 2ull << 20;
inline constexpr std::uint64_t kPageBytes = 4096;

class Arena {
 public:
  enum class Kind : std::uint8_t { elastic, sealed };
  // Reserves addresses, commits nothing. `bytes` is rounded up to whole units.
  static Result<std::unique_ptr<Arena>> create(const char* name, std::uint64_t bytes,
                                               Kind kind = Kind::elastic);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::byte* base() const { return base_; }
  std::uint64_t bytes() const { return bytes_; }
  int descriptor() const { return descriptor_; }
  bool is_sealed() const { return kind_ == Kind::sealed; }
  // A new descriptor for another process, to be closed by the caller.
  Result<int> open_read_only() const;

  // Makes the pages of a range present and writable, zero-filled where they were not. False: the
  // machine has no memory for them; nothing is lost, and touching them later may kill the process.
  bool commit(std::uint64_t offset, std::uint64_t bytes);
  // The same with huge pages, which needs no system setting but Linux 6.1. Only for ranges that
  // hold nothing yet: collapsing a filled range costs 5 ms per unit. False: some unit
  // has ordinary pages or none; commit() tells.
  bool commit_huge(std::uint64_t offset, std::uint64_t bytes);
  // Gives the pages back to the system, or wipes them where they are sealed. Whole pages only.
  void punch(std::uint64_t offset, std::uint64_t bytes);

  // What the file holds now, by the kernel's own count. One system call.
  std::uint64_t committed_bytes() const;

 private:
  Arena(int descriptor, std::byte* base, std::uint64_t bytes, Kind kind)
      : descriptor_(descriptor), base_(base), bytes_(bytes), kind_(kind) {}

  int descriptor_;
  std::byte* base_;
  std::uint64_t bytes_;
  Kind kind_;
};

}  // namespace kvpool
