// The memory of the directory against a map that shares no code with it; bounds; holders that go.
#include <time.h>
#include <algorithm>
#include <map>
#include <set>
#include <thread>
#include <unordered_map>

#include "block_random.h"
#include "cluster/directory.h"
#include "core_build.h"

namespace kvpool {
namespace {

// Of this thread: what others do on the machine does not count.
double cpu_ns() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) * 1e9 + static_cast<double>(t.tv_nsec);
}

Hash128 key_of(std::uint64_t n) { return {mix64(n + 77), mix64(~n)}; }

using test::Random;

std::vector<DirectoryKey> keys_from(std::uint64_t first, std::size_t count) {
  std::vector<DirectoryKey> keys;
  for (std::size_t i = 0; i < count; ++i) keys.push_back(key_of(first + i));
  return keys;
}

std::set<std::uint16_t> holders_of(Directory& directory, const DirectoryKey& key) {
  Directory::Numbers numbers;
  directory.find({&key, 1}, {&numbers, 1});
  std::set<std::uint16_t> holders;
  for (const std::uint16_t each : numbers)
    if (each != 0) holders.insert(each);
  return holders;
}

// What a directory with room enough should say.
class DirectoryAgainstModel {
 public:
  explicit DirectoryAgainstModel(Random& random)
      : random_(random), directory_({.bytes_max = 4 << 20, .salt = random.engine()()}) {
    for (int i = 0; i < 7; ++i) take();
  }

  void step() {
    const int what = random_.between(0, 99);
    if (what < 45) return add();
    if (what < 70) return remove();
    if (what < 90) return compare(some_keys());
    if (what < 94) return drop();
    if (what < 97) return forget();
    directory_.sweep(random_.between<std::size_t>(1, 20));
  }
  void compare_all() {
    std::vector<DirectoryKey> keys = keys_from(0, kKeys);
    compare(keys);
    while (directory_.sweep(64)) {
    }
    compare(keys);
    const DirectoryStats stats = directory_.stats();
    CHECK(stats.entries == model_.size());
    CHECK(stats.holders == holders_.size());
    CHECK(stats.evicted == 0);
    CHECK(stats.crowded == crowded_);
  }

 private:
  static constexpr std::uint64_t kKeys = 3000;
  struct Slotted {
    std::size_t operator()(const DirectoryKey& key) const { return key.high; }
  };

  void take() {
    const auto holder = directory_.take_holder();
    REQUIRE(holder.has_value());
    for (const Holder& each : holders_) REQUIRE(each.number != holder->number);
    holders_.push_back(*holder);
  }
  std::vector<DirectoryKey> some_keys() {
    std::vector<DirectoryKey> keys;
    for (std::size_t i = random_.between<std::size_t>(1, 60); i > 0; --i)
      keys.push_back(key_of(random_.between<std::uint64_t>(0, kKeys - 1)));
    return keys;
  }
  const Holder& any() { return holders_[random_.between<std::size_t>(0, holders_.size() - 1)]; }
  void add() {
    const std::vector<DirectoryKey> keys = some_keys();
    const bool is_late = !gone_.empty() && random_.between(0, 9) == 0;
    const Holder holder =
        is_late ? gone_[random_.between<std::size_t>(0, gone_.size() - 1)] : any();
    std::size_t wanted = 0;
    for (const DirectoryKey& key : keys) {
      if (is_late) break;
      auto& there = model_[key];
      if (there.size() < kHoldersPerKey || there.contains(holder.number)) {
        there.insert(holder.number);
        ++wanted;
      } else {
        ++crowded_;
      }
    }
    REQUIRE(directory_.add(keys, holder) == wanted);
  }
  void remove() {
    const std::vector<DirectoryKey> keys = some_keys();
    const Holder holder = any();
    std::size_t wanted = 0;
    for (const DirectoryKey& key : keys) {
      const auto there = model_.find(key);
      if (there == model_.end()) continue;
      wanted += there->second.erase(holder.number);
      if (there->second.empty()) model_.erase(there);
    }
    REQUIRE(directory_.remove(keys, holder) == wanted);
  }
  void drop() {
    const std::size_t at = random_.between<std::size_t>(0, holders_.size() - 1);
    const Holder holder = holders_[at];
    directory_.drop_holder(holder);
    directory_.drop_holder(holder);  // twice is once
    gone_.push_back(holder);
    holders_.erase(holders_.begin() + static_cast<std::ptrdiff_t>(at));
    for (auto& [key, there] : model_) there.erase(holder.number);
    std::erase_if(model_, [](const auto& each) { return each.second.empty(); });
    take();
  }
  void forget() {
    SlotSet slots;
    for (int i = 0; i < 200; ++i) slots.set(random_.between<std::size_t>(0, kDirectorySlots - 1));
    slots.set(slot_of(key_of(random_.between<std::uint64_t>(0, kKeys - 1))));
    directory_.forget_slots(slots);
    std::erase_if(model_, [&](const auto& each) { return slots.test(slot_of(each.first)); });
  }
  void compare(std::span<const DirectoryKey> keys) {
    std::vector<Directory::Numbers> found(keys.size());
    directory_.find(keys, found);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      std::set<std::uint16_t> numbers;
      for (const std::uint16_t each : found[i])
        if (each != 0) REQUIRE(numbers.insert(each).second);
      const auto wanted = model_.find(keys[i]);
      REQUIRE(numbers == (wanted == model_.end() ? std::set<std::uint16_t>{} : wanted->second));
    }
  }

  Random& random_;
  Directory directory_;
  std::unordered_map<DirectoryKey, std::set<std::uint16_t>, Slotted> model_;
  std::vector<Holder> holders_, gone_;
  std::uint64_t crowded_ = 0;
};

