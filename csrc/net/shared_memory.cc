#include "net/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "memory/arena.h"

namespace kvpool {
namespace {

// On the boundary of a huge page, so that units of the arena that are one are mapped as one.
void* map_aligned(int file, std::uint64_t bytes, int protection) {
  void* room = mmap(nullptr, bytes + kUnitBytes, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return MAP_FAILED;
  const auto start = reinterpret_cast<std::uintptr_t>(room);
  const std::uintptr_t aligned = (start + kUnitBytes - 1) / kUnitBytes * kUnitBytes;
  const std::uintptr_t used = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  if (aligned > start) munmap(room, aligned - start);
  if (const std::uintptr_t end = start + bytes + kUnitBytes; end > aligned + used)
    munmap(reinterpret_cast<void*>(aligned + used), end - aligned - used);
  void* base = mmap(reinterpret_cast<void*>(aligned), bytes, protection,
                    MAP_SHARED | MAP_FIXED | MAP_NORESERVE, file, 0);
  if (base == MAP_FAILED) munmap(reinterpret_cast<void*>(aligned), used);
  return base;
}

}  // namespace

SharedMemory::~SharedMemory() {
  if (base_ != nullptr) munmap(base_, bytes_);
}

Result<SharedMemory> SharedMemory::create(const char* name, std::uint64_t bytes) {
  Descriptor file(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file.is_open()) return fail_for(errno, "memfd_create");
  // F_SEAL_SEAL: a client may not add seals of its own.
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  if (ftruncate(file.get(), static_cast<off_t>(bytes)) != 0 || fchmod(file.get(), 0600) != 0 ||
      fcntl(file.get(), F_ADD_SEALS, kSeals) != 0)
    return fail_for(errno, std::string("a memfd of ") + std::to_string(bytes) + " bytes");
  auto mapped = map(file, bytes, Access::write);
  if (mapped) mapped->file_ = std::move(file);
  return mapped;
}

Result<SharedMemory> SharedMemory::map(const Descriptor& file, std::uint64_t bytes, Access access) {
  struct stat facts{};
  if (fstat(file.get(), &facts) != 0) return fail_for(errno, "shared memory");
  if (bytes == 0 || static_cast<std::uint64_t>(facts.st_size) != bytes)
    return fail(Code::refused, "shared memory has " + std::to_string(facts.st_size) +
                                   " bytes, not " + std::to_string(bytes));
  const int seals = fcntl(file.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0)
    return fail(Code::refused, "shared memory is not sealed against shrinking");
  const int protection = access == Access::read ? PROT_READ : PROT_READ | PROT_WRITE;
  void* base = map_aligned(file.get(), bytes, protection);
  if (base == MAP_FAILED)
    return fail_for(errno, "mapping " + std::to_string(bytes) + " bytes of shared memory");
  madvise(base, bytes, MADV_DONTFORK);
  SharedMemory memory;
  memory.base_ = static_cast<std::byte*>(base);
  memory.bytes_ = bytes;
  return memory;
}

}  // namespace kvpool
