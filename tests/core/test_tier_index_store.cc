// The index of the SSD tier: a group is in it whole or not at all, it gives back what was put, and
// it never runs out of pages below its stated number of entries.
#include "tier/index_store.h"

#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <csignal>
#include <fstream>

#include "core_build.h"
#include "core_process.h"
#include "tier_index.h"

namespace kvpool {
namespace {

using test::ScratchDir;
constexpr std::uint64_t kMiB = 1 << 20;

std::unique_ptr<IndexStore> created(const std::string& path, std::uint64_t bytes = 4 * kMiB) {
  auto store = IndexStore::create(path, test::meta_of(bytes), false);
  REQUIRE_MESSAGE(store, store.error().message);
  return std::move(*store);
}
std::unique_ptr<IndexStore> opened(const std::string& path,
                                   IndexStore::Access access = IndexStore::Access::write) {
  auto store = IndexStore::open(path, false, access);
  REQUIRE_MESSAGE(store, store.error().message);
  return std::move(*store);
}
std::string refusal(const std::string& path) {
  const auto store = IndexStore::open(path, false, IndexStore::Access::write);
  REQUIRE(!store);
  CHECK(store.error().code == Code::refused);
  return store.error().message;
}
bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// What the index says, in a map that knows nothing of it.
using Entries = std::map<std::string, BlockEntry>;
Entries entries_of(const IndexStore& store) {
  Entries entries;
  const auto read =
      store.for_each_entry([&](const BlockKey& key, const BlockEntry& entry, bool ok) {
        CHECK(ok);
        entries[test::bytes_of(key)] = entry;
      });
  REQUIRE(read);
  CHECK(entries.size() == store.entries());
  return entries;
}

TEST_CASE("ssd index: a group is there after a reopen, as it was given") {
  const ScratchDir dir;
  test::Random random("ssd index: a group is there");
  SsdGroup group;
  group.new_spaces = {{7, test::random_hash(random), 65536}, {9, test::random_hash(random), 4096}};
  group.new_classes = {{65536, 16}, {4096, 1}};
  for (std::uint32_t i = 0; i < 100; ++i)
    group.writes.push_back(test::random_write(random, 7 + i % 2 * 2, i));
  group.writes[13].written = false;
  group.tau_s = 42;
  {
    const auto store = created(dir / "index.mdb");
    CHECK(std::filesystem::file_size(dir / "index.mdb") == 4 * kMiB);
    struct stat status;
    REQUIRE(stat((dir / "index.mdb").c_str(), &status) == 0);
    CHECK(static_cast<std::uint64_t>(status.st_blocks) * 512 >= 4 * kMiB);
    REQUIRE(store->apply(group, {}));
    CHECK(store->written_bytes() >= 4 * 4096);
    CHECK(store->written_bytes() <= store->used_bytes() + 8 * 4096);
  }
  for (const auto access : {IndexStore::Access::read_only, IndexStore::Access::write}) {
    const auto store = opened(dir / "index.mdb", access);
    CHECK(store->meta().groups == 1);
    CHECK(store->meta().next_space == 10);
    CHECK(store->meta().tau_s == 42);
    CHECK(store->spaces().size() == 2);
    CHECK(store->spaces()[0].number == 7);
    CHECK(store->spaces()[1].id == group.new_spaces[1].id);
    CHECK(store->spaces()[1].block_bytes == 4096);
    CHECK(store->classes().size() == 2);
    Entries entries = entries_of(*store);
    CHECK(entries.size() == 99);
    for (const SsdWrite& write : group.writes) {
      const auto found = entries.find(test::bytes_of(write.key));
      REQUIRE((found != entries.end()) == write.written);
      if (!write.written) continue;
      CHECK(SsdPlace{found->second.slab_unit, found->second.slot, found->second.bytes} ==
            write.place);
      CHECK(found->second.sum == write.sum);
      CHECK(found->second.parent == write.parent);
      CHECK(found->second.heat == write.heat);
      CHECK(found->second.stamp_s == write.stamp_s);
      CHECK(found->second.generation == 1);
    }
  }
}

TEST_CASE("ssd index: deletes and stamps touch only an entry that names their place") {
  const ScratchDir dir;
  test::Random random("ssd index: deletes and stamps");
  const auto store = created(dir / "index.mdb");
  SsdGroup first;
  for (std::uint32_t i = 0; i < 6; ++i) first.writes.push_back(test::random_write(random, 1, i));
  REQUIRE(store->apply(first, {}));
  const auto key = [&](int i) { return first.writes[static_cast<std::size_t>(i)].key; };
  const auto place = [&](int i) { return first.writes[static_cast<std::size_t>(i)].place; };
  SsdGroup second;
  second.new_spaces = {{3, test::random_hash(random), 1}};
  second.deletes = {{key(0), place(0)}, {key(1), place(0)}, {BlockKey::of(1, {1, 1}), place(2)}};
  second.stamps = {
      {key(2), place(2), 99, 77}, {key(3), place(2), 99, 77}, {key(0), place(0), 9, 9}};
  second.writes = {test::random_write(random, 1, 17)};
  second.writes[0].key = key(4);  // the same key moves
  REQUIRE(store->apply(second, {key(5)}));
  Entries entries = entries_of(*store);
  CHECK(entries.size() == 4);
  CHECK(entries.contains(test::bytes_of(key(1))));
  CHECK(entries[test::bytes_of(key(2))].heat == 99);
  CHECK(entries[test::bytes_of(key(2))].stamp_s == 77);
  CHECK(entries[test::bytes_of(key(3))].heat == first.writes[3].heat);
  CHECK(entries[test::bytes_of(key(4))].generation == 2);
  SsdGroup third;
  third.dropped_spaces = {3, 4};
  REQUIRE(store->apply(third, {}));
  CHECK(store->spaces().empty());
  CHECK(store->meta().next_space == 4);
  CHECK(store->meta().tau_s == 600);
}

TEST_CASE("ssd index: growing keeps everything and is there after a reopen") {
  const ScratchDir dir;
  test::Random random("ssd index: growing");
  {
    const auto store = created(dir / "index.mdb");
    SsdGroup group;
    for (std::uint32_t i = 0; i < 50; ++i) group.writes.push_back(test::random_write(random, 1, i));
    REQUIRE(store->apply(group, {}));
    REQUIRE(store->grow(16 * kMiB, 99 * kMiB, 1 << 19));
    CHECK(store->entries() == 50);
    REQUIRE(store->grow(8 * kMiB, 77 * kMiB, 1 << 18));  // a file is never made smaller
    group.writes = {test::random_write(random, 1, 51)};
    REQUIRE(store->apply(group, {}));
  }
  CHECK(std::filesystem::file_size(dir / "index.mdb") == 16 * kMiB);
  const auto store = opened(dir / "index.mdb");
  CHECK(entries_of(*store).size() == 51);
  CHECK(store->meta().index_bytes == 16 * kMiB);
  CHECK(store->meta().capacity_bytes == 77 * kMiB);
  CHECK(store->meta().units == 1 << 18);
}

TEST_CASE("ssd index: what is not one is refused, and says what to do") {
  const ScratchDir dir;
  const std::string path = dir / "index.mdb";
  CHECK(has(refusal(path), "No such file"));
  created(path).reset();
  const auto again = IndexStore::create(path, test::meta_of(4 * kMiB), false);
  REQUIRE(!again);
  CHECK(again.error().code != Code::bad_argument);
  CHECK(IndexStore::create(dir / "small", test::meta_of(4096), false).error().code ==
        Code::bad_argument);
  std::filesystem::resize_file(path, 4 * kMiB - 4096);
  CHECK(has(refusal(path), "cut short"));
  CHECK(has(refusal(path), "starts an empty tier"));
}

TEST_CASE("ssd index: the disk's refusal to write ends commits for good, in one place") {
  const ScratchDir dir;
  const auto status = test::status_of_child([&] {
    test::Random random("ssd index: the disk's refusal");
    auto store = IndexStore::create(dir / "index.mdb", test::meta_of(4 * kMiB), false);
    if (!store) return 10;
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{4096 * 6, RLIM_INFINITY};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 11;
    SsdGroup group;
    for (std::uint32_t i = 0; i < 900; ++i)
      group.writes.push_back(test::random_write(random, 1, i));
    if ((*store)->apply(group, {})) return 12;
    if (!(*store)->is_broken()) return 13;
    const rlimit none{RLIM_INFINITY, RLIM_INFINITY};
    if (setrlimit(RLIMIT_FSIZE, &none) != 0) return 14;
    group.writes.resize(1);
    return (*store)->apply(group, {}) ? 15 : 0;
  });
  CHECK(status == 0);
  const auto store = opened(dir / "index.mdb");
  CHECK(store->entries() == 0);
}

TEST_CASE("ssd index: sizes follow the capacity") {
  for (const std::uint64_t mib : {1, 8, 31, 32, 255, 256, 1024, 1 << 20}) {
    const std::uint64_t bytes = IndexStore::bytes_for(mib * kMiB);
    CHECK(bytes % 4096 == 0);
    CHECK(bytes >= kMiB);
    CHECK(bytes >= mib * kMiB / 64);
    CHECK(bytes <= mib * kMiB / 64 + IndexStore::kBytesMin);
    CHECK(IndexStore::entries_max(bytes) >= bytes / 4096 / 2);
  }
  CHECK(IndexStore::entries_max(0) == 0);
  for (std::uint64_t bytes = 0; bytes < 200 * kMiB; bytes += kMiB / 2)
    CHECK(IndexStore::entries_max(bytes) <= IndexStore::entries_max(bytes + kMiB / 2));
}

// Keeps `live` in step with a store at its limit.
class Churn {
 public:
  Churn(IndexStore& store, test::Random& random) : store_(store), random_(random) {}

