// The system calls by which the tier and LMDB 0.9 change files, in front of the C library's: they
// are defined in the executable, so liblmdb.so finds them too. Of files that are not followed they
// say nothing.
//
// LMDB writes single pages with pwrite, runs of pages with lseek and writev, and its commit record
// through a descriptor with O_DSYNC. posix_fallocate calls fallocate where nobody can see it.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/check.h"
#include "disk.h"

namespace {

using kvpool::test::Disk;

template <typename Function>
Function next_of(const char* name) {
  const auto found = reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
  KVP_CHECK(found != nullptr);
  return found;
}

std::uint64_t position(int fd) { return static_cast<std::uint64_t>(lseek(fd, 0, SEEK_CUR)); }

template <typename Next>
ssize_t write_heard(int fd, std::span<const iovec> from, std::uint64_t at, Next next) {
  Disk& disk = Disk::instance();
  Disk::Call call = disk.starts(fd);
  if (call.file == nullptr) return next();
  disk.heard_write(call, from, at);
  const ssize_t moved = next();
  const int error = errno;
  const bool is_flushed = (fcntl(fd, F_GETFL) & O_DSYNC) != 0 && disk.hears_flushes(call);
  call.file->write_ended(static_cast<std::size_t>(std::max<ssize_t>(moved, 0)), is_flushed);
  errno = error;
  return moved;
}

int flush_heard(int fd, int (*next)(int)) {
  Disk& disk = Disk::instance();
  if (disk.has_let_go()) return 0;
  Disk::Call call = disk.starts(fd);
  if (call.file == nullptr) return next(fd);
  if (disk.hears_flushes(call)) call.file->flush();
  return 0;
}

template <typename Next>
int length_heard(int fd, Next next) {
  Disk::Call call = Disk::instance().starts(fd);
  if (call.file == nullptr) return next();
  const int answer = next();
  const int error = errno;
  struct stat facts{};
  KVP_CHECK(fstat(fd, &facts) == 0);
  call.file->heard_length(static_cast<std::uint64_t>(facts.st_size));
  errno = error;
  return answer;
}

}  // namespace

#define IN_FRONT extern "C" __attribute__((visibility("default")))

IN_FRONT ssize_t pwrite(int fd, const void* from, size_t bytes, off_t at) {
  static const auto next = next_of<ssize_t (*)(int, const void*, size_t, off_t)>("pwrite");
  const iovec piece{const_cast<void*>(from), bytes};
  return write_heard(fd, {&piece, 1}, static_cast<std::uint64_t>(at),
                     [&] { return next(fd, from, bytes, at); });
}

IN_FRONT ssize_t pwrite64(int fd, const void* from, size_t bytes, off64_t at) {
  return pwrite(fd, from, bytes, at);
}

IN_FRONT ssize_t pwritev(int fd, const iovec* pieces, int count, off_t at) {
  static const auto next = next_of<ssize_t (*)(int, const iovec*, int, off_t)>("pwritev");
  return write_heard(fd, {pieces, static_cast<std::size_t>(count)}, static_cast<std::uint64_t>(at),
                     [&] { return next(fd, pieces, count, at); });
}

IN_FRONT ssize_t writev(int fd, const iovec* pieces, int count) {
  static const auto next = next_of<ssize_t (*)(int, const iovec*, int)>("writev");
  return write_heard(fd, {pieces, static_cast<std::size_t>(count)}, position(fd),
                     [&] { return next(fd, pieces, count); });
}

IN_FRONT ssize_t write(int fd, const void* from, size_t bytes) {
  static const auto next = next_of<ssize_t (*)(int, const void*, size_t)>("write");
  const iovec piece{const_cast<void*>(from), bytes};
  return write_heard(fd, {&piece, 1}, position(fd), [&] { return next(fd, from, bytes); });
}

IN_FRONT int fdatasync(int fd) {
  static const auto next = next_of<int (*)(int)>("fdatasync");
  return flush_heard(fd, next);
}

IN_FRONT int fsync(int fd) {
  static const auto next = next_of<int (*)(int)>("fsync");
  return flush_heard(fd, next);
}

// Without MDB_WRITEMAP LMDB maps its file read-only, so there is nothing in a map to be flushed; if
// that changed, the files would differ from what was heard.
IN_FRONT int msync(void* at, size_t bytes, int flags) {
  static const auto next = next_of<int (*)(void*, size_t, int)>("msync");
  return next(at, bytes, flags);
}

IN_FRONT int ftruncate(int fd, off_t bytes) noexcept {
  static const auto next = next_of<int (*)(int, off_t)>("ftruncate");
  return length_heard(fd, [&] { return next(fd, bytes); });
}

IN_FRONT int fallocate(int fd, int mode, off_t at, off_t bytes) {
  static const auto next = next_of<int (*)(int, int, off_t, off_t)>("fallocate");
  return length_heard(fd, [&] { return next(fd, mode, at, bytes); });
}

IN_FRONT int posix_fallocate(int fd, off_t at, off_t bytes) {
  static const auto next = next_of<int (*)(int, off_t, off_t)>("posix_fallocate");
  return length_heard(fd, [&] { return next(fd, at, bytes); });
}
