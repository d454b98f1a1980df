#include "memory/arena.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "base/check.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace kvpool {
namespace {

std::unexpected<Error> no_resource(const std::string& what, std::uint64_t bytes) {
  return fail(Code::no_resource, what + " for an arena of " + std::to_string(bytes) +
                                     " bytes of addresses failed: " + std::strerror(errno));
}

// On a unit boundary, so that a unit of the file can be mapped as one huge page.
std::byte* map_aligned(int descriptor, std::uint64_t bytes) {
  void* room = mmap(nullptr, bytes + kUnitBytes, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return nullptr;
  const auto start = reinterpret_cast<std::uintptr_t>(room);
  const std::uintptr_t aligned = (start + kUnitBytes - 1) & ~(kUnitBytes - 1);
  if (aligned > start) munmap(room, aligned - start);
  const std::uintptr_t end = start + bytes + kUnitBytes;
  if (end > aligned + bytes)
    munmap(reinterpret_cast<void*>(aligned + bytes), end - aligned - bytes);
  void* base = mmap(reinterpret_cast<void*>(aligned), bytes, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_FIXED | MAP_NORESERVE, descriptor, 0);
  if (base == MAP_FAILED) {
    munmap(reinterpret_cast<void*>(aligned), bytes);
    return nullptr;
  }
  return static_cast<std::byte*>(base);
}

}  // namespace

Result<std::unique_ptr<Arena>> Arena::create(const char* name, std::uint64_t bytes, Kind kind) {
  bytes = (bytes + kUnitBytes - 1) / kUnitBytes * kUnitBytes;
  const int descriptor = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor < 0) return no_resource("memfd_create", bytes);
  std::byte* base = nullptr;
  const char* step = nullptr;
  if (ftruncate(descriptor, static_cast<off_t>(bytes)) != 0)
    step = "ftruncate";
  else if (fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0)
    step = "sealing";
  else if (fchmod(descriptor, 0400) != 0)
    step = "fchmod";
  else if ((base = map_aligned(descriptor, bytes)) == nullptr)
    step = "mmap";
  // What is mapped already stays writable. The kernel (5.1) refuses to punch holes from here on.
  else if (kind == Kind::sealed && fcntl(descriptor, F_ADD_SEALS, F_SEAL_FUTURE_WRITE) != 0)
    step = "sealing against writes";
  if (step != nullptr) {
    auto error = no_resource(step, bytes);
    if (base != nullptr) munmap(base, bytes);
    close(descriptor);
    return error;
  }
  // In a child of fork() a view must fault rather than show a slot that the parent has reused.
  madvise(base, bytes, MADV_DONTFORK);
  return std::unique_ptr<Arena>(new Arena(descriptor, base, bytes, kind));
}

Arena::~Arena() {
  munmap(base_, bytes_);
  close(descriptor_);
}

bool Arena::commit(std::uint64_t offset, std::uint64_t bytes) {
  KVP_CHECK(offset <= bytes_ && bytes <= bytes_ - offset);
  while (madvise(base_ + offset, bytes, MADV_POPULATE_WRITE) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    // Kernels before 5.14 do not know it: pages then come at the first touch.
    return errno == EINVAL;
  }
  return true;
}

bool Arena::commit_huge(std::uint64_t offset, std::uint64_t bytes) {
  KVP_CHECK(offset % kUnitBytes == 0 && bytes % kUnitBytes == 0);
  bool huge = true;
  for (std::uint64_t at = offset; at < offset + bytes; at += kUnitBytes) {
    // An empty range is refused, so one page of it is made first.
    if (!commit(at, kPageBytes)) return false;
    if (huge && madvise(base_ + at, kUnitBytes, MADV_COLLAPSE) == 0) continue;
    huge = false;
    commit(at, kUnitBytes);
  }
  return huge;
}

void Arena::punch(std::uint64_t offset, std::uint64_t bytes) {
  KVP_CHECK(offset <= bytes_ && bytes <= bytes_ - offset);
  KVP_CHECK(offset % kPageBytes == 0 && bytes % kPageBytes == 0);
  if (bytes == 0) return;
  if (is_sealed()) {
    std::memset(base_ + offset, 0, bytes);
    return;
  }
  while (fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                   static_cast<off_t>(offset), static_cast<off_t>(bytes)) != 0)
    KVP_CHECK(errno == EINTR);
}

Result<int> Arena::open_read_only() const {
  const std::string path = "/proc/self/fd/" + std::to_string(descriptor_);
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return no_resource("opening it read-only", bytes_);
  return descriptor;
}

std::uint64_t Arena::committed_bytes() const {
  struct stat facts{};
  if (fstat(descriptor_, &facts) != 0) return 0;
  return static_cast<std::uint64_t>(facts.st_blocks) * 512;
}

}  // namespace kvpool