  std::size_t size() const { return live_.size(); }
  // Replaces the one with the other in one commit; spaces are where new blocks go.
  void step(std::size_t deletes, std::size_t writes, std::uint32_t space) {
    SsdGroup group;
    for (std::size_t i = 0; i < deletes && !live_.empty(); ++i) {
      const auto at = random_.between<std::size_t>(0, live_.size() - 1);
      group.deletes.push_back(live_[at]);
      live_[at] = live_.back();
      live_.pop_back();
    }
    for (std::size_t i = 0; i < writes; ++i) {
      group.writes.push_back(test::random_write(random_, space, number_++));
      live_.push_back({group.writes.back().key, group.writes.back().place});
    }
    const auto applied = store_.apply(group, {});
    REQUIRE_MESSAGE(applied, applied.error().message);
    used_max = std::max(used_max, store_.used_bytes());
  }
  std::uint64_t used_max = 0;

 private:
  IndexStore& store_;
  test::Random& random_;
  std::vector<SsdDelete> live_;
  std::uint32_t number_ = 0;
};

void fill_and_churn(std::uint64_t bytes, int commits) {
  const ScratchDir dir;
  test::Random random("ssd index: never full");
  const auto store = created(dir / "index.mdb", bytes);
  Churn churn(*store, random);
  const std::uint64_t most = IndexStore::entries_max(bytes);
  constexpr std::size_t kHalf = IndexStore::kChangesMax / 2;
  while (churn.size() < most)
    churn.step(0, std::min<std::uint64_t>(most - churn.size(), 2 * kHalf), 1);
  CHECK(store->entries() == most);
  const std::uint64_t used_full = store->used_bytes();
  for (int i = 0; i < commits; ++i) {
    // A namespace cools down and leaves sparse pages behind while the next one takes its room.
    churn.step(kHalf, kHalf, 1 + static_cast<std::uint32_t>(i / 8));
    if (i % 16 == 15) {
      churn.step(2 * kHalf, 0, 1);
      churn.step(0, std::min<std::uint64_t>(most - churn.size(), 2 * kHalf), 1);
    }
  }
  CHECK(store->entries() == most);
  std::printf(
      "index of %llu MiB: %llu entries, %.0f bytes each at first, %.0f at most, full %.2f\n",
      static_cast<unsigned long long>(bytes / kMiB), static_cast<unsigned long long>(most),
      static_cast<double>(used_full) / static_cast<double>(most),
      static_cast<double>(churn.used_max) / static_cast<double>(most),
      static_cast<double>(churn.used_max) / static_cast<double>(bytes));
}

TEST_CASE("ssd index: at its number of entries it never runs out of pages") {
  const auto commits = static_cast<int>(test::scaled(400));
  fill_and_churn(1 * kMiB, commits);
  fill_and_churn(4 * kMiB, commits);
  fill_and_churn(64 * kMiB, commits);
}

}  // namespace
}  // namespace kvpool
