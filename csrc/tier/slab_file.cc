#include "tier/slab_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "base/check.h"
#include "block/checksum.h"
#include "memory/arena.h"
#include "tier/tier.h"

namespace kvpool {
namespace {

// The second page of the header's room: zero, and always to be written as zero.
constexpr std::uint64_t kProbeOffset = kSlotAlignBytes;

constexpr std::uint64_t file_bytes(std::uint64_t units) {
  return kSsdDataOffset + units * kUnitBytes;
}

Hash128 sum_of(const SlabHeader& header) { return checksum(&header, offsetof(SlabHeader, sum)); }

int write_zeros(int file, std::uint64_t from, std::uint64_t to) {
  const std::vector<std::byte> zeros(1 << 20);
  return transfer_whole(to - from, [&](std::size_t done) {
    return pwrite(file, zeros.data(), std::min<std::uint64_t>(zeros.size(), to - from - done),
                  static_cast<off_t>(from + done));
  });
}

// Holes in the range get room and read as zeros; what is there stays, but only where the
// filesystem knows fallocate: elsewhere the range must hold nothing yet.
int take_room(int file, std::uint64_t from, std::uint64_t to, bool holds_nothing) {
  while (fallocate(file, 0, static_cast<off_t>(from), static_cast<off_t>(to - from)) != 0) {
    if (errno == EINTR) continue;
    if (errno != EOPNOTSUPP) return errno;
    return holds_nothing ? write_zeros(file, from, to) : 0;
  }
  return 0;
}

// Why this file cannot be had with O_DIRECT by what the kernel says of it; empty = it says nothing.
std::string refused_by_statx(int file) {
#ifdef STATX_DIOALIGN
  struct statx facts{};
  if (statx(file, "", AT_EMPTY_PATH, STATX_DIOALIGN, &facts) != 0) return {};
  if ((facts.stx_mask & STATX_DIOALIGN) == 0) return {};
  if (facts.stx_dio_offset_align == 0) return "the filesystem has no O_DIRECT for this file";
  const auto align = std::max(facts.stx_dio_mem_align, facts.stx_dio_offset_align);
  if (align > kSlotAlignBytes || kSlotAlignBytes % align != 0)
    return "O_DIRECT would need an alignment of " + std::to_string(align) + " bytes";
#endif
  return {};
}

struct FreePage {
  void operator()(std::byte* page) const { std::free(page); }
};

// A write and a read of zeros: some filesystems accept the flag and refuse the transfer.
int probe(int file) {
  const std::unique_ptr<std::byte, FreePage> page(
      static_cast<std::byte*>(std::aligned_alloc(kSlotAlignBytes, kSlotAlignBytes)));
  if (page == nullptr) return ENOMEM;
  const auto at = static_cast<off_t>(kProbeOffset);
  std::memset(page.get(), 0, kSlotAlignBytes);
  const int wrote = transfer_whole(kSlotAlignBytes, [&](std::size_t done) {
    return pwrite(file, page.get() + done, kSlotAlignBytes - done, at + static_cast<off_t>(done));
  });
  if (wrote != 0) return wrote;
  std::memset(page.get(), 0xa5, kSlotAlignBytes);
  const int read = transfer_whole(kSlotAlignBytes, [&](std::size_t done) {
    return pread(file, page.get() + done, kSlotAlignBytes - done, at + static_cast<off_t>(done));
  });
  if (read != 0) return read;
  const auto is_zero = [](std::byte b) { return b == std::byte{0}; };
  return std::all_of(page.get(), page.get() + kSlotAlignBytes, is_zero) ? 0 : EIO;
}

}  // namespace

Result<std::unique_ptr<SlabFile>> SlabFile::create(const Options& options,
                                                   const std::uint8_t (&tier_id)[16],
                                                   std::uint64_t units) {
  std::unique_ptr<SlabFile> file(new SlabFile);
  if (auto done = file->start(options, O_CREAT | O_EXCL); !done)
    return std::unexpected(done.error());
  if (const int error = take_room(file->buffered_.get(), 0, file_bytes(units), true); error != 0)
    return fail_for(error,
                    "slab file: no room for " + std::to_string(file_bytes(units)) + " bytes");
  file->units_ = units;
  if (auto done = file->write_header(tier_id); !done) return std::unexpected(done.error());
  if (options.direct) file->try_direct(options.directory);
  if (fsync(file->buffered_.get()) != 0) return fail_for(errno, "slab file: cannot be synced");
  return file;
}

Result<std::unique_ptr<SlabFile>> SlabFile::open(const Options& options) {
  std::unique_ptr<SlabFile> file(new SlabFile);
  if (auto done = file->start(options, 0); !done) return std::unexpected(done.error());
  if (auto done = file->read_header(); !done) return std::unexpected(done.error());
  if (options.direct) file->try_direct(options.directory);
  return file;
}

Result<void> SlabFile::start(const Options& options, int flags) {
  faults_ = options.faults;
  buffered_ = Descriptor(
      openat(options.directory, kSlabFileName, O_RDWR | O_NOFOLLOW | O_CLOEXEC | flags, 0600));
  if (!buffered_.is_open())
    return fail_for(errno, errno == ELOOP ? "slab file: a symbolic link is not followed"
                                          : "slab file: cannot be opened");
  // Without it a buffered read of one slot fetches its neighbours as well, up to the read-ahead
  // of the device (8 MiB on some).
  posix_fadvise(buffered_.get(), 0, 0, POSIX_FADV_RANDOM);
  return {};
}

Result<void> SlabFile::write_header(const std::uint8_t (&tier_id)[16]) {
  std::copy(std::begin(tier_id), std::end(tier_id), header_.tier_id);
  header_.sum = sum_of(header_);
  const int error = transfer_whole(sizeof header_, [&](std::size_t done) {
    return pwrite(buffered_.get(), reinterpret_cast<const char*>(&header_) + done,
                  sizeof header_ - done, static_cast<off_t>(done));
  });
  if (error != 0) return fail_for(error, "slab file: its header cannot be written");
  return {};
}

Result<void> SlabFile::read_header() {
  struct stat facts{};
  if (fstat(buffered_.get(), &facts) != 0) return fail_for(errno, "slab file: no stat");
  if (!S_ISREG(facts.st_mode)) return fail(Code::refused, "slab file: not an ordinary file");
  const auto bytes = static_cast<std::uint64_t>(facts.st_size);
  if (bytes < kSsdDataOffset)
    return fail(Code::refused, "slab file: cut off within its header (" + std::to_string(bytes) +
                                   " bytes); restore the directory from a copy, or empty it");
  const int error = transfer_whole(sizeof header_, [&](std::size_t done) {
    return pread(buffered_.get(), reinterpret_cast<char*>(&header_) + done, sizeof header_ - done,
                 static_cast<off_t>(done));
  });
  if (error != 0) return fail_for(error, "slab file: its header cannot be read");
  if (header_.magic != kSsdMagic)
    return fail(Code::refused,
                "slab file: not one of kvpool, or its header is destroyed; name "
                "another directory, or empty this one to start anew");
  if (header_.version != kSsdFormatVersion)
    return fail(Code::refused, "slab file: has format version " + std::to_string(header_.version) +
                                   ", and this kvpool reads version " +
                                   std::to_string(kSsdFormatVersion) +
                                   "; use the kvpool that wrote it, or empty the directory");
  if (header_.sum != sum_of(header_))
    return fail(Code::refused,
                "slab file: the checksum of its header is wrong; restore the "
                "directory from a copy, or empty it");
  if (header_.align_bytes != kSlotAlignBytes)
    return fail(Code::refused, "slab file: aligned to " + std::to_string(header_.align_bytes) +
                                   " bytes, and this kvpool needs 4096");
  units_ = (bytes - kSsdDataOffset) / kUnitBytes;
  return {};
}

void SlabFile::try_direct(int directory) {
  why_not_direct_ = refused_by_statx(buffered_.get());
  if (!why_not_direct_.empty()) return;
  Descriptor direct(openat(directory, kSlabFileName, O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_DIRECT));
  const int error = !direct.is_open() ? errno : fires("ssd.direct") ? EINVAL : probe(direct.get());
  if (error != 0) {
    why_not_direct_ = std::string("a trial with O_DIRECT failed: ") + std::strerror(error);
    return;
  }
  direct_ = std::move(direct);
  direct_in_use_ = true;
}

void SlabFile::give_up_direct() {
  // Of several threads that are refused at once, one counts. The descriptor stays open: others may
  // be inside a transfer with it.
  if (direct_in_use_.exchange(false)) refusals_.fetch_add(1, std::memory_order_relaxed);
}

std::string SlabFile::why_not_direct() const {
  return direct_refusals() > 0 ? "O_DIRECT was refused by a read or write (EINVAL)"
                               : why_not_direct_;
}

// `call(descriptor, done)` is one pread or pwrite of what is not done yet.
template <typename Call>
int SlabFile::transfer(std::size_t bytes, Call call) {
  return transfer_whole(bytes, [&](std::size_t done) -> ssize_t {
    // The rest of a transfer that stopped within a page cannot go on with O_DIRECT, and would
    // look like a refusal.
    if (!direct() || done % kSlotAlignBytes != 0) return call(buffered_.get(), done);
    ssize_t moved = -1;
    if (fires("ssd.direct"))
      errno = EINVAL;
    else
      moved = call(direct_.get(), done);
    if (moved >= 0 || errno != EINVAL) return moved;
    give_up_direct();
    return call(buffered_.get(), done);
  });
}

int SlabFile::write_at(std::uint64_t offset, const std::byte* from, std::size_t bytes) {
  if (fires("ssd.write")) return EIO;
  const bool is_short = fires("ssd.write.short");
  if (is_short) bytes = bytes / 2 / kSlotAlignBytes * kSlotAlignBytes;
  const auto at = static_cast<off_t>(kSsdDataOffset + offset);
  const int error = transfer(bytes, [&](int file, std::size_t done) {
    return pwrite(file, from + done, bytes - done, at + static_cast<off_t>(done));
  });
  return is_short ? EIO : error;
}

int SlabFile::read_at(std::uint64_t offset, std::byte* into, std::size_t bytes) {
  if (fires("ssd.read")) return EIO;
  const bool is_short = fires("ssd.read.short");
  if (is_short) bytes = bytes / 2 / kSlotAlignBytes * kSlotAlignBytes;
  const auto at = static_cast<off_t>(kSsdDataOffset + offset);
  bool is_at_end = false;
  const int error = transfer(bytes, [&](int file, std::size_t done) {
    const ssize_t got = pread(file, into + done, bytes - done, at + static_cast<off_t>(done));
    is_at_end = got == 0;
    return got;
  });
  if (is_short) return EIO;
  if (is_at_end) return ENODATA;
  if (error == 0 && bytes > 0 && fires("ssd.read.flip")) into[bytes / 2] ^= std::byte{1};
  return error;
}

template <typename Call>
bool SlabFile::move_run(std::uint64_t offset, std::span<const iovec> slots, Call call) {
  if (faults_ != nullptr && faults_->is_armed()) return false;
  std::size_t bytes = 0;
  for (const iovec& slot : slots) bytes += slot.iov_len;
  const int file = direct() ? direct_.get() : buffered_.get();
  const ssize_t moved = call(file, slots.data(), static_cast<int>(slots.size()),
                             static_cast<off_t>(kSsdDataOffset + offset));
  return moved == static_cast<ssize_t>(bytes);
}

bool SlabFile::write_run(std::uint64_t offset, std::span<const iovec> slots) {
  return move_run(offset, slots, pwritev);
}

bool SlabFile::read_run(std::uint64_t offset, std::span<const iovec> slots) {
  return move_run(offset, slots, preadv);
}

int SlabFile::sync() {
  if (fires("ssd.sync")) return EIO;
  while (fdatasync(buffered_.get()) != 0)
    if (errno != EINTR) return errno;
  return 0;
}

Result<void> SlabFile::resize(std::uint64_t units) {
  const std::uint64_t before = this->units();
  const int file = buffered_.get();
  if (units > before) {
    int error = take_room(file, file_bytes(before), file_bytes(units), true);
    if (error == 0) error = sync();
    if (error != 0) {
      // A failure here leaves a longer file, which restore() cuts at the next open.
      (void)!ftruncate(file, static_cast<off_t>(file_bytes(before)));
      return fail_for(error, "slab file: cannot grow from " + std::to_string(file_bytes(before)) +
                                 " to " + std::to_string(file_bytes(units)) + " bytes");
    }
  } else if (units < before && ftruncate(file, static_cast<off_t>(file_bytes(units))) != 0) {
    return fail_for(errno, "slab file: cannot shrink");
  }
  units_ = units;
  return {};
}

Result<void> SlabFile::restore(std::uint64_t units) {
  struct stat facts{};
  const int file = buffered_.get();
  if (fstat(file, &facts) != 0) return fail_for(errno, "slab file: no stat");
  const auto bytes = static_cast<std::uint64_t>(facts.st_size), wanted = file_bytes(units);
  if (bytes < wanted)
    return fail(Code::refused, "slab file: " + std::to_string(bytes) +
                                   " bytes, and the index was "
                                   "written for " +
                                   std::to_string(wanted) +
                                   "; restore the directory from a copy, or empty it");
  if (bytes > wanted && ftruncate(file, static_cast<off_t>(wanted)) != 0)
    return fail_for(errno, "slab file: cannot be cut to its size");
  units_ = units;
  if (static_cast<std::uint64_t>(facts.st_blocks) * 512 >= wanted) return {};
  if (const int error = take_room(file, 0, wanted, false); error != 0)
    return fail_for(error, "slab file: it has holes, and there is no room to fill them");
  return {};
}

}  // namespace kvpool
