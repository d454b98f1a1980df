// What a node does with blocks that it has to ask others for, whoever those are: here a neighbour
// that makes the bytes of the keys it is said to have, when it is told to.
#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "block/checksum.h"
#include "net_cases.h"

using namespace kvpool;
using namespace kvpool::test;

namespace {

constexpr std::uint32_t kBlockBytes = 20'000;

class Neighbour final : public Elsewhere {
 public:
  Miss find(const Ask& ask, std::span<std::uint8_t> has) override {
    const std::lock_guard lock(mutex_);
    ++finds;
    for (std::size_t i = 0; i < ask.keys.size(); ++i) has[i] = has_.contains(word(ask.keys[i]));
    return Miss::none;
  }
  Miss fetch(const Ask& ask, BlockSink& sink) override {
    Miss why = Miss::none;
    for (std::size_t i = 0; i < ask.keys.size(); ++i) {
      if (!wait_open(ask.deadline)) return why == Miss::none ? Miss::timed_out : why;
      {
        const std::lock_guard lock(mutex_);
        const auto at = has_.find(word(ask.keys[i]));
        if (at == has_.end()) {
          if (why == Miss::none) why = Miss::absent;
          sink.place(i);  // as a stream that makes room for what then does not come
          continue;
        }
        ++at->second;
      }
      std::byte* const to = sink.place(i);
      if (to == nullptr) return Miss::no_room;
      const auto payload = payload_of(ask.keys[i], ask.space.block_bytes);
      racy_fill(to, payload.data(), payload.size());
      sink.arrived(i, checksum(payload.data(), payload.size()));
      ++brought;
    }
    return why;
  }
  void give(std::span<const Hash128> keys) {
    const std::lock_guard lock(mutex_);
    for (const Hash128& key : keys) has_.emplace(word(key), 0);
  }
  // So many more blocks go out, then fetches wait.
  void open_for(int blocks) {
    const std::lock_guard lock(mutex_);
    open_ = blocks;
    opened_.notify_all();
  }
  void open() { open_for(1 << 30); }
  int times(const Hash128& key) {
    const std::lock_guard lock(mutex_);
    const auto at = has_.find(word(key));
    return at == has_.end() ? 0 : at->second;
  }
  int most_times() {
    const std::lock_guard lock(mutex_);
    int most = 0;
    for (const auto& [key, count] : has_) most = std::max(most, count);
    return most;
  }
  bool has_waiters() {
    const std::lock_guard lock(mutex_);
    return waiting_ > 0;
  }
  std::atomic<int> finds{0}, brought{0};

 private:
  static std::pair<std::uint64_t, std::uint64_t> word(const Hash128& key) {
    return {key.low, key.high};
  }
  bool wait_open(Deadline deadline) {
    std::unique_lock lock(mutex_);
    ++waiting_;
    const bool is_open = opened_.wait_until(lock, deadline, [&] { return open_ > 0; });
    --waiting_;
    open_ -= is_open;
    return is_open;
  }

  std::mutex mutex_;
  std::condition_variable opened_;
  int open_ = 1 << 30, waiting_ = 0;
  std::map<std::pair<std::uint64_t, std::uint64_t>, int> has_;
};

NodeOptions asking(std::uint64_t bytes = 64 * kMiB, std::chrono::milliseconds timeout = 60s) {
  NodeOptions options = Pool::plain(bytes);
  options.far_timeout = timeout;
  return options;
}

struct Asking : Pool {
  std::shared_ptr<Neighbour> neighbour = std::make_shared<Neighbour>();
  Namespace& kv;

  explicit Asking(const NodeOptions& options = asking(), std::uint32_t block_bytes = kBlockBytes)
      : Pool(options), kv(space(1, block_bytes)) {
    node->set_elsewhere(neighbour);
  }
  std::size_t fetch(std::span<const Hash128> keys, Miss& why, const Reach& reach = {}) {
    KeySink sink(keys, kv.block_bytes);
    const std::size_t count = node->get(kv, keys, sink, &why, reach);
    REQUIRE(sink.wrong == 0);
    return count;
  }
  // Nobody fetches any more, and nothing is held for it.
  void check() {
    CHECK(node->stats().far_fetching == 0);
    check_at_rest();
  }
};

}  // namespace