TEST_CASE("cluster directory: any operations against a map") {
  Random random("cluster directory");
  DirectoryAgainstModel both(random);
  for (std::size_t i = 0; i < test::scaled(20'000); ++i) both.step();
  both.compare_all();
}

TEST_CASE("cluster directory: four holders a key, the fifth is counted") {
  Directory directory({});
  const DirectoryKey key = key_of(1);
  std::vector<Holder> holders;
  for (int i = 0; i < 5; ++i) holders.push_back(*directory.take_holder());
  for (int i = 0; i < 4; ++i) CHECK(directory.add({&key, 1}, holders[i]) == 1);
  CHECK(directory.add({&key, 1}, holders[4]) == 0);
  CHECK(directory.stats().crowded == 1);
  CHECK(holders_of(directory, key).size() == 4);
  CHECK(directory.remove({&key, 1}, holders[0]) == 1);
  CHECK(directory.add({&key, 1}, holders[4]) == 1);
  directory.drop_holder(holders[1]);
  CHECK(holders_of(directory, key).size() == 3);
  CHECK(directory.add({&key, 1}, holders[0]) == 1);  // in the place of one that is gone
  CHECK(holders_of(directory, key).size() == 4);
}

TEST_CASE("cluster directory: a holder that goes is gone at once, and its number rests") {
  Directory directory({.bytes_max = 1 << 20});
  const std::vector<DirectoryKey> keys = keys_from(0, 5000);
  const Holder first = *directory.take_holder(), other = *directory.take_holder();
  directory.add(keys, first);
  directory.add(std::span(keys).first(10), other);
  directory.drop_holder(first);
  CHECK(holders_of(directory, keys[20]).empty());
  CHECK(holders_of(directory, keys[3]) == std::set{other.number});
  CHECK(directory.add(std::span(keys).first(1), first) == 0);
  CHECK(directory.remove(std::span(keys).first(1), first) == 0);
  CHECK(directory.stats().late == 1);
  CHECK(directory.take_holder()->number != first.number);
  while (directory.sweep(1)) {
  }
  CHECK(directory.stats().entries == 10);
  const Holder again = *directory.take_holder();
  CHECK(again.number == first.number);
  CHECK(again.life != first.life);
  CHECK(directory.add(std::span(keys).first(1), first) == 0);
  CHECK(holders_of(directory, keys[20]).empty());
  CHECK(holders_of(directory, keys[3]) == std::set{other.number});
}

TEST_CASE("cluster directory: as many holders as there are numbers") {
  Directory directory({.bytes_max = 1 << 16});
  std::vector<Holder> holders;
  while (const auto holder = directory.take_holder()) holders.push_back(*holder);
  CHECK(holders.size() == 4095);
  directory.drop_holder(holders[17]);
  CHECK(!directory.take_holder());  // not swept yet
  while (directory.sweep(1)) {
  }
  CHECK(directory.take_holder()->number == holders[17].number);
  CHECK(!directory.take_holder());
}

TEST_CASE("cluster directory: a full one stays within its memory and keeps what is in use") {
  constexpr std::uint64_t kBytes = 1 << 20;  // 65,536 entries
  Directory directory({.bytes_max = kBytes, .salt = 99});
  const Holder holder = *directory.take_holder();
  const std::vector<DirectoryKey> used = keys_from(1ull << 40, 5000);
  directory.add(used, holder);
  for (std::uint64_t round = 0; round < 100; ++round) {
    directory.add(keys_from(round * 4096, 4096), holder);
    std::vector<Directory::Numbers> found(used.size());
    directory.find(used, found);
    REQUIRE(directory.stats().bytes <= kBytes);
  }
  const DirectoryStats stats = directory.stats();
  CHECK(stats.evicted + stats.entries == 100 * 4096 + used.size());
  CHECK(stats.entries > 0.97 * 65'536);
  CHECK(stats.bytes_per_key < 17);
  std::size_t kept = 0, late = 0, early = 0;
  for (const DirectoryKey& key : used) kept += !holders_of(directory, key).empty();
  for (const DirectoryKey& key : keys_from(99 * 4096, 4096))
    late += !holders_of(directory, key).empty();
  for (const DirectoryKey& key : keys_from(0, 4096)) early += !holders_of(directory, key).empty();
  CHECK(kept > 0.98 * 5000);
  CHECK(late > 0.98 * 4096);
  CHECK(early < 0.05 * 4096);
}

TEST_CASE("cluster directory: a million keys") {
  const std::size_t count = test::scaled(1'000'000);
  Directory directory({.bytes_max = 64 << 20, .salt = 5});
  const Holder holder = *directory.take_holder();
  const std::vector<DirectoryKey> keys = keys_from(0, count);
  const auto batches = [&](auto each) {
    const double before = cpu_ns();
    for (std::size_t at = 0; at < count; at += 4096)
      each(std::span(keys).subspan(at, std::min<std::size_t>(4096, count - at)));
    return (cpu_ns() - before) / static_cast<double>(count);
  };
  const double add = batches([&](auto some) { directory.add(some, holder); });
  const double again = batches([&](auto some) { directory.add(some, holder); });
  std::vector<Directory::Numbers> found(4096);
  const double find = batches([&](auto some) { directory.find(some, found); });
  const DirectoryStats stats = directory.stats();
  CHECK(stats.entries == count);
  CHECK(stats.evicted == 0);
  CHECK(stats.bytes_per_key < 32);
  const double remove = batches([&](auto some) { directory.remove(some, holder); });
  CHECK(directory.stats().entries == 0);
  std::printf(
      "directory of %zu keys: %.1f bytes a key; ns a key: add %.0f, again %.0f, find %.0f, "
      "remove %.0f\n",
      count, stats.bytes_per_key, add, again, find, remove);
}

TEST_CASE("cluster directory: holders that come and go beside those who ask") {
  Directory directory({.bytes_max = 1 << 18, .salt = 3});
  const std::vector<DirectoryKey> keys = keys_from(0, 3000);
  const Holder steady = *directory.take_holder();
  directory.add(std::span(keys).first(500), steady);
  std::atomic<bool> is_over{false};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 2; ++thread)
    threads.emplace_back([&] {
      for (std::size_t i = 0; i < test::scaled(300); ++i) {
        const auto holder = directory.take_holder();
        if (!holder) continue;
        directory.add(keys, *holder);
        directory.remove(std::span(keys).first(100), *holder);
        directory.drop_holder(*holder);
        directory.add(std::span(keys).first(100), *holder);  // late
      }
    });
  threads.emplace_back([&] {
    while (!is_over.load()) directory.sweep(1);
  });
  std::size_t wrong = 0;
  std::vector<Directory::Numbers> found(keys.size());
  for (std::size_t i = 0; i < test::scaled(300); ++i) {
    directory.find(keys, found);
    for (std::size_t k = 0; k < 500; ++k)
      wrong += std::ranges::find(found[k], steady.number) == found[k].end();
  }
  threads[0].join();
  threads[1].join();
  is_over.store(true);
  threads[2].join();
  CHECK(wrong == 0);
  while (directory.sweep(8)) {
  }
  CHECK(directory.stats().entries == 500);
  CHECK(directory.stats().holders == 1);
}

}  // namespace
}  // namespace kvpool
