// Many threads at a pool that is far too small in both its tiers: right bytes or a miss, nothing
// waits for ever, and when all is quiet nothing is held and the books add up.
#include <atomic>
#include <barrier>
#include <random>

#include "node/node.h"
#include "node_ssd_cases.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;
using test::key_of;
using test::kKiB;
using test::SsdPool;

constexpr std::uint64_t kBlockBytes[] = {20 * kKiB, 64 * kKiB, 300 * kKiB};
constexpr std::size_t kSpaces = std::size(kBlockBytes);
constexpr std::uint64_t kDramUnits = 6, kSsdUnits = 10;
constexpr std::uint64_t kChains = 20, kChainLength = 12;

NodeOptions busy_options(Durability durability, SsdAdmit admit) {
  NodeOptions options = SsdPool::small(kDramUnits, kSsdUnits);
  options.ssd.durability = durability;
  options.ssd_admit = admit;
  options.evict_ahead = 0.05;
  options.prefault = Prefault::ahead;
  return options;
}

class Caller {
 public:
  Caller(SsdPool& pool, std::span<Namespace* const> spaces, std::uint64_t seed)
      : pool_(pool), node_(*pool.node), spaces_(spaces), engine_(seed) {}

  void run(std::size_t operations) {
    for (std::size_t i = 0; i < operations; ++i) step();
    release();
  }
  std::uint64_t wrong = 0, delivered = 0, stored = 0, leased = 0;

 private:
  std::uint64_t below(std::uint64_t end) { return engine_() % end; }

