// An arena's addresses never move, its pages come and go by the kernel's own count, and nobody who
// is handed its descriptor can write to it or resize it.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>

#include "block_random.h"
#include "core_build.h"
#include "core_process.h"
#include "memory/arena.h"

namespace kvpool {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;

std::unique_ptr<Arena> arena_of(std::uint64_t bytes) {
  auto arena = Arena::create("kvpool-test", bytes);
  REQUIRE(arena.has_value());
  return std::move(*arena);
}

bool is_zero(const std::byte* at, std::uint64_t bytes) {
  return *at == std::byte{0} && std::memcmp(at, at + 1, bytes - 1) == 0;
}

// Resident bytes of the mapping that starts at `base`, from smaps.
std::uint64_t resident_bytes(const std::byte* base) {
  std::ifstream smaps("/proc/self/smaps");
  const auto wanted = reinterpret_cast<std::uintptr_t>(base);
  bool inside = false;
  for (std::string line; std::getline(smaps, line);) {
    unsigned long long start = 0, end = 0, kib = 0;
    if (std::sscanf(line.c_str(), "%llx-%llx ", &start, &end) == 2)
      inside = start == wanted;
    else if (inside && std::sscanf(line.c_str(), "Rss: %llu kB", &kib) == 1)
      return kib * 1024;
  }
  return ~0ull;
}

std::string path_of(int descriptor) { return "/proc/self/fd/" + std::to_string(descriptor); }

TEST_CASE("arena: base stays, pages come and go by the kernel's count") {
  test::Random random("arena");
  const auto arena = arena_of(64 * kMiB);
  std::byte* const base = arena->base();
  CHECK(reinterpret_cast<std::uintptr_t>(base) % kUnitBytes == 0);
  CHECK(arena->bytes() == 64 * kMiB);
  CHECK(arena->committed_bytes() == 0);
  std::vector<bool> backed(32, false);
  for (int round = 0; round < 200; ++round) {
    const auto unit = random.between<std::size_t>(0, 31);
    const auto offset = unit * kUnitBytes;
    if (backed[unit]) {
      REQUIRE(base[offset + 12345] == std::byte{7});
      arena->punch(offset, kUnitBytes);
      REQUIRE(base[offset + 12345] == std::byte{0});  // reading a hole brings one page back
      arena->punch(offset, kUnitBytes);
    } else {
      REQUIRE(arena->commit(offset, kUnitBytes));
      REQUIRE(is_zero(base + offset, kUnitBytes));
      base[offset + 12345] = std::byte{7};
    }
    backed[unit] = !backed[unit];
    const auto units = static_cast<std::uint64_t>(std::count(backed.begin(), backed.end(), true));
    REQUIRE(arena->committed_bytes() == units * kUnitBytes);
    REQUIRE(arena->base() == base);
    if (round % 50 == 49) REQUIRE(resident_bytes(base) == units * kUnitBytes);
  }
}

TEST_CASE("arena: sizes are whole units, from one unit to more than the machine has") {
  for (const std::uint64_t bytes :
       {std::uint64_t{1}, kUnitBytes - 1, kUnitBytes, kUnitBytes + 1, std::uint64_t{1} << 36}) {
    const auto arena = arena_of(bytes);
    CHECK(arena->bytes() == (bytes + kUnitBytes - 1) / kUnitBytes * kUnitBytes);
    CHECK(arena->committed_bytes() == 0);
    arena->base()[arena->bytes() - 1] = std::byte{1};
    CHECK(arena->committed_bytes() == kPageBytes);
  }
}

TEST_CASE("arena: impossible sizes are an error, not a crash") {
  for (const std::uint64_t bytes : {0ull, 1ull << 47, 1ull << 60, ~0ull - (4ull << 20), ~0ull}) {
    CAPTURE(bytes);
    const auto arena = Arena::create("kvpool-test", bytes);
    REQUIRE_FALSE(arena.has_value());
    CHECK(arena.error().code == Code::no_resource);
    CHECK_FALSE(arena.error().message.empty());
  }
}

TEST_CASE("arena: a refusal of addresses is an error, and leaks no descriptor") {
  const int status = test::status_of_child([] {
    long pages = 0;
    std::FILE* const statm = std::fopen("/proc/self/statm", "r");
    if (statm == nullptr || std::fscanf(statm, "%ld", &pages) != 1) return 2;
    std::fclose(statm);
    const auto used = static_cast<rlim_t>(pages) * kPageBytes;
    const rlimit limit{used + 256 * kMiB, used + 256 * kMiB};
    if (setrlimit(RLIMIT_AS, &limit) != 0) return 3;
    const int lowest_free = dup(0);
    close(lowest_free);
    for (int i = 0; i < 3; ++i) {
      const auto refused = Arena::create("kvpool-test", 1024 * kMiB);
      if (refused || refused.error().code != Code::no_resource) return 4;
    }
    if (dup(0) != lowest_free) return 5;
    return Arena::create("kvpool-test", 8 * kMiB) ? 0 : 6;
  });
  CHECK(status == 0);
}

TEST_CASE("arena: sealed against growing and shrinking") {
  const auto arena = arena_of(8 * kMiB);
  for (const off_t bytes : {0, 4096, 16 << 20}) {
    CHECK(ftruncate(arena->descriptor(), bytes) == -1);
    CHECK(errno == EPERM);
  }
  const int seals = fcntl(arena->descriptor(), F_GET_SEALS);
  CHECK((seals & (F_SEAL_SHRINK | F_SEAL_GROW)) == (F_SEAL_SHRINK | F_SEAL_GROW));
}

TEST_CASE("arena: reopened it maps for reading only") {
  const auto arena = arena_of(4 * kMiB);
  arena->base()[5] = std::byte{42};
  struct stat facts{};
  REQUIRE(fstat(arena->descriptor(), &facts) == 0);
  CHECK((facts.st_mode & 0777) == 0400);
  const int reader = open(path_of(arena->descriptor()).c_str(), O_RDONLY | O_CLOEXEC);
  REQUIRE(reader >= 0);
  void* const seen = mmap(nullptr, 4 * kMiB, PROT_READ, MAP_SHARED, reader, 0);
  REQUIRE(seen != MAP_FAILED);
  CHECK(static_cast<std::byte*>(seen)[5] == std::byte{42});
  CHECK(mprotect(seen, 4 * kMiB, PROT_READ | PROT_WRITE) == -1);
  CHECK(errno == EACCES);
  CHECK(mmap(nullptr, 4 * kMiB, PROT_WRITE, MAP_SHARED, reader, 0) == MAP_FAILED);
  CHECK(errno == EACCES);
  const std::byte byte{9};
  CHECK(write(reader, &byte, 1) == -1);
  CHECK(fcntl(reader, F_ADD_SEALS, F_SEAL_WRITE) == -1);
  munmap(seen, 4 * kMiB);
  close(reader);
}

TEST_CASE("arena: another user with a reader's descriptor can read, and not reopen it") {
  if (geteuid() != 0) {
    MESSAGE("not tried: only root can become another user");
    CHECK(geteuid() != 0);
    return;
  }
  const auto arena = arena_of(4 * kMiB);
  arena->base()[5] = std::byte{42};
  const int reader = open(path_of(arena->descriptor()).c_str(), O_RDONLY);
  REQUIRE(reader >= 0);
  const int status = test::status_of_child([&] {
    constexpr uid_t kNobody = 65534;
    close(arena->descriptor());
    // Still able to look into /proc/self, so that a refusal is that of the file.
    if (setuid(kNobody) != 0 || prctl(PR_SET_DUMPABLE, 1) != 0) return 2;
    const void* seen = mmap(nullptr, 4 * kMiB, PROT_READ, MAP_SHARED, reader, 0);
    if (seen == MAP_FAILED || static_cast<const std::byte*>(seen)[5] != std::byte{42}) return 3;
    if (mmap(nullptr, 4 * kMiB, PROT_WRITE, MAP_SHARED, reader, 0) != MAP_FAILED) return 4;
    const int null = open("/dev/null", O_RDWR);
    if (open(path_of(null).c_str(), O_RDWR) < 0) return 5;  // reopening as such works
    for (const int mode : {O_RDWR, O_WRONLY, O_RDONLY})
      if (open(path_of(reader).c_str(), mode) >= 0 || errno != EACCES) return 6;
    return fchmod(reader, 0666) == -1 && errno == EPERM ? 0 : 7;
  });
  close(reader);
  CHECK(status == 0);
}

TEST_CASE("arena: gone in a forked child, so that no stale view is read there") {
  const auto arena = arena_of(4 * kMiB);
  arena->base()[0] = std::byte{1};
  CHECK(msync(arena->base(), kPageBytes, MS_ASYNC) == 0);
  if (test::kUnderTsan) {
    MESSAGE("not tried: ThreadSanitizer keeps every mapping in forked children");
    return;
  }
  const int status = test::status_of_child(
      [&] { return msync(arena->base(), kPageBytes, MS_ASYNC) == -1 && errno == ENOMEM ? 0 : 1; });
  CHECK(status == 0);
}

TEST_CASE("arena: nothing stays behind it") {
  std::byte* base = nullptr;
  int descriptor = -1;
  {
    const auto arena = arena_of(4 * kMiB);
    base = arena->base();
    descriptor = arena->descriptor();
    REQUIRE(arena->commit(0, 4 * kMiB));
  }
  CHECK(fcntl(descriptor, F_GETFD) == -1);
  CHECK(msync(base, kPageBytes, MS_ASYNC) == -1);
}

void commit_huge_leaves_whole_pages(Arena& arena) {
  const bool huge = arena.commit_huge(2 * kUnitBytes, 3 * kUnitBytes);
  MESSAGE("made as huge pages: " << huge);
  REQUIRE(arena.committed_bytes() == 3 * kUnitBytes);
  REQUIRE(is_zero(arena.base() + 2 * kUnitBytes, 3 * kUnitBytes));
  std::memset(arena.base() + 2 * kUnitBytes, 1, 3 * kUnitBytes);
  REQUIRE(arena.committed_bytes() == 3 * kUnitBytes);
  arena.punch(3 * kUnitBytes, kUnitBytes);  // a huge page is given back whole
  REQUIRE(arena.committed_bytes() == 2 * kUnitBytes);
  REQUIRE(is_zero(arena.base() + 3 * kUnitBytes, kUnitBytes));
  REQUIRE(arena.base()[4 * kUnitBytes] == std::byte{1});
}

TEST_CASE("arena: huge pages where the machine has them, the same bytes where it has not") {
  const auto arena = arena_of(64 * kMiB);
  commit_huge_leaves_whole_pages(*arena);
}

TEST_CASE("arena: refused huge pages become ordinary ones") {
  const int status = test::status_of_child([] {
    if (prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) != 0) return 2;
    auto arena = Arena::create("kvpool-test", 64 * kMiB);
    if (!arena) return 3;
    if ((*arena)->commit_huge(0, 3 * kUnitBytes)) return 4;
    if ((*arena)->committed_bytes() != 3 * kUnitBytes) return 5;
    return is_zero((*arena)->base(), 3 * kUnitBytes) ? 0 : 6;
  });
  CHECK(status == 0);
}

TEST_CASE("arena: pages that the machine refuses are reported, and come when it can") {
  const auto arena = arena_of(8 * kMiB);
  // A file that ends before the page is refused in the same place as memory that is not there.
  const int empty = memfd_create("kvpool-empty", MFD_CLOEXEC);
  REQUIRE(empty >= 0);
  constexpr int kAccess = PROT_READ | PROT_WRITE, kHow = MAP_SHARED | MAP_FIXED;
  REQUIRE(mmap(arena->base(), 8 * kMiB, kAccess, kHow, empty, 0) == arena->base());
  CHECK_FALSE(arena->commit(0, kUnitBytes));
  CHECK_FALSE(arena->commit_huge(0, kUnitBytes));
  CHECK(arena->committed_bytes() == 0);
  REQUIRE(mmap(arena->base(), 8 * kMiB, kAccess, kHow, arena->descriptor(), 0) == arena->base());
  CHECK(arena->commit(0, kUnitBytes));
  CHECK(arena->committed_bytes() == kUnitBytes);
  close(empty);
}

}  // namespace
}  // namespace kvpool