TEST_CASE("node elsewhere: what a neighbour has is delivered, and is here from then on") {
  Asking pool;
  const auto keys = keys_from(1, 50);
  pool.put(pool.kv, std::span(keys).first(7));
  pool.neighbour->give(keys);
  Miss why{};
  std::vector<std::uint8_t> tiers(60);
  auto asked = keys;
  for (const Hash128& key : keys_from(1000, 10)) asked.push_back(key);
  CHECK(pool.node->lookup(pool.kv, asked, tiers.data(), {}, &why) == 50);
  CHECK(why == Miss::absent);
  CHECK(tiers[6] == kTierDram);
  CHECK(tiers[7] == kTierRemote);
  CHECK(tiers[49] == kTierRemote);
  CHECK(tiers[50] == 0);
  CHECK(pool.neighbour->brought == 0);

  CHECK(pool.fetch(asked, why) == 50);
  CHECK(why == Miss::absent);
  CHECK(pool.neighbour->brought == 43);
  CHECK(pool.node->lookup(pool.kv, asked, tiers.data(), Reach::here()) == 50);
  CHECK(tiers[49] == kTierDram);
  CHECK(pool.fetch(keys, why) == 50);
  CHECK(why == Miss::none);
  CHECK(pool.neighbour->brought == 43);

  const NodeStats stats = pool.node->stats();
  CHECK(stats.far.blocks == 43);
  CHECK(stats.far.kept == 43);
  CHECK(stats.store.copies == 43);
  CHECK(stats.store.puts == 7);
  const TrafficTotals traffic = pool.kv.traffic->totals();
  CHECK(traffic.loaded_remote == 43);
  CHECK(traffic.loaded_dram == 57);
  CHECK(traffic.lookup_remote == 43);
  CHECK(traffic.lookup_blocks == traffic.lookup_dram + traffic.lookup_ssd + traffic.lookup_remote +
                                     traffic.lookup_missed + traffic.lookup_behind);
  pool.check();
}

TEST_CASE("node elsewhere: who asks for what is here, or of a node alone, starts nothing") {
  Asking pool;
  const auto keys = keys_from(1, 5);
  pool.neighbour->give(keys);
  Miss why{};
  CHECK(pool.fetch(keys, why, Reach::here()) == 0);
  CHECK(why == Miss::absent);
  CHECK(pool.node->lookup(pool.kv, keys, nullptr, Reach::here()) == 0);
  Lease leases[5];
  CHECK(pool.node->acquire(pool.kv, keys, leases, &why, Reach::here()) == 0);
  CHECK(pool.neighbour->finds + pool.neighbour->brought == 0);
  pool.node->set_elsewhere(nullptr);
  CHECK(pool.fetch(keys, why) == 0);
  CHECK(pool.neighbour->finds + pool.neighbour->brought == 0);
  pool.check();
}

TEST_CASE("node elsewhere: blocks that were fetched can be leased") {
  Asking pool;
  const auto keys = keys_from(1, 40);
  pool.put(pool.kv, std::span(keys).first(3));
  pool.neighbour->give(std::span(keys).first(30));
  std::vector<Lease> leases(40);
  Miss why{};
  CHECK(pool.node->acquire(pool.kv, keys, leases.data(), &why) == 30);
  CHECK(why == Miss::absent);
  CHECK(pool.node->stats().pinned == 30);
  for (std::size_t i = 0; i < 30; ++i)
    CHECK(is_payload(pool.node->arena() + leases[i].offset, kBlockBytes, keys[i]));
  pool.node->release(std::span(leases).first(30));
  pool.check();
}

TEST_CASE("node elsewhere: many who want the same keys cause one fetch of each") {
  for (const std::size_t count : {2u, 16u}) {
    CAPTURE(count);
    Asking pool;
    const auto keys = keys_from(1, 300);
    pool.neighbour->give(keys);
    pool.neighbour->open_for(10);
    std::vector<std::thread> threads;
    std::atomic<std::size_t> served{0}, wrong{0};
    for (std::size_t i = 0; i < count; ++i)
      threads.emplace_back([&, i] {
        const auto mine = std::span(keys).subspan(i % 4 * 20);  // not all begin at the same one
        KeySink sink(mine, kBlockBytes);
        served += pool.node->get(pool.kv, mine, sink) == mine.size();
        wrong += sink.wrong;
      });
    wait_until([&] {
      const FarCounters far = pool.node->stats().far;
      return far.joined + far.fetches >= count && pool.neighbour->has_waiters();
    });
    pool.neighbour->open();
    for (std::thread& thread : threads) thread.join();
    CHECK(served == count);
    CHECK(wrong == 0);
    CHECK(pool.neighbour->most_times() == 1);
    CHECK(pool.neighbour->brought <= 300);
    pool.check();
  }
}