  void step() {
    Namespace& space = *spaces_[below(kSpaces)];
    std::vector<Hash128> keys;
    const std::uint64_t chain = below(kChains);
    for (std::uint64_t i = 0; i <= below(kChainLength); ++i)
      keys.push_back(key_of(chain * 100 + i));
    const std::uint64_t what = below(1000);
    if (what < 420)
      put(space, keys);
    else if (what < 760)
      get(space, keys);
    else if (what < 860)
      acquire(space, keys);
    else if (what < 900)
      release();
    else if (what < 950)
      node_.remove(space, {&keys.back(), 1});
    else if (what < 955)
      wrong += !node_.drop_namespace(space, test::never_hung()).has_value();
    else if (what < 970)
      node_.resize((below(kDramUnits) + 1) * kUnitBytes, below(3) * 100, test::after(2ms));
    else if (what < 975)
      node_.resize_ssd(test::capacity_of(below(2 * kSsdUnits) + 4), test::after(2ms));
    else if (what < 980)
      node_.flush(test::after(5ms));
    else if (what < 990)
      pool_.clock->set(pool_.clock->now() + 1);
    else
      node_.check_invariants();
  }
  void put(Namespace& space, const std::vector<Hash128>& keys) {
    test::SumSource source(keys, space.block_bytes);
    std::vector<PutStatus> statuses(keys.size());
    node_.put({space, keys, nullptr, test::after(50ms)}, source, statuses.data());
    for (const PutStatus status : statuses) {
      stored += status == PutStatus::stored;
      wrong += status == PutStatus::failed || status == PutStatus::no_memory;
    }
  }
  void get(const Namespace& space, const std::vector<Hash128>& keys) {
    test::KeySink sink(keys, space.block_bytes);
    delivered += node_.get(space, keys, sink);
    wrong += sink.wrong;
  }
  void acquire(const Namespace& space, const std::vector<Hash128>& keys) {
    if (held_.size() > 12) return release();
    std::vector<Lease> leases(keys.size());
    leases.resize(node_.acquire(space, keys, leases.data()));
    leased += leases.size();
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

  SsdPool& pool_;
  Node& node_;
  std::span<Namespace* const> spaces_;
  std::mt19937_64 engine_;
  std::vector<Lease> held_;
  std::vector<Hash128> held_keys_;
  std::vector<std::byte> copy_;
};

void run_threads(test::Random& random, Durability durability, SsdAdmit admit) {
  SsdPool pool(busy_options(durability, admit));
  Namespace* spaces[kSpaces];
  for (std::size_t i = 0; i < kSpaces; ++i) spaces[i] = &pool.space(i, kBlockBytes[i]);
  std::vector<std::unique_ptr<Caller>> callers;
  for (int i = 0; i < 6; ++i)
    callers.push_back(std::make_unique<Caller>(pool, spaces, random.engine()()));
  std::barrier start(6);
  std::vector<std::thread> threads;
  for (auto& caller : callers)
    threads.emplace_back([&] {
      start.arrive_and_wait();
      caller->run(test::scaled(400));
    });
  for (std::thread& thread : threads) thread.join();
  std::uint64_t wrong = 0, delivered = 0, stored = 0, leased = 0;
  for (const auto& caller : callers) {
    wrong += caller->wrong;
    delivered += caller->delivered;
    stored += caller->stored;
    leased += caller->leased;
  }
  CHECK(wrong == 0);
  CHECK(delivered > 0);
  CHECK(stored > 0);
  pool.flush();
  REQUIRE(pool.node->resize_ssd(test::capacity_of(kSsdUnits), test::never_hung()).has_value());
  REQUIRE(pool.node->resize(kDramUnits * kUnitBytes, 0, test::never_hung()).has_value());
  pool.rest();
  pool.check_at_rest();
  const NodeStats stats = pool.node->stats();
  MESSAGE("delivered " << delivered << ", from the SSD " << stats.ssd_hits << ", stored " << stored
                       << ", leased " << leased << ", promoted " << stats.store.promotions
                       << ", moved " << stats.store.ssd_moved);
  CHECK(stats.pinned == 0);
  CHECK(stats.ssd.damaged == 0);
  CHECK(stats.ssd_read_only == false);
  const std::uint64_t on_ssd = stats.ssd_blocks;
  pool.options.ssd.capacity_bytes = 0;
  pool.reopen(/*flushes=*/false);
  const NodeStats after = pool.node->stats();
  CHECK(after.store.restored + after.store.restored_orphans == on_ssd);
  std::uint64_t found = 0;
  for (std::size_t i = 0; i < kSpaces; ++i)
    for (std::uint64_t chain = 0; chain < kChains; ++chain)
      for (std::uint64_t n = 0; n < kChainLength; ++n)
        found += pool.gets(pool.space(i, kBlockBytes[i]), key_of(chain * 100 + n));
  CHECK(found == after.store.restored);
  pool.check_at_rest();
}

TEST_CASE(
    "node ssd threads: six at everything get right bytes or misses, and leave nothing behind") {
  test::Random random("node ssd threads");
  for (const Durability durability : {Durability::async, Durability::durable, Durability::relaxed})
    for (const SsdAdmit admit : {SsdAdmit::all, SsdAdmit::second_use})
      run_threads(random, durability, admit);
}

// Whoever is in a call when the pool closes gets an answer, and the tier is whole after it.
TEST_CASE("node ssd threads: closing from two sides ends every call and every wait") {
  test::Random random("node ssd threads close");
  for (std::size_t round = 0; round < test::scaled(30); ++round) {
    SsdPool pool(
        busy_options(round % 2 == 0 ? Durability::durable : Durability::async, SsdAdmit::all));
    Namespace& space = pool.space(1, 64 * kKiB);
    std::barrier start(8);
    std::atomic<std::uint64_t> wrong{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 7; ++i)
      threads.emplace_back([&, i] {
        start.arrive_and_wait();
        for (std::uint64_t n = 1; !pool.node->is_closed(); ++n) {
          const auto keys = test::keys_from(n % 90, 4);
          if (i < 2) {
            test::SumSource source(keys, 64 * kKiB);
            std::vector<PutStatus> statuses(4);
            pool.node->put({space, keys, nullptr, test::never_hung()}, source, statuses.data());
          } else if (i < 4) {
            test::KeySink sink(keys, 64 * kKiB);
            pool.node->get(space, keys, sink);
            wrong += sink.wrong;
          } else if (i == 4) {
            std::vector<Lease> leases(4);
            leases.resize(pool.node->acquire(space, keys, leases.data()));
            pool.node->release(leases);
          } else if (i == 5) {
            pool.node->resize_ssd(test::capacity_of(n % 8 + 4), test::never_hung());
          } else {
            pool.node->flush(test::never_hung());
            if (n % 8 == 0) (void)pool.node->drop_namespace(space, test::never_hung());
          }
        }
      });
    start.arrive_and_wait();
    const auto busy = random.between(0u, 300u);
    for (unsigned i = 0; i < busy; ++i) pool.node->stats();
    std::thread other([&] { pool.node->close(test::never_hung()); });
    pool.node->close(random.coin() ? test::never_hung() : Node::Deadline{});
    other.join();
    for (std::thread& thread : threads) thread.join();
    REQUIRE(wrong == 0);
    pool.node->check_invariants();
    CHECK(pool.node->stats().pinned == 0);
    pool.node.reset();
    pool.options.ssd.capacity_bytes = 0;
    pool.open();  // the directory was let go, and what is in it is right
    for (std::uint64_t n = 0; n < 94; ++n) pool.gets(pool.space(1, 64 * kKiB), key_of(n));
    pool.check_at_rest();
  }
}

}  // namespace
}  // namespace kvpool
