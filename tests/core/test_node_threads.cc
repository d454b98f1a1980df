// Many threads at once: right bytes or a miss, no wait that does not end, and when all is quiet
// again nothing is held and the books add up.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <random>

#include "node/node.h"
#include "node_cases.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;
using test::key_of;
using test::kKiB;
using test::kMiB;
using test::Pool;

constexpr std::uint64_t kBlockBytes[] = {4 * kKiB, 64 * kKiB, 300 * kKiB};
constexpr std::size_t kSpaces = std::size(kBlockBytes);
constexpr std::uint64_t kMaxBytes = 24 * kMiB;

NodeOptions busy_options() {
  NodeOptions options = Pool::plain(kMaxBytes);
  options.prefault = Prefault::ahead;
  options.evict_ahead = 0.05;
  options.huge_pages = true;
  return options;
}

// One caller with its own stream of random numbers. Every block it sees is compared.
class Caller {
 public:
  Caller(Pool& pool, std::span<Namespace* const> spaces, std::uint64_t seed)
      : pool_(pool), node_(*pool.node), spaces_(spaces), engine_(seed) {}

  void run(std::size_t operations) {
    for (std::size_t i = 0; i < operations; ++i) step();
    node_.release(held_);
  }
  std::uint64_t wrong = 0, delivered = 0, stored = 0, refused = 0, timed_out = 0;

 private:
  struct Held {
    Hash128 key;
    std::uint32_t bytes;
  };

  std::uint64_t below(std::uint64_t end) { return engine_() % end; }

  void step() {
    Namespace& space = *spaces_[below(kSpaces)];
    std::vector<Hash128> keys;
    const std::uint64_t first = below(120);
    for (std::uint64_t i = 0; i <= below(6); ++i) keys.push_back(key_of(first + i));
    const std::uint64_t what = below(100);
    if (what < 40)
      put(space, keys);
    else if (what < 70)
      get(space, keys);
    else if (what < 80)
      acquire(space, keys);
    else if (what < 86)
      reserve(space, keys[0]);
    else if (what < 94)
      node_.remove(space, {keys.data(), 1});
    else if (what < 96)
      REQUIRE(node_.resize((below(kMaxBytes / kUnitBytes) + 1) * kUnitBytes, below(3) * 150,
                           test::after(5ms)));
    else if (what < 97)
      node_.drop_namespace(space, test::never_hung());
    else if (what < 98)
      node_.trim();
    else
      look();
    if (held_.size() > 10 || (below(4) == 0 && !held_.empty())) release();
  }
  void put(Namespace& space, const std::vector<Hash128>& keys) {
    test::KeySource source(keys, space.block_bytes);
    std::vector<PutStatus> statuses(keys.size());
    const Hash128 parent = key_of(below(120));
    node_.put({space, keys, below(2) == 0 ? &parent : nullptr, test::after(200ms)}, source,
              statuses.data());
    bool broken = false;
    for (const PutStatus status : statuses) {
      wrong += broken != (status == PutStatus::chain_broken);
      broken |= status > PutStatus::present;
      count(status);
    }
  }
  void get(const Namespace& space, const std::vector<Hash128>& keys) {
    test::KeySink sink(keys, space.block_bytes);
    delivered += node_.get(space, keys, sink);
    wrong += sink.wrong;
    wrong += node_.lookup(space, keys, nullptr) > keys.size();
  }
  void acquire(const Namespace& space, const std::vector<Hash128>& keys) {
    std::vector<Lease> leases(keys.size());
    leases.resize(node_.acquire(space, keys, leases.data()));
    for (std::size_t i = 0; i < leases.size(); ++i) {
      held_.push_back(leases[i]);
      held_keys_.push_back(keys[i]);
    }
  }
  // Whatever happened since, the pinned bytes are those of their keys.
  void release() {
    for (std::size_t i = 0; i < held_.size(); ++i) {
      copy_.resize(held_[i].bytes);
      racy_copy(copy_.data(), node_.arena() + held_[i].offset, copy_.size());
      wrong += !test::is_payload(copy_.data(), copy_.size(), held_keys_[i]);
    }
    node_.release(held_);
    held_.clear();
    held_keys_.clear();
  }
  void reserve(Namespace& space, const Hash128& key) {
    Ticket ticket;
    const PutStatus status = node_.reserve({space, {&key, 1}, nullptr, test::after(1ms)}, ticket);
    if (status != PutStatus::stored) return count(status);
    copy_.resize(space.block_bytes);
    test::make_payload(copy_.data(), copy_.size(), key);
    racy_fill(node_.slot(ticket), copy_.data(), copy_.size());
    if (below(3) == 0)
      node_.abort(ticket);
    else
      count(node_.commit(ticket, {}, test::never_hung()));
  }
  void count(PutStatus status) {
    stored += status == PutStatus::stored;
    timed_out += status == PutStatus::timed_out;
    refused += status == PutStatus::pool_pinned;
    wrong += status == PutStatus::failed || status == PutStatus::no_memory;
  }
  void look() {
    const NodeStats stats = node_.stats();
    wrong += stats.bytes_taken > stats.bytes_in_slabs;
    wrong += stats.bytes_in_slabs > stats.bytes_committed;
    wrong += stats.bytes_committed > kMaxBytes;
    if (below(4) == 0) node_.check_invariants();
    node_.temperature(*spaces_[0], key_of(below(120)));
  }