TEST_CASE("node elsewhere: where there is no room for them, blocks are delivered all the same") {
  Asking pool(asking(2 * kMiB));
  // All there is, pinned.
  const auto mine = keys_from(1, 90);
  pool.put(pool.kv, mine);
  std::vector<Lease> pins(90);
  const std::size_t pinned = pool.node->acquire(pool.kv, mine, pins.data(), nullptr, Reach::here());
  REQUIRE(pinned > 50);
  const auto keys = keys_from(1000, 200);
  pool.neighbour->give(keys);
  Miss why{};
  CHECK(pool.fetch(keys, why) == 200);
  CHECK(pool.node->stats().far.aside >= 100);
  // To be looked at in place they would need that room.
  std::vector<Lease> leases(200);
  const auto others = keys_from(2000, 200);
  pool.neighbour->give(others);
  const std::size_t leased = pool.node->acquire(pool.kv, others, leases.data(), &why);
  CHECK(leased < 100);
  CHECK(why == Miss::no_room);
  pool.node->release(std::span(leases).first(leased));

  SUBCASE("and those who waited for them have them, too") {
    const auto shared = keys_from(3000, 100);
    pool.neighbour->give(shared);
    pool.neighbour->open_for(3);
    std::atomic<std::size_t> served{0}, wrong{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i)
      threads.emplace_back([&] {
        KeySink sink(shared, kBlockBytes);
        served += pool.node->get(pool.kv, shared, sink);
        wrong += sink.wrong;
      });
    wait_until([&] { return pool.node->stats().far.joined >= 2; });
    pool.neighbour->open();
    for (std::thread& thread : threads) thread.join();
    CHECK(served == 300);
    CHECK(wrong == 0);
    CHECK(pool.neighbour->most_times() == 1);
  }
  pool.node->release(std::span(pins).first(pinned));
  pool.check();
}

TEST_CASE("node elsewhere: a copy that is colder than most of a full pool is not kept") {
  Asking pool(asking(4 * kMiB));
  const auto mine = keys_from(1, 190);
  pool.put(pool.kv, mine);
  const std::size_t here = pool.node->lookup(pool.kv, mine, nullptr, Reach::here());
  for (int i = 0; i < 20; ++i) {
    pool.clock->set(pool.clock->now() + 1);
    REQUIRE(pool.get(pool.kv, std::span(mine).first(here)) == here);
  }
  const auto keys = keys_from(1000, 300);
  pool.neighbour->give(keys);
  Miss why{};
  CHECK(pool.fetch(keys, why) == 300);
  const FarCounters far = pool.node->stats().far;
  CHECK(far.too_cold > 200);
  CHECK(far.aside >= far.too_cold);
  CHECK(pool.node->lookup(pool.kv, mine, nullptr, Reach::here()) == here);
  pool.check();
}

TEST_CASE("node elsewhere: what does not come is a miss with its reason, by the deadline") {
  Asking pool;
  const auto keys = keys_from(1, 20);
  pool.neighbour->give(keys);
  pool.neighbour->open_for(5);
  Miss why{};
  const auto began = std::chrono::steady_clock::now();
  CHECK(pool.fetch(keys, why, Reach::by(after(2s))) == 5);
  CHECK(why == Miss::timed_out);
  CHECK(std::chrono::steady_clock::now() - began < 30s);

  SUBCASE("whoever waits has a deadline of its own, and whoever has time left asks again") {
    std::size_t got = 0, late = 1;
    Miss why_late{}, why_got{};
    std::thread owner([&] { got = pool.fetch(keys, why_got, Reach::by(after(5s))); });
    wait_until([&] { return pool.neighbour->has_waiters(); });
    std::thread waiter(
        [&] { late = pool.fetch(std::span(keys).subspan(5), why_late, Reach::by(after(50ms))); });
    waiter.join();
    CHECK(late == 0);
    CHECK(why_late == Miss::timed_out);
    pool.neighbour->open();
    owner.join();
    CHECK(got == 20);
    CHECK(why_got == Miss::none);
  }
  pool.neighbour->open();
  pool.check();
}

