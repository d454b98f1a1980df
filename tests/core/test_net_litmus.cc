// Reader processes copy and look in place without asking, while their node evicts, moves, drops,
// resizes and gives memory back, and while they are stopped anywhere: no wrong byte is accepted,
// and what is pinned stays as it is.
//
// KVPOOL_LITMUS_S = seconds, for a long run by hand.
#include <sys/mman.h>

#include <algorithm>
#include <deque>
#include <random>

#include "block/checksum.h"
#include "block_random.h"
#include "net/shm_channel.h"
#include "net_process.h"

// Under a sanitizer a child that was forked beside threads may wait for ever for a lock of its
// allocator, held by a thread that is not there.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)

namespace kvpool {
namespace {

using namespace std::chrono_literals;

using test::after;
using test::ClientProcess;
using test::key_of;
using test::kKiB;
using test::kMiB;
using test::NamedSpace;
using test::never_hung;
using test::ShmHost;

constexpr std::uint64_t kUnits = 24;
constexpr std::uint64_t kBlockBytes[] = {4 * kKiB, 64 * kKiB, 300 * kKiB};
constexpr std::uint64_t kKeys[] = {6'000, 500, 120};  // about twice what the pool holds of each
constexpr std::size_t kSizes = std::size(kBlockBytes);
constexpr std::size_t kReaders = 2;

// Word 0 is the version; word i of the rest is base(key, version) + i * kStep. Cheap enough that
// the check keeps up with the copy, and yet a word of another block, version or place is seen.
constexpr std::uint64_t kStep = 0x9e37'79b9'7f4a'7c15;
std::uint64_t base_of(const Hash128& key, std::uint64_t version) {
  return mix64(key.low ^ mix64(key.high + version));
}
void make_words(std::byte* to, std::size_t bytes, const Hash128& key, std::uint64_t version) {
  auto* const words = reinterpret_cast<std::uint64_t*>(to);
  const std::uint64_t base = base_of(key, version);
  words[0] = version;
  for (std::size_t i = 1; i < bytes / 8; ++i) words[i] = base + i * kStep;
}
bool are_words(const std::byte* at, std::size_t bytes, const Hash128& key) {
  const auto* const words = reinterpret_cast<const std::uint64_t*>(at);
  const std::uint64_t base = base_of(key, words[0]);
  std::uint64_t bad = 0;
  for (std::size_t i = 1; i < bytes / 8; ++i) bad |= words[i] ^ (base + i * kStep);
  return bad == 0;
}

// What readers tell, in memory that they share with the test.
struct Tally {
  std::atomic<std::uint64_t> copied_bytes, copies, viewed_bytes, views, put, wrong_copies,
      wrong_views;
  std::atomic<std::uint64_t> stop;

  static Tally& create() {
    void* page =
        mmap(nullptr, sizeof(Tally), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(page != MAP_FAILED);
    return *static_cast<Tally*>(page);
  }
};

class CheckingSink final : public BlockSink {
 public:
  CheckingSink(std::span<const Hash128> keys, std::uint64_t bytes, Tally& tally)
      : keys_(keys), copy_(bytes / 8), tally_(tally) {}
  bool deliver(std::size_t index, const IndexReader& reader, const Found& found) override {
    auto* const to = reinterpret_cast<std::byte*>(copy_.data());
    if (found.bytes != copy_.size() * 8 || !reader.copy(found, to)) return false;
    check(to, index);
    return true;
  }
  bool deliver_whole(std::size_t index, std::span<const std::byte> payload) override {
    if (payload.size() != copy_.size() * 8) return false;
    check(payload.data(), index);
    return true;
  }

 private:
  void check(const std::byte* at, std::size_t index) {
    tally_.wrong_copies += !are_words(at, copy_.size() * 8, keys_[index]);
    tally_.copied_bytes += copy_.size() * 8;
    ++tally_.copies;
  }
  std::span<const Hash128> keys_;
  std::vector<std::uint64_t> copy_;
  Tally& tally_;
};

class WordSource final : public BlockSource {
 public:
  WordSource(std::span<const Hash128> keys, std::uint64_t bytes, std::uint64_t version,
             bool streams)
      : keys_(keys), made_(bytes / 8), version_(version), streams_(streams) {}
  bool fill(std::size_t index, std::byte* slot, Hash128& sum) override {
    auto* const made = reinterpret_cast<std::byte*>(made_.data());
    make_words(made, made_.size() * 8, keys_[index], version_);
    sum = copy_with_checksum(slot, made, made_.size() * 8,
                             streams_ ? Stores::streaming : Stores::cached);
    return true;
  }

 private:
  std::span<const Hash128> keys_;
  std::vector<std::uint64_t> made_;
  const std::uint64_t version_;
  const bool streams_;
};

std::vector<Hash128> some_keys(std::size_t size, std::mt19937_64& random) {
  const std::uint64_t first = random() % kKeys[size];
  std::vector<Hash128> keys;
  for (std::uint64_t i = 0; i < 1 + random() % 6; ++i)
    keys.push_back(key_of(size * 100'000 + (first + i) % kKeys[size]));
  return keys;
}

// A view, looked at again and again for as long as it lives: not only bytes of its keys, but the
// same every time.
struct Viewed {
  Viewed(std::unique_ptr<Pins> seen, std::vector<Hash128> of)
      : pins(std::move(seen)), keys(std::move(of)) {
    for (const Pins::Place& place : pins->places) versions.push_back(word_at(place));
  }
  std::unique_ptr<Pins> pins;
  std::vector<Hash128> keys;
  std::vector<std::uint64_t> versions;

  std::uint64_t word_at(const Pins::Place& place) const {
    return *reinterpret_cast<const volatile std::uint64_t*>(pins->base + place.offset);
  }
  void check(Tally& tally) const {
    for (std::size_t i = 0; i < pins->places.size(); ++i) {
      const Pins::Place& place = pins->places[i];
      tally.wrong_views += !are_words(pins->base + place.offset, place.bytes, keys[i]) ||
                           word_at(place) != versions[i];
      tally.viewed_bytes += place.bytes;
    }
    ++tally.views;
  }
};

int read_until_told(Channel& channel, const std::deque<NamedSpace>& spaces, Tally& tally,
                    std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::deque<Viewed> views;
  for (std::uint64_t n = 1; tally.stop == 0; ++n) {
    const std::size_t size = random() % kSizes;
    const auto keys = some_keys(size, random);
    Miss why = Miss::none;
    CheckingSink sink(keys, kBlockBytes[size], tally);
    channel.get(spaces[size], keys, sink, why);
    if (n % 8 == 0) {
      views.emplace_back(channel.acquire(spaces[size], keys, why), keys);
      views.back().check(tally);
      if (views.size() > 20) {
        views.front().check(tally);
        views.pop_front();
      }
      views[random() % views.size()].check(tally);
    }
    if (n % 64 != 0) continue;
    WordSource source(keys, kBlockBytes[size], random() | 1, random() % 2 == 0);
    std::vector<PutStatus> statuses(keys.size());
    channel.put({spaces[size], keys, nullptr, never_hung()}, source, statuses.data());
    tally.put += static_cast<std::uint64_t>(std::ranges::count(statuses, PutStatus::stored));
  }
  return 0;
}

// One thing that a node does.
void churn(Node& node, std::span<Namespace* const> spaces, std::uint64_t n,
           std::mt19937_64& random) {
  // One size for a while, then another, so that slabs have to pass between them.
  const std::size_t size = random() % 8 == 0 ? random() % kSizes : n / 200 % kSizes;
  Namespace& space = *spaces[size];
  const auto keys = some_keys(size, random);
  switch (random() % 64) {
    case 0:
      node.remove(space, keys);
      return;
    case 1:
      // Not longer: what a stopped reader sees in place stays where it is.
      (void)node.resize((kUnits / 2 + random() % (kUnits / 2 + 1)) * kUnitBytes, std::nullopt,
                        after(5ms));
      return;
    case 2:
      node.trim();
      return;
    case 3:
      if (random() % 16 == 0) (void)node.drop_namespace(space, after(5ms));
      return;
    default:
      WordSource source(keys, space.block_bytes, random() | 1, random() % 2 == 0);
      std::vector<PutStatus> statuses(keys.size());
      // Nor for a block that a stopped reader is putting.
      node.put({space, keys, nullptr, after(5ms)}, source, statuses.data());
  }
}

// Stops one reader or another wherever it is, for up to 30 ms.
class Stopper {
 public:
  explicit Stopper(std::span<const std::unique_ptr<ClientProcess>> readers) : readers_(readers) {}
  void step(std::mt19937_64& random) {
    const auto now = std::chrono::steady_clock::now();
    if (now < next_) return;
    if (stopped_ != nullptr) {
      stopped_->signal(SIGCONT);
      stopped_ = nullptr;
      next_ = now + std::chrono::microseconds(random() % 10'000);
    } else {
      stopped_ = readers_[random() % readers_.size()].get();
      stopped_->signal(SIGSTOP);
      next_ = now + std::chrono::microseconds(random() % 30'000);
      ++stops;
    }
  }
  void end() const {
    for (const auto& reader : readers_) reader->signal(SIGCONT);
  }
  std::uint64_t stops = 0;

 private:
  std::span<const std::unique_ptr<ClientProcess>> readers_;
  ClientProcess* stopped_ = nullptr;
  std::chrono::steady_clock::time_point next_{};
};

TEST_CASE("litmus: processes that read without asking accept nothing wrong") {
  test::Random random("litmus processes");
  const char* const given = std::getenv("KVPOOL_LITMUS_S");
  const auto time = std::chrono::seconds(given != nullptr ? std::atoi(given) : 3);
  NodeOptions options = test::Pool::plain(kUnits * kUnitBytes);
  options.prefault = Prefault::ahead;
  options.evict_ahead = 0.05;
  const ShmHost host(options);
  std::vector<Namespace*> own;
  std::deque<NamedSpace> spaces;
  for (std::size_t i = 0; i < kSizes; ++i) {
    own.push_back(&host.space(i, kBlockBytes[i]));
    spaces.emplace_back(*own[i]);
  }
  Tally& tally = Tally::create();
  std::vector<std::unique_ptr<ClientProcess>> readers;
  for (std::size_t i = 0; i < kReaders; ++i) {
    const std::uint64_t seed = random.engine()();
    readers.push_back(std::make_unique<ClientProcess>(
        host.ticket(), [&, seed](ShmChannel& channel, ShmClient&, ClientProcess::Link) {
          return read_until_told(channel, spaces, tally, seed);
        }));
  }
  Stopper stopper(readers);
  const auto until = std::chrono::steady_clock::now() + time;
  for (std::uint64_t n = 0; std::chrono::steady_clock::now() < until; ++n) {
    churn(*host.node, own, n, random.engine());
    stopper.step(random.engine());
  }
  tally.stop = 1;
  stopper.end();
  for (const auto& reader : readers) CHECK(reader->join() == 0);
  CHECK(host.comes_to_rest(10s));
  host.node->check_invariants();
  const NodeStats stats = host.node->stats();
  MESSAGE("copied " << tally.copied_bytes / kMiB << " MiB in " << tally.copies.load()
                    << " blocks, viewed " << tally.viewed_bytes / kMiB << " MiB in "
                    << tally.views.load() << " looks, put " << tally.put.load() << "; stopped "
                    << stopper.stops << " times; evictions " << stats.store.evictions << ", moved "
                    << stats.store.blocks_moved << ", slabs moved " << stats.store.slabs_moved
                    << ", removed " << stats.store.removed << "; wrong "
                    << tally.wrong_copies.load() << " + " << tally.wrong_views.load());
  CHECK(tally.wrong_copies == 0);
  CHECK(tally.wrong_views == 0);
  CHECK(tally.copied_bytes > 10 * kMiB);
  CHECK(tally.viewed_bytes > 10 * kMiB);
  CHECK(tally.put > 0);
  CHECK(stopper.stops > 0);
  CHECK(stats.store.evictions > 0);
  CHECK(stats.store.blocks_moved > 0);
}

// Long views of small blocks that come and go as fast as a node can: of those that a client finds,
// some have left, and their slots are another block's, before it has said that it looks at them.
TEST_CASE("litmus: what is seen in place stays, though it was about to leave") {
  test::Random random("litmus views");
  constexpr std::uint64_t kFew = 520, kAway = 16;  // of 512 slots
  const ShmHost host(test::Pool::plain(kUnitBytes));
  Namespace& own = host.space(0, kBlockBytes[0]);
  const NamedSpace space(own);
  Tally& tally = Tally::create();
  std::vector<std::unique_ptr<ClientProcess>> readers;
  for (std::size_t i = 0; i < kReaders; ++i)
    readers.push_back(std::make_unique<ClientProcess>(
        host.ticket(), [&, i](ShmChannel& channel, ShmClient&, ClientProcess::Link) {
          std::mt19937_64 draw(i);
          while (tally.stop == 0) {
            std::vector<Hash128> keys;
            const std::uint64_t first = draw() % kFew;
            for (std::uint64_t k = 0; k < 64; ++k) keys.push_back(key_of((first + k) % kFew));
            Miss why = Miss::none;
            const Viewed seen(channel.acquire(space, keys, why), keys);
            seen.check(tally);
            seen.check(tally);
          }
          return 0;
        }));
  const auto until = std::chrono::steady_clock::now() + 1500ms;
  std::uint64_t stored = 0;
  std::deque<Hash128> away;
  for (std::uint64_t n = 0; n < kFew || std::chrono::steady_clock::now() < until; ++n) {
    if (n >= kFew) {
      away.push_back(key_of(random.engine()() % kFew));
      host.node->remove(own, {&away.back(), 1});
      if (away.size() <= kAway) continue;
    }
    const std::vector<Hash128> key = {n < kFew ? key_of(n) : away.front()};
    if (n >= kFew) away.pop_front();
    WordSource source(key, kBlockBytes[0], n | 1, n % 2 == 0);
    PutStatus status = PutStatus::failed;
    host.node->put({own, key, nullptr, after(5ms)}, source, &status);
    stored += status == PutStatus::stored;
  }
  tally.stop = 1;
  for (const auto& reader : readers) CHECK(reader->join() == 0);
  CHECK(host.comes_to_rest(10s));
  host.node->check_invariants();
  MESSAGE("stored " << stored << ", looked " << tally.views.load() << " times at "
                    << tally.viewed_bytes / kMiB << " MiB, wrong " << tally.wrong_views.load());
  CHECK(stored > 1000);
  CHECK(tally.viewed_bytes > 10 * kMiB);
  CHECK(tally.wrong_views == 0);
}

}  // namespace
}  // namespace kvpool

#endif