  Pool& pool_;
  Node& node_;
  std::span<Namespace* const> spaces_;
  std::mt19937_64 engine_;
  std::vector<Lease> held_;
  std::vector<Hash128> held_keys_;
  std::vector<std::byte> copy_;
};

TEST_CASE("threads: eight at everything get right bytes or misses and leave nothing behind") {
  test::Random random("threads");
  Pool pool(busy_options());
  Namespace* spaces[kSpaces];
  for (std::size_t i = 0; i < kSpaces; ++i) spaces[i] = &pool.space(i, kBlockBytes[i]);
  std::vector<std::unique_ptr<Caller>> callers;
  for (int i = 0; i < 8; ++i)
    callers.push_back(std::make_unique<Caller>(pool, spaces, random.engine()()));
  std::barrier start(8);
  std::vector<std::thread> threads;
  for (auto& caller : callers)
    threads.emplace_back([&] {
      start.arrive_and_wait();
      caller->run(test::scaled(4'000));
    });
  for (std::thread& thread : threads) thread.join();
  std::uint64_t wrong = 0, delivered = 0, stored = 0, refused = 0, timed_out = 0;
  for (const auto& caller : callers) {
    wrong += caller->wrong;
    delivered += caller->delivered;
    stored += caller->stored;
    refused += caller->refused;
    timed_out += caller->timed_out;
  }
  MESSAGE("delivered " << delivered << ", stored " << stored << ", refused " << refused
                       << ", timed out " << timed_out);
  CHECK(wrong == 0);
  CHECK(delivered > 100);
  CHECK(stored > 100);
  pool.check_at_rest();
  const NodeStats stats = pool.node->stats();
  CHECK(stats.bytes_arena <= stats.bytes_committed + kUnitBytes);
  CHECK(stats.bytes_committed <= stats.bytes_limit);
  CHECK(stats.store.puts == stats.blocks + stats.store.evictions + stats.store.removed);
  for (Namespace* const space : spaces) pool.node->drop_namespace(*space, test::never_hung());
  pool.check_at_rest();
  CHECK(pool.node->stats().bytes_taken == 0);
  CHECK(pool.node->stats().bytes_in_slabs == 0);
}

// Writers of one key: whoever comes first stores it, all others find it, nobody waits for ever.
TEST_CASE("threads: writers of the same chain store each block once") {
  for (std::size_t round = 0; round < test::scaled(60); ++round) {
    Pool pool(Pool::plain(8 * kMiB));
    Namespace& space = pool.space(1, 64 * kKiB);
    const auto keys = test::keys_from(round * 100, 12);
    std::barrier start(4);
    std::atomic<int> stored{0}, others{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i)
      threads.emplace_back([&] {
        test::KeySource source(keys, space.block_bytes);
        std::vector<PutStatus> statuses(keys.size());
        start.arrive_and_wait();
        pool.node->put({space, keys, nullptr, test::never_hung()}, source, statuses.data());
        for (const PutStatus status : statuses) {
          stored += status == PutStatus::stored;
          others += status > PutStatus::present;
        }
      });
    for (std::thread& thread : threads) thread.join();
    REQUIRE(stored == 12);
    REQUIRE(others == 0);
    REQUIRE(pool.get(space, keys) == 12);
  }
}

// A block is there for everybody once put has returned, whichever thread asks.
TEST_CASE("threads: what one thread stored the next one reads") {
  Pool pool(Pool::plain(64 * kMiB));
  Namespace& space = pool.space(1, 4 * kKiB);
  std::atomic<std::uint64_t> published{0}, missed{0}, wrong{0};
  const std::uint64_t count = test::scaled(4'000);
  std::thread reader([&] {
    for (std::uint64_t seen = 0; seen < count;) {
      const std::uint64_t until = published.load(std::memory_order_acquire);
      for (; seen < until; ++seen) {
        const Hash128 key = key_of(seen);
        test::KeySink sink({&key, 1}, 4 * kKiB);
        missed += pool.node->get(space, {&key, 1}, sink) != 1;
        wrong += sink.wrong;
      }
    }
  });
  for (std::uint64_t n = 0; n < count; ++n) {
    const Hash128 key = key_of(n);
    test::KeySource source({&key, 1}, 4 * kKiB);
    PutStatus status{};
    pool.node->put({space, {&key, 1}, nullptr, test::never_hung()}, source, &status);
    CHECK(status == PutStatus::stored);
    published.store(n + 1, std::memory_order_release);
  }
  reader.join();
  CHECK(missed == 0);
  CHECK(wrong == 0);
}

TEST_CASE("threads: closing ends every call and every wait") {
  test::Random random("threads close");
  for (std::size_t round = 0; round < test::scaled(40); ++round) {
    NodeOptions options = busy_options();
    options.prefault = Prefault::all;
    options.warm_threads = 3;
    Pool pool(options);
    Namespace& space = pool.space(1, 64 * kKiB);
    // A reservation that nobody ends: whoever puts this key waits for it.
    const Hash128 stuck = key_of(0);
    Ticket ticket;
    REQUIRE(pool.node->reserve({space, {&stuck, 1}, nullptr, test::never_hung()}, ticket) ==
            PutStatus::stored);
    std::barrier start(7);
    std::atomic<std::uint64_t> wrong{0}, ended{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 6; ++i)
      threads.emplace_back([&, i] {
        start.arrive_and_wait();
        for (std::uint64_t n = 1; !pool.node->is_closed(); ++n) {
          const Hash128 key = i < 2 ? stuck : key_of(n % 50 + 1);
          test::KeySource source({&key, 1}, 64 * kKiB);
          test::KeySink sink({&key, 1}, 64 * kKiB);
          PutStatus status{};
          pool.node->put({space, {&key, 1}, nullptr, test::never_hung()}, source, &status);
          const bool ended_by_close = status == PutStatus::failed || status == PutStatus::dropped;
          wrong += status > PutStatus::present && !ended_by_close;
          wrong += i < 2 && !ended_by_close;
          if (i == 5) pool.node->resize((n % 12 + 1) * kUnitBytes, 0, test::never_hung());
          pool.node->get(space, {&key, 1}, sink);
          wrong += sink.wrong;
        }
        ++ended;
      });
    start.arrive_and_wait();
    const auto busy = random.between(0u, 400u);
    for (unsigned i = 0; i < busy; ++i) pool.node->stats();
    std::thread other([&] { pool.node->close({}); });
    pool.node->close({});
    other.join();
    for (std::thread& thread : threads) thread.join();
    REQUIRE(ended == 6);
    REQUIRE(wrong == 0);
    pool.node->abort(ticket);
    pool.node->check_invariants();
    CHECK(pool.node->stats().reserved == 0);
    CHECK(pool.node->stats().pinned == 0);
  }
}

}  // namespace
}  // namespace kvpool
