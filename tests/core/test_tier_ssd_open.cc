// Opening, formatting, refusing and resizing a tier's directory.
#include <sys/resource.h>

#include <csignal>
#include <filesystem>

#include "core_process.h"
#include "tier/index_store.h"
#include "tier/slab_file.h"
#include "tier/ssd.h"
#include "tier/ssd_parts.h"
#include "tier_ssd.h"

namespace kvpool {
namespace {

using test::files_in;
using test::first_group;
using test::group_of;
using test::kMega;
using test::open_tier;
using test::opened_tier;
using test::outcome_of;
using test::small_slot;
using test::TempDirectory;
using test::TierBlock;
namespace fs = std::filesystem;

Error error_of(const std::string& path, std::uint64_t capacity_bytes = 16 * kMega) {
  const auto ssd = open_tier(path, capacity_bytes);
  REQUIRE_FALSE(ssd);
  return ssd.error();
}

void check_refused(const std::string& path, const char* words) {
  const Error error = error_of(path);
  CAPTURE(error.message);
  CHECK(error.code == Code::refused);
  CHECK(error.message.find(words) != std::string::npos);
  CHECK(error.message.find(path) != std::string::npos);
}

std::uint64_t bytes_in(const std::string& path) {
  std::uint64_t bytes = 0;
  for (const auto& entry : fs::directory_iterator(path)) {
    const struct stat facts = test::stat_of(entry.path());
    bytes += std::max<std::uint64_t>(static_cast<std::uint64_t>(facts.st_size),
                                     static_cast<std::uint64_t>(facts.st_blocks) * 512);
  }
  return bytes;
}

TEST_CASE("ssd open: all files together take what was asked for, at once, and not more") {
  for (const std::uint64_t capacity : {SsdSplit::least(0), 16 * kMega, 37 * kMega + 12345}) {
    CAPTURE(capacity);
    const TempDirectory directory;
    const auto ssd = opened_tier(directory / "tier", capacity);
    const std::uint64_t bytes = bytes_in(directory / "tier");
    CHECK(bytes <= capacity);
    CHECK(bytes + kUnitBytes + kSsdBooksBytes + 4096 > capacity);
    const SsdFacts facts = ssd->facts();
    CHECK(facts.capacity_bytes == capacity);
    CHECK(facts.units > 0);
    CHECK(facts.entries_max > 0);
    CHECK(ssd->units_for(capacity) == facts.units);
    CHECK((test::stat_of(directory / "tier").st_mode & 0777) == 0700);
    CHECK((test::stat_of(directory / "tier/slabs").st_mode & 0777) == 0600);
    CHECK((test::stat_of(directory / "tier/lock").st_mode & 0777) == 0600);
    CHECK((test::stat_of(directory / "tier/index.mdb").st_mode & 0777) == 0600);
    CHECK_FALSE(fs::exists(directory / "tier/formatting"));
  }
}

TEST_CASE("ssd open: what cannot be a tier is the caller's mistake, and leaves nothing behind") {
  const TempDirectory directory;
  const std::uint64_t least = SsdSplit::least(0);
  const Error small = error_of(directory / "tier", least - 1);
  CHECK(small.code == Code::bad_argument);
  CHECK(small.message.find(std::to_string(least)) != std::string::npos);
  CHECK(error_of(directory / "tier", 0).code == Code::bad_argument);
  CHECK(error_of(directory / "tier", ~0ull).code == Code::bad_argument);
  CHECK(error_of(directory / "none/tier").code == Code::bad_argument);
  CHECK(error_of("").code == Code::bad_argument);
  CHECK(files_in(directory.path()) == 0);
}

TEST_CASE("ssd open: refuses a file, a foreign directory, a link, and leaves them as they were") {
  const TempDirectory directory;
  std::ofstream(directory / "file") << "text";
  check_refused(directory / "file", "not a directory");
  fs::create_directory(directory / "photos");
  std::ofstream(directory / "photos/one.jpg") << "text";
  check_refused(directory / "photos", "one.jpg");
  CHECK(files_in(directory / "photos") == 1);
  fs::create_directory(directory / "links");
  fs::create_symlink(directory / "file", directory / "links/slabs");
  check_refused(directory / "links", "not an ordinary file");
  fs::remove(directory / "links/slabs");
  fs::create_symlink(directory / "file", directory / "links/lock");
  check_refused(directory / "links", "symbolic link");
  CHECK(fs::file_size(directory / "file") == 4);
}

TEST_CASE("ssd open: the root of a filesystem, with its lost+found, counts as empty") {
  const TempDirectory directory;
  fs::create_directory(directory / "lost+found");
  CHECK(open_tier(directory.path()));
}

TEST_CASE("ssd open: half a tier is refused with what to do, and nothing of it is touched") {
  const TempDirectory directory;
  const std::string path = directory / "tier", other = directory / "other";
  opened_tier(path).reset();
  opened_tier(other).reset();
  const auto aside = [&](const char* name) { return directory / (std::string(name) + ".aside"); };
  fs::rename(path + "/index.mdb", aside("index.mdb"));
  check_refused(path, "no index.mdb");
  CHECK(fs::exists(path + "/slabs"));
  fs::rename(path + "/slabs", aside("slabs"));
  fs::rename(aside("index.mdb"), path + "/index.mdb");
  check_refused(path, "no slab file");
  fs::copy(other + "/slabs", path + "/slabs");
  check_refused(path, "different tiers");
  fs::rename(aside("slabs"), path + "/slabs");
  CHECK(open_tier(path));
}

TEST_CASE("ssd open: a slab file that is damaged, of another version, or cut is refused as such") {
  const TempDirectory directory;
  const std::string path = directory / "tier", slabs = path + "/slabs";
  opened_tier(path).reset();
  SlabHeader header;
  std::ifstream(slabs, std::ios::binary).read(reinterpret_cast<char*>(&header), sizeof header);
  const auto with = [&](std::size_t offset, const char* words) {
    // Flipped, not set: the identity is drawn, and one in 256 holds any given byte already.
    const std::uint8_t wrong = reinterpret_cast<const std::uint8_t*>(&header)[offset] ^ 8;
    test::overwrite(slabs, offset, &wrong, 1);
    check_refused(path, words);
    test::overwrite(slabs, 0, &header, sizeof header);
  };
  with(offsetof(SlabHeader, magic), "not one of kvpool");
  with(offsetof(SlabHeader, version), "version 9");
  with(offsetof(SlabHeader, tier_id), "checksum");
  const auto whole = fs::file_size(slabs);
  REQUIRE(truncate(slabs.c_str(), static_cast<off_t>(whole - 1)) == 0);
  check_refused(path, "the index was written for");
  REQUIRE(truncate(slabs.c_str(), static_cast<off_t>(whole)) == 0);
  CHECK(open_tier(path));
}

TEST_CASE("ssd open: an index that is damaged or none at all is refused") {
  const TempDirectory directory;
  const std::string path = directory / "tier", index = path + "/index.mdb";
  opened_tier(path).reset();
  const auto bytes = fs::file_size(index);
  fs::copy(index, directory / "index");
  const std::vector<char> junk(static_cast<std::size_t>(bytes), 'x');
  test::overwrite(index, 0, junk.data(), junk.size());
  check_refused(path, "index");
  REQUIRE(truncate(index.c_str(), 0) == 0);
  check_refused(path, "index");
  fs::copy(directory / "index", index, fs::copy_options::overwrite_existing);
  CHECK(open_tier(path));
}

TEST_CASE("ssd open: one open at a time, whoever asks, and a fork changes nothing") {
  const TempDirectory directory;
  auto ssd = opened_tier(directory.path());
  const std::string self = std::to_string(getpid());
  check_refused(directory.path(), "another process (this one, ");
  const auto ask = [&] {
    const auto second = open_tier(directory.path());
    return !second && second.error().code == Code::refused &&
           second.error().message.find("(" + self + ")") != std::string::npos;
  };
  CHECK(test::status_of_child([&] { return ask() ? 0 : 1; }) == 0);
  // A child that throws its copy away must not unlock the parent's tier, nor join its threads.
  CHECK(test::status_of_child([&] {
          ssd.reset();
          return ask() ? 0 : 1;
        }) == 0);
  check_refused(directory.path(), "has it open");
  ssd.reset();
  CHECK(open_tier(directory.path()));
}

TEST_CASE("ssd open: a lock that was left by a dead process is none") {
  const TempDirectory directory;
  CHECK(test::status_of_child([&] {
          const auto ssd = open_tier(directory.path());
          _exit(ssd ? 0 : 1);
          return 2;
        }) == 0);
  CHECK(open_tier(directory.path()));
}

TEST_CASE("ssd open: a format that was cut off is started over, at whatever point it was") {
  const TempDirectory directory;
  const std::string path = directory / "tier";
  fs::create_directory(path);
  const auto mark = [&] { std::ofstream(path + "/formatting") << ""; };
  mark();
  opened_tier(path).reset();
  mark();
  fs::remove(path + "/index.mdb");
  opened_tier(path).reset();
  mark();
  REQUIRE(truncate((path + "/slabs").c_str(), 100) == 0);
  opened_tier(path).reset();
  CHECK_FALSE(fs::exists(path + "/formatting"));
}

TEST_CASE("ssd open: where there is no room nothing is left behind, and the reason has numbers") {
  const TempDirectory directory;
  SsdOptions options;
  options.path = directory / "tier";
  options.capacity_bytes = 16 * kMega;
  options.free_floor_bytes = 1ull << 60;
  const auto floor = Ssd::open(options);
  REQUIRE_FALSE(floor);
  CHECK(floor.error().code == Code::no_resource);
  CHECK(floor.error().message.find(std::to_string(1ull << 60)) != std::string::npos);
  CHECK(files_in(directory.path()) == 0);
  CHECK(error_of(directory / "tier", 1ull << 50).code == Code::no_resource);
  CHECK(files_in(directory.path()) == 0);
  // The limit on a file's size stands for a filesystem that fills up meanwhile.
  fs::create_directory(directory / "there");
  const int status = test::status_of_child([&] {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{8 * kMega, 8 * kMega};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 1;
    for (const char* name : {"tier", "there"}) {
      const auto ssd = open_tier(directory / name);
      if (ssd || ssd.error().code != Code::no_resource) return 2;
    }
    return 0;
  });
  CHECK(status == 0);
  CHECK(files_in(directory.path()) == 1);
  CHECK(files_in(directory / "there") == 0);
}

// Descriptors run out at each step of a format in turn.
TEST_CASE("ssd open: a format that fails at any step leaves nothing behind") {
  // UBSan looks at a type it has not met through a pipe, which is no longer to be had below.
  const TempDirectory met;
  REQUIRE(open_tier(met / "tier"));
  const TempDirectory directory;
  int failed = 0;
  for (rlim_t more = 0; more < 32; ++more) {
    const int status = test::status_of_child([&] {
      const int lowest = dup(0);
      close(lowest);
      const rlimit limit{static_cast<rlim_t>(lowest) + more, static_cast<rlim_t>(lowest) + more};
      if (setrlimit(RLIMIT_NOFILE, &limit) != 0) return 1;
      const auto ssd = open_tier(directory / "tier");
      if (ssd) return 0;
      if (ssd.error().code != Code::no_resource) std::printf("%s\n", ssd.error().message.c_str());
      return ssd.error().code == Code::no_resource ? 2 : 3;
    });
    CAPTURE(more);
    if (status == 0) break;
    REQUIRE(status == 2);
    REQUIRE(files_in(directory.path()) == 0);
    ++failed;
  }
  CHECK(failed >= 4);  // directory, lock, listing or mark, slab file, index
  CHECK(files_in(directory.path()) == 1);
}

TEST_CASE("ssd open: works in a directory of memory") {
  if (!fs::is_directory("/dev/shm")) return;
  const TempDirectory directory("/dev/shm");
  const std::vector<TierBlock> blocks{TierBlock(1, small_slot(40))};
  {
    const auto ssd = opened_tier(directory.path());
    SsdGroup group = first_group();
    group.writes = {blocks[0].write()};
    REQUIRE(ssd->commit(group));
  }
  const auto ssd = opened_tier(directory.path());
  CHECK(outcome_of(*ssd, blocks[0]) == ReadOutcome::whole);
}

TEST_CASE("ssd resize: grows and shrinks, keeps blocks, and stays within what was asked for") {
  const TempDirectory directory;
  auto ssd = opened_tier(directory.path());
  const std::vector<TierBlock> blocks{TierBlock(1, small_slot(0)), TierBlock(2, small_slot(33))};
  SsdGroup group = first_group();
  REQUIRE(ssd->commit(group));
  group = group_of(blocks);
  REQUIRE(ssd->commit(group));
  for (const std::uint64_t capacity :
       {64 * kMega, 20 * kMega, 20 * kMega, 96 * kMega, 12 * kMega}) {
    CAPTURE(capacity);
    const std::uint64_t expected = ssd->units_for(capacity);
    const auto resized = ssd->resize(capacity);
    REQUIRE_MESSAGE(resized, resized.error().message);
    CHECK(ssd->facts().units == expected);
    CHECK(ssd->facts().capacity_bytes == capacity);
    CHECK(bytes_in(directory.path()) <= capacity);
    const TierBlock last(capacity,
                         SsdPlace{static_cast<std::uint32_t>(expected - 1), 31, 64 << 10});
    group = group_of({last});
    REQUIRE(ssd->commit(group));
    CHECK(outcome_of(*ssd, last) == ReadOutcome::whole);
    group = {};
    group.deletes = {{last.key, last.place}};
    REQUIRE(ssd->commit(group));
    ssd.reset();
    ssd = opened_tier(directory.path(), 0);
    CHECK(ssd->facts().units == expected);
    for (const TierBlock& block : blocks) CHECK(outcome_of(*ssd, block) == ReadOutcome::whole);
  }
  CHECK(ssd->resize(kMega).error().code == Code::bad_argument);
  CHECK(ssd->resize(1ull << 50).error().code == Code::no_resource);
  CHECK(ssd->facts().capacity_bytes == 12 * kMega);
  CHECK(bytes_in(directory.path()) <= 12 * kMega);
}

TEST_CASE("ssd resize: opening with more grows, opening with less does not touch the files") {
  const TempDirectory directory;
  opened_tier(directory.path(), 16 * kMega).reset();
  const std::uint64_t units = opened_tier(directory.path(), 32 * kMega)->facts().units;
  CHECK(bytes_in(directory.path()) > 28 * kMega);
  const auto ssd = opened_tier(directory.path(), 16 * kMega);
  CHECK(ssd->facts().units == units);
  CHECK(ssd->facts().capacity_bytes == 32 * kMega);
}

TEST_CASE("ssd resize: growth that finds no room leaves the tier as it was, and working") {
  const TempDirectory directory;
  opened_tier(directory.path()).reset();
  const int status = test::status_of_child([&] {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{20 * kMega, 20 * kMega};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 1;
    auto ssd = open_tier(directory.path());
    if (!ssd) return 2;
    const auto grown = (*ssd)->resize(64 * kMega);
    if (grown || grown.error().code != Code::no_resource) return 3;
    if ((*ssd)->facts().capacity_bytes != 16 * kMega || (*ssd)->is_read_only()) return 4;
    SsdGroup group = first_group();
    const TierBlock block(1, small_slot(0));
    group.writes = {block.write()};
    if (!(*ssd)->commit(group) || !group.writes[0].written) return 5;
    ssd->reset();
    const auto larger = open_tier(directory.path(), 64 * kMega);
    if (larger || larger.error().code != Code::no_resource) return 6;
    return 0;
  });
  CHECK(status == 0);
  CHECK(bytes_in(directory.path()) <= 16 * kMega);
  CHECK(opened_tier(directory.path())->facts().units > 0);
}

TEST_CASE("ssd resize: what a cut-off growth or shrink left of the slab file is cut at open") {
  const TempDirectory directory;
  opened_tier(directory.path()).reset();
  const std::string slabs = directory / "slabs";
  const auto bytes = fs::file_size(slabs);
  fs::resize_file(slabs, bytes + 5 * kMega);
  const auto ssd = opened_tier(directory.path());
  CHECK(fs::file_size(slabs) == bytes);
  CHECK(bytes_in(directory.path()) <= 16 * kMega);
}

}  // namespace
}  // namespace kvpool
