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

using test::TempDirectory;
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
  const TempDirectory dir;
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
  const TempDirectory dir;
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

TEST_CASE("ssd index: what a commit writes is counted in pages") {
  const TempDirectory dir;
  test::Random random("ssd index: what a commit writes");
  const auto store = created(dir / "index.mdb");
  SsdGroup group;
  for (std::uint32_t i = 0; i < 2000; ++i) group.writes.push_back(test::random_write(random, 1, i));
  REQUIRE(store->apply(group, {}));
  const std::uint64_t used = store->used_bytes();
  CHECK(used >= 2000 * 94);
  CHECK(used <= 2000 * 300);
  SsdGroup stamps;
  for (const SsdWrite& write : group.writes)
    stamps.stamps.push_back({write.key, write.place, 2, 1});
  const std::uint64_t before = store->written_bytes();
  REQUIRE(store->apply(stamps, {}));  // every leaf, once
  CHECK(store->written_bytes() - before >= used * 9 / 10);
  CHECK(store->written_bytes() - before <= used + 8 * 4096);
  const std::uint64_t after = store->written_bytes();
  stamps.stamps.resize(1);
  REQUIRE(store->apply(stamps, {}));
  CHECK(store->written_bytes() - after >= 5 * 4096);
  CHECK(store->written_bytes() - after <= 14 * 4096);
}

TEST_CASE("ssd index: growing keeps everything and is there after a reopen") {
  const TempDirectory dir;
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
  const TempDirectory dir;
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
  const TempDirectory dir;
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

// A store at its limit, and what must be in it.
class Churn {
 public:
  Churn(std::uint64_t bytes, test::Random& random)
      : store_(created(dir_ / "index.mdb", bytes)),
        most_(IndexStore::entries_max(bytes)),
        bytes_(bytes),
        random_(random) {}

  static constexpr std::size_t kHalf = IndexStore::kChangesMax / 2;

  // One commit. What goes is taken by chance from the newest `of` blocks.
  void step(std::size_t deletes, std::size_t of, std::size_t writes) {
    SsdGroup group;
    for (std::size_t i = 0; i < deletes; ++i, --of) {
      const auto at = random_.between<std::size_t>(live_.size() - of, live_.size() - 1);
      group.deletes.push_back(live_[at]);
      live_[at] = live_.back();
      live_.pop_back();
    }
    for (std::size_t i = 0; i < writes; ++i) {
      group.writes.push_back(test::random_write(random_, space_, number_++));
      live_.push_back({group.writes.back().key, group.writes.back().place});
    }
    const auto applied = store_->apply(group, {});
    REQUIRE_MESSAGE(applied, applied.error().message);
    REQUIRE(store_->entries() == live_.size());
    used_max_ = std::max(used_max_, store_->used_bytes());
  }
  void fill() {
    while (live_.size() < most_) step(0, 0, std::min(most_ - live_.size(), 2 * kHalf));
  }
  // Blocks go by chance as many as come, and now and then the new ones are of another namespace.
  void replace(int commits) {
    for (int i = 0; i < commits; ++i) {
      const std::size_t count = std::min(kHalf, live_.size());
      step(count, live_.size(), count);
      space_ += i % 8 == 7 ? 1 : 0;
    }
    show("replaced");
  }
  // The newest namespace is thinned out to the fill at which LMDB leaves pages alone, and the next
  // one takes the room, until nearly all pages are like that.
  void thin_out() {
    for (std::size_t kept = 0; kept < most_ * 9 / 10;) {
      std::size_t newest = live_.size() - kept;
      const std::size_t left = newest * 2 / 5;
      while (newest > left) {
        const std::size_t count = std::min(newest - left, 2 * kHalf);
        step(count, newest, 0);
        newest -= count;
      }
      kept = live_.size();
      ++space_;
      fill();
    }
    show("thinned out");
  }
  void show(const char* what) const {
    std::printf("index of %llu MiB, %zu entries, %s: %.0f bytes for each, %.2f of it in use\n",
                static_cast<unsigned long long>(bytes_ / kMiB), most_, what,
                static_cast<double>(used_max_) / static_cast<double>(most_),
                static_cast<double>(used_max_) / static_cast<double>(bytes_));
  }

 private:
  TempDirectory dir_{test::memory_folder()};
  std::unique_ptr<IndexStore> store_;
  std::size_t most_;
  std::uint64_t bytes_;
  test::Random& random_;
  std::vector<SsdDelete> live_;
  std::uint64_t used_max_ = 0;
  std::uint32_t number_ = 0, space_ = 1;
};

TEST_CASE("ssd index: at its number of entries it never runs out of pages") {
  for (const std::uint64_t mib : {1, 4, 64}) {
    test::Random random("ssd index: never out of pages");
    Churn churn(mib * kMiB, random);
    churn.fill();
    churn.show("filled");
    churn.replace(static_cast<int>(test::scaled(80)));
    if (mib < 64 || !test::kUnderTsan) churn.thin_out();
    churn.replace(static_cast<int>(test::scaled(40)));
  }
}

}  // namespace
}  // namespace kvpool