TEST_CASE("node elsewhere: a put of a block that is being fetched is one that finds it present") {
  Asking pool;
  const auto keys = keys_from(1, 2);
  pool.neighbour->give(keys);
  pool.neighbour->open_for(1);
  Miss why{};
  std::size_t got = 0;
  std::thread getter([&] { got = pool.fetch(keys, why); });
  wait_until([&] { return pool.neighbour->has_waiters() && pool.neighbour->brought == 1; });
  const auto statuses = pool.put(pool.kv, keys);
  CHECK(statuses[0] == PutStatus::present);
  CHECK(statuses[1] == PutStatus::stored);
  pool.neighbour->open();
  getter.join();
  CHECK(got == 2);
  pool.check();
}

TEST_CASE("node elsewhere: a namespace that is dropped meanwhile keeps nothing of it") {
  Asking pool;
  const auto keys = keys_from(1, 10);
  pool.neighbour->give(keys);
  pool.neighbour->open_for(4);
  Miss why{};
  std::size_t got = 11;
  std::thread getter([&] { got = pool.fetch(keys, why, Reach::by(after(60s))); });
  wait_until([&] { return pool.neighbour->has_waiters() && pool.neighbour->brought == 4; });
  REQUIRE(pool.node->drop_namespace(pool.kv, never_hung()).has_value());
  pool.neighbour->open();
  getter.join();
  CHECK(got <= 10);
  CHECK(pool.node->lookup(pool.kv, keys, nullptr, Reach::here()) == 0);
  pool.check();
}

TEST_CASE("node elsewhere: closing ends every wait for another's fetch") {
  Asking pool;
  const auto keys = keys_from(1, 10);
  pool.neighbour->give(keys);
  pool.neighbour->open_for(2);
  std::vector<std::thread> threads;
  std::atomic<int> ended{0};
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      KeySink sink(keys, kBlockBytes);
      pool.node->get(pool.kv, keys, sink);
      ++ended;
    });
  wait_until([&] { return pool.node->stats().far.joined == 3 && pool.neighbour->has_waiters(); });
  pool.node->close({});
  wait_until([&] { return ended == 3; });
  pool.neighbour->open();
  for (std::thread& thread : threads) thread.join();
  CHECK(pool.node->stats().far_fetching == 0);
  CHECK(pool.node->stats().pinned == 0);
  CHECK(pool.node->stats().reserved == 0);
}

TEST_CASE("node elsewhere: puts, gets, leases, removes and drops beside fetches leave nothing") {
  const std::uint64_t seed = std::random_device{}();
  CAPTURE(seed);
  Asking pool(asking(4 * kMiB, 2s), 9000);
  const auto keys = keys_from(1, 600);
  for (std::size_t i = 0; i < keys.size(); ++i)
    if (i % 5 != 0) pool.neighbour->give({&keys[i], 1});
  std::atomic<std::size_t> wrong{0};
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 6; ++t)
    threads.emplace_back([&, t] {
      std::mt19937_64 random(seed + t);
      for (int i = 0; i < 150; ++i) {
        const std::size_t first = random() % 560;
        const auto some = std::span(keys).subspan(first, 1 + random() % 40);
        KeySink sink(some, 9000);
        KeySource source(some, 9000);
        std::vector<Lease> leases(some.size());
        std::vector<PutStatus> statuses(some.size());
        switch (random() % 8) {
          case 0:
            pool.node->put({pool.kv, some, nullptr, after(10s)}, source, statuses.data());
            break;
          case 1:
            pool.node->remove(pool.kv, some);
            break;
          case 2: {
            const std::size_t held = pool.node->acquire(pool.kv, some, leases.data());
            for (std::size_t j = 0; j < held; ++j)
              wrong += !is_payload(pool.node->arena() + leases[j].offset, 9000, some[j]);
            pool.node->release(std::span(leases).first(held));
            break;
          }
          case 3:
            if (i % 10 == 0) (void)pool.node->drop_namespace(pool.kv, after(1s));
            break;
          default:
            pool.node->get(pool.kv, some, sink);
        }
        wrong += sink.wrong;
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(pool.node->stats().far.blocks > 0);
  pool.check();
}
