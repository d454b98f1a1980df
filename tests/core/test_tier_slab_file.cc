// The slab file by itself: whole transfers, room that is really taken, O_DIRECT that is given up.
#include <sys/resource.h>

#include <csignal>

#include "core_process.h"
#include "memory/arena.h"
#include "tier/slab_file.h"
#include "tier_files.h"

namespace kvpool {
namespace {

using test::Pages;
using test::TempDirectory;

constexpr std::uint8_t kId[16] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
constexpr std::uint64_t kMiB = 1 << 20;

struct Opened {
  explicit Opened(const std::string& path, FaultPoints* faults = nullptr, bool direct = true)
      : directory(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)),
        options{directory.get(), direct, faults} {
    REQUIRE(directory.is_open());
  }
  Result<std::unique_ptr<SlabFile>> create(std::uint64_t units) const {
    return SlabFile::create(options, kId, units);
  }
  Descriptor directory;
  SlabFile::Options options;
};

std::string refusal(const std::string& path) {
  const auto file = SlabFile::open(Opened(path).options);
  REQUIRE_FALSE(file);
  CHECK(file.error().code == Code::refused);
  return file.error().message;
}

bool says(const std::string& message, const char* words) {
  return message.find(words) != std::string::npos;
}

TEST_CASE("slab file: what is written is read, with O_DIRECT and without, and by the next open") {
  for (const bool direct : {true, false}) {
    CAPTURE(direct);
    const TempDirectory directory;
    const Opened opened(directory.path(), nullptr, direct);
    const Pages first(3 * kMiB, 1), second(kSlotAlignBytes, 2);
    {
      const auto file = std::move(*opened.create(4));
      CHECK(file->units() == 4);
      CHECK(file->direct() == file->why_not_direct().empty());
      REQUIRE(file->write_at(0, first.data(), first.size()) == 0);
      REQUIRE(file->write_at(8 * kMiB - second.size(), second.data(), second.size()) == 0);
      REQUIRE(file->sync() == 0);
    }
    const auto file = std::move(*SlabFile::open(opened.options));
    CHECK(file->units() == 4);
    CHECK(std::memcmp(file->header().tier_id, kId, 16) == 0);
    if (!direct) CHECK_FALSE(file->direct());
    Pages back(first.size()), end(second.size());
    REQUIRE(file->read_at(0, back.data(), back.size()) == 0);
    REQUIRE(file->read_at(8 * kMiB - end.size(), end.data(), end.size()) == 0);
    CHECK(back == first);
    CHECK(end == second);
  }
}

TEST_CASE("slab file: its room is taken when it is made, it is ours alone, and zero before data") {
  const TempDirectory directory;
  const auto file = std::move(*Opened(directory.path()).create(3));
  const struct stat facts = test::stat_of(directory / "slabs");
  CHECK(facts.st_size == static_cast<off_t>(kSsdDataOffset + 3 * kUnitBytes));
  CHECK(facts.st_blocks * 512 >= facts.st_size);
  CHECK((facts.st_mode & 0777) == 0600);
  Pages header(kSsdDataOffset);
  std::ifstream in(directory / "slabs", std::ios::binary);
  in.read(reinterpret_cast<char*>(header.data()), static_cast<std::streamsize>(header.size()));
  REQUIRE(in.good());
  for (std::size_t at = sizeof(SlabHeader); at < header.size(); ++at)
    REQUIRE(header.data()[at] == std::byte{0});
}

TEST_CASE("slab file: a read past the end says so, and so does one of a file that was cut") {
  const TempDirectory directory;
  const auto file = std::move(*Opened(directory.path()).create(1));
  Pages pages(2 * kSlotAlignBytes, 3);
  CHECK(file->read_at(kUnitBytes - kSlotAlignBytes, pages.data(), pages.size()) == ENODATA);
  CHECK(file->read_at(kUnitBytes, pages.data(), kSlotAlignBytes) == ENODATA);
  REQUIRE(truncate((directory / "slabs").c_str(), kSsdDataOffset + kSlotAlignBytes) == 0);
  CHECK(file->read_at(0, pages.data(), kSlotAlignBytes) == 0);
  CHECK(file->read_at(0, pages.data(), pages.size()) == ENODATA);
}

TEST_CASE("slab file: transfers go on after interruptions and partial results, and stop at none") {
  std::vector<ssize_t> steps{3, -EINTR, 1, -EINTR, 6};
  std::size_t at = 0;
  const auto step = [&](std::size_t done) -> ssize_t {
    const ssize_t now = steps[at++];
    CHECK(done == (at <= 1 ? 0u : at <= 3 ? 3u : 4u));
    if (now < 0) errno = static_cast<int>(-now);
    return now < 0 ? -1 : now;
  };
  CHECK(transfer_whole(10, step) == 0);
  CHECK(at == 5);
  steps = {4, 0};
  at = 0;
  CHECK(transfer_whole(10, [&](std::size_t) { return steps[at++]; }) == EIO);
  steps = {4, -1};
  at = 0;
  CHECK(transfer_whole(10, [&](std::size_t) {
          errno = ENOSPC;
          return steps[at++];
        }) == ENOSPC);
}

TEST_CASE("slab file: grows and shrinks, keeps what lies below, and never shows a hole") {
  const TempDirectory directory;
  const auto file = std::move(*Opened(directory.path()).create(2));
  const Pages kept(kUnitBytes, 4);
  REQUIRE(file->write_at(0, kept.data(), kept.size()) == 0);
  for (const std::uint64_t units : {8, 5, 5, 6, 1}) {
    CAPTURE(units);
    REQUIRE(file->resize(units));
    CHECK(file->units() == units);
    const struct stat facts = test::stat_of(directory / "slabs");
    CHECK(facts.st_size == static_cast<off_t>(kSsdDataOffset + units * kUnitBytes));
    CHECK(facts.st_blocks * 512 >= facts.st_size);
    Pages back(kUnitBytes);
    REQUIRE(file->read_at(0, back.data(), back.size()) == 0);
    CHECK(back == kept);
  }
}

TEST_CASE("slab file: one that a copy left with holes, or too long, is made whole at open") {
  const TempDirectory directory;
  const Opened opened(directory.path());
  const Pages kept(kUnitBytes, 5);
  {
    const auto file = std::move(*opened.create(4));
    REQUIRE(file->write_at(kUnitBytes, kept.data(), kept.size()) == 0);
  }
  const std::string path = directory / "slabs";
  REQUIRE(truncate(path.c_str(), kSsdDataOffset + 2 * kUnitBytes) == 0);
  REQUIRE(truncate(path.c_str(), kSsdDataOffset + 9 * kUnitBytes) == 0);  // a hole of 7 units
  REQUIRE(test::stat_of(path).st_blocks * 512 < test::stat_of(path).st_size);
  const auto file = std::move(*SlabFile::open(opened.options));
  REQUIRE(file->restore(4));
  const struct stat facts = test::stat_of(path);
  CHECK(facts.st_size == static_cast<off_t>(kSsdDataOffset + 4 * kUnitBytes));
  CHECK(facts.st_blocks * 512 >= facts.st_size);
  Pages back(kUnitBytes);
  REQUIRE(file->read_at(kUnitBytes, back.data(), back.size()) == 0);
  CHECK(back == kept);
  const auto longer = file->restore(5);
  REQUIRE_FALSE(longer);
  CHECK(longer.error().code == Code::refused);
}

TEST_CASE("slab file: no room is told as such") {
  const TempDirectory directory;
  const int status = test::status_of_child([&] {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{4 * kMiB, 4 * kMiB};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 1;
    const Descriptor at(open(directory.path().c_str(), O_RDONLY | O_DIRECTORY));
    const auto file = SlabFile::create({at.get(), true, nullptr}, kId, 4);
    if (file || file.error().code != Code::no_resource) return 2;
    unlinkat(at.get(), "slabs", 0);
    const auto small = SlabFile::create({at.get(), true, nullptr}, kId, 1);
    if (!small) return 3;
    const auto grown = (*small)->resize(4);
    if (grown || grown.error().code != Code::no_resource) return 4;
    Pages pages(kSlotAlignBytes, 6);
    if ((*small)->write_at(0, pages.data(), pages.size()) != 0) return 5;
    return (*small)->units() == 1 ? 0 : 6;
  });
  CHECK(status == 0);
  CHECK(test::stat_of(directory / "slabs").st_size ==
        static_cast<off_t>(kSsdDataOffset + kUnitBytes));
}

TEST_CASE("slab file: refuses what is no slab file, each by its own reason") {
  const TempDirectory directory;
  const std::string path = directory / "slabs";
  CHECK(says(refusal(directory.path()), "cannot be opened"));
  REQUIRE(Opened(directory.path()).create(1));
  SlabHeader header = (*SlabFile::open(Opened(directory.path()).options))->header();
  const auto spoil = [&](std::size_t offset) {
    // Flipped, not set: the identity and the checksum hold any given byte once in 256 runs.
    const std::uint8_t wrong = reinterpret_cast<const std::uint8_t*>(&header)[offset] ^ 0xef;
    test::overwrite(path, 0, &header, sizeof header);
    test::overwrite(path, offset, &wrong, 1);
    return refusal(directory.path());
  };
  CHECK(says(spoil(offsetof(SlabHeader, magic)), "not one of kvpool"));
  CHECK(says(spoil(offsetof(SlabHeader, version)), "version 238"));
  CHECK(says(spoil(offsetof(SlabHeader, tier_id) + 3), "checksum of its header"));
  CHECK(says(spoil(offsetof(SlabHeader, sum)), "checksum of its header"));
  test::overwrite(path, 0, &header, sizeof header);
  REQUIRE(SlabFile::open(Opened(directory.path()).options));
  REQUIRE(truncate(path.c_str(), 40) == 0);
  CHECK(says(refusal(directory.path()), "cut off"));
  std::filesystem::rename(path, directory / "elsewhere");
  std::filesystem::create_symlink(directory / "elsewhere", path);
  CHECK(says(refusal(directory.path()), "symbolic link"));
  REQUIRE_FALSE(Opened(directory.path()).create(1));
  CHECK(test::stat_of(directory / "elsewhere").st_size == 40);
}

TEST_CASE("slab file: O_DIRECT refused in the trial or later is given up, and the work is done") {
  const TempDirectory directory;
  FaultPoints faults;
  const Opened opened(directory.path(), &faults);
  const Pages pages(2 * kMiB, 7);
  Pages back(pages.size());
  auto file = std::move(*opened.create(2));
  if (!file->direct()) {
    MESSAGE("this filesystem has no O_DIRECT: " << file->why_not_direct());
    return;
  }
  faults.fail("ssd.direct", 1, 1);
  REQUIRE(file->write_at(0, pages.data(), kMiB) == 0);
  CHECK(file->direct());
  REQUIRE(file->write_at(kMiB, pages.data() + kMiB, kMiB) == 0);
  CHECK(faults.hits("ssd.direct") == 1);
  CHECK_FALSE(file->direct());
  CHECK(file->direct_refusals() == 1);
  REQUIRE(file->sync() == 0);
  REQUIRE(file->read_at(0, back.data(), back.size()) == 0);
  CHECK(back == pages);

  file = std::move(*SlabFile::open(opened.options));
  REQUIRE(file->direct());
  faults.fail("ssd.direct", 1, 0);
  REQUIRE(file->read_at(0, back.data(), back.size()) == 0);
  CHECK(back == pages);
  CHECK(file->direct_refusals() == 1);

  faults.fail("ssd.direct", 1, 0);
  file = std::move(*SlabFile::open(opened.options));
  CHECK_FALSE(file->direct());
  CHECK(file->direct_refusals() == 0);
  CHECK(says(file->why_not_direct(), "trial"));
  REQUIRE(file->read_at(0, back.data(), back.size()) == 0);
  CHECK(back == pages);
}

TEST_CASE("slab file: each fault point fails its step once, and leaves what it says") {
  const TempDirectory directory;
  FaultPoints faults;
  const auto file = std::move(*Opened(directory.path(), &faults).create(1));
  const Pages pages(4 * kSlotAlignBytes, 8), other(4 * kSlotAlignBytes, 9);
  Pages back(pages.size());
  REQUIRE(file->write_at(0, pages.data(), pages.size()) == 0);
  faults.fail("ssd.write", 1, 0);
  CHECK(file->write_at(0, other.data(), other.size()) == EIO);
  REQUIRE(file->read_at(0, back.data(), back.size()) == 0);
  CHECK(back == pages);
  faults.fail("ssd.write.short", 1, 0);
  CHECK(file->write_at(0, other.data(), other.size()) == EIO);
  REQUIRE(file->read_at(0, back.data(), back.size()) == 0);
  CHECK(std::memcmp(back.data(), other.data(), back.size() / 2) == 0);
  CHECK(std::memcmp(back.data() + back.size() / 2, pages.data() + back.size() / 2,
                    back.size() / 2) == 0);
  REQUIRE(file->write_at(0, pages.data(), pages.size()) == 0);
  for (const char* point : {"ssd.read", "ssd.read.short"}) {
    faults.fail(point, 1, 0);
    CHECK(file->read_at(0, back.data(), back.size()) == EIO);
  }
  faults.fail("ssd.read.flip", 1, 0);
  REQUIRE(file->read_at(0, back.data(), back.size()) == 0);
  CHECK_FALSE(back == pages);
  REQUIRE(file->read_at(0, back.data(), back.size()) == 0);
  CHECK(back == pages);
  faults.fail("ssd.sync", 1, 0);
  CHECK(file->sync() == EIO);
  CHECK(file->sync() == 0);
  for (const char* point :
       {"ssd.write", "ssd.write.short", "ssd.read", "ssd.read.short", "ssd.read.flip", "ssd.sync"})
    CHECK(faults.hits(point) == 1);
}

TEST_CASE("slab file: works in a directory of memory") {
  if (!std::filesystem::is_directory("/dev/shm")) return;
  const TempDirectory directory("/dev/shm");
  const auto file = std::move(*Opened(directory.path()).create(2));
  const Pages pages(kMiB, 10);
  Pages back(kMiB);
  REQUIRE(file->write_at(kMiB, pages.data(), kMiB) == 0);
  REQUIRE(file->sync() == 0);
  REQUIRE(file->read_at(kMiB, back.data(), kMiB) == 0);
  CHECK(back == pages);
}

}  // namespace
}  // namespace kvpool
