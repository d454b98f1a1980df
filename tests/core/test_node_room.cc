// Making room: memory goes to the blocks that are warm, whatever their size; slabs pass between
// sizes; a shrunk pool really gives memory back; every block that fits finds its place.
#include <algorithm>
#include <ctime>
#include <string>
#include <thread>

#include "node/node.h"
#include "node_cases.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;
using test::key_of;
using test::keys_from;
using test::kKiB;
using test::kMiB;

constexpr std::size_t kStrideBytes = kPageBytes;

// Blocks come and go by the thousand here: one word a page is written, and looked at.
struct Pool : test::Pool {
  explicit Pool(const NodeOptions& options) : test::Pool(options) { stride = kStrideBytes; }
};

std::size_t count_present(const Pool& pool, const Namespace& space, std::uint64_t first,
                          std::size_t count) {
  std::size_t present = 0;
  for (std::size_t i = 0; i < count; ++i) present += pool.has(space, key_of(first + i));
  return present;
}

// Bytes of the blocks of `space` among the last `count` that were put.
double share_held(const Pool& pool, const Namespace& space, std::uint64_t end, std::size_t count,
                  std::uint64_t limit) {
  const auto present = count_present(pool, space, end - count, count);
  return static_cast<double>(present * space.block_bytes) / static_cast<double>(limit);
}

TEST_CASE("room: nine tenths of the pool follow a shifting mix of block sizes") {
  constexpr std::uint64_t kBytes = 128 * kMiB;
  Pool pool(Pool::plain(kBytes));
  Namespace &small = pool.space(1, 64 * kKiB), &large = pool.space(2, 2 * kMiB),
            &odd = pool.space(3, 65'537), &middle = pool.space(4, 3'460'300);
  std::uint64_t n = 0;
  Seconds now = 0;
  const auto flood = [&](Namespace& space, std::uint64_t bytes) {
    const std::size_t count = bytes / space.block_bytes;
    for (std::size_t i = 0; i < count; ++i) {
      pool.clock->set(now += 0.5);
      REQUIRE(pool.put(space, key_of(n++)) == PutStatus::stored);
    }
    return count;
  };
  for (Namespace* const space : {&small, &large, &odd, &middle, &small}) {
    CAPTURE(space->block_bytes);
    const std::size_t count = flood(*space, 2 * kBytes);
    CHECK(share_held(pool, *space, n, count, kBytes) >= 0.9);
    pool.check_at_rest();
  }
  // All sizes at once: what is held of the last pool's worth of bytes.
  const std::uint64_t start = n;
  double share = 0;
  for (int round = 0; round < 40; ++round)
    for (Namespace* const space : {&small, &large, &odd, &middle}) flood(*space, 4 * kMiB);
  for (Namespace* const space : {&small, &large, &odd, &middle})
    share +=
        static_cast<double>(count_present(pool, *space, start, n - start) * space->block_bytes) /
        kBytes;
  CHECK(share >= 0.9);
  pool.check_at_rest();
}

// A use that costs no copy.
void use(Pool& pool, const Namespace& space, std::span<const Hash128> keys) {
  std::vector<Lease> leases(keys.size());
  leases.resize(pool.node->acquire(space, keys, leases.data()));
  pool.node->release(leases);
}

// Blocks that are used all the time keep their slabs against a flood of blocks used once.
TEST_CASE("room: a hot size keeps its slabs against a flood of cold blocks of another size") {
  constexpr std::uint64_t kBytes = 64 * kMiB, kHot = 640;  // 40 MiB of 64 KiB
  for (const std::uint64_t flood_bytes : {2 * kMiB, 300 * kKiB, 4 * kKiB}) {
    CAPTURE(flood_bytes);
    Pool pool(Pool::plain(kBytes));
    Namespace &hot = pool.space(1, 64 * kKiB), &cold = pool.space(2, flood_bytes);
    Seconds now = 0;
    for (std::uint64_t i = 0; i < kHot; ++i) pool.put(hot, key_of(i));
    const std::uint64_t puts = 4 * kBytes / flood_bytes;
    for (std::uint64_t i = 0; i < puts; ++i) {
      pool.clock->set(now += 200.0 / static_cast<double>(puts));
      REQUIRE(pool.put(cold, key_of(1'000'000 + i)) == PutStatus::stored);
      if (i % (puts / 64) != 0) continue;
      for (std::uint64_t used = 0; used < kHot; ++used) use(pool, hot, std::vector{key_of(used)});
    }
    CHECK(count_present(pool, hot, 0, kHot) >= kHot * 95 / 100);
    pool.check_at_rest();
  }
}

// Long hot chains, now and then a cold tail after one: only the tails are colder than the flood.
TEST_CASE("room: cold tails do not cost a hot chain its slabs") {
  constexpr std::uint64_t kBytes = 32 * kMiB, kHot = 200;
  Pool pool(Pool::plain(kBytes));
  Namespace &hot = pool.space(1, 64 * kKiB), &cold = pool.space(2, 2 * kMiB);
  const auto chain = keys_from(0, kHot);
  pool.put(hot, chain);
  Seconds now = 0;
  std::uint64_t n = 10'000;
  for (int round = 0; round < 12; ++round) {
    pool.put(hot, key_of(n++), &chain.back());
    for (int i = 0; i < 40; ++i) {
      pool.clock->set(now += 1);
      pool.put(cold, key_of(n++));
      use(pool, hot, chain);
    }
    REQUIRE(pool.node->lookup(hot, chain, nullptr) == kHot);
  }
  pool.check_at_rest();
}

TEST_CASE("room: a cold size gives its memory up to the first flood of another") {
  constexpr std::uint64_t kBytes = 64 * kMiB;
  Pool pool(Pool::plain(kBytes));
  Namespace &old = pool.space(1, 64 * kKiB), &young = pool.space(2, 1 * kMiB);
  for (std::uint64_t i = 0; i < 1024; ++i) pool.put(old, key_of(i));
  pool.clock->set(1000);
  for (std::uint64_t i = 0; i < 64; ++i) {
    pool.clock->set(1000 + static_cast<Seconds>(i));
    REQUIRE(pool.put(young, key_of(5000 + i)) == PutStatus::stored);
  }
  CHECK(count_present(pool, young, 5000, 64) >= 58);
  pool.check_at_rest();
}

TEST_CASE("room: a block as large as many slabs is stored at once, from whoever is coldest") {
  Pool pool(Pool::plain(256 * kMiB));
  std::uint64_t n = 0;
  Seconds now = 0;
  for (const std::uint64_t bytes : {64 * kKiB, 128 * kKiB, 256 * kKiB, 512 * kKiB}) {
    Namespace& space = pool.space(bytes, bytes);
    for (std::uint64_t i = 0; i < 64 * kMiB / bytes; ++i) {
      pool.clock->set(now += 0.01);
      REQUIRE(pool.put(space, key_of(n++)) == PutStatus::stored);
    }
  }
  Namespace& huge = pool.space(1, 100 * kMiB);
  CHECK(pool.put(huge, key_of(n++)) == PutStatus::stored);
  CHECK(pool.put(huge, key_of(n++)) == PutStatus::stored);
  CHECK(pool.put(huge, key_of(n++)) == PutStatus::stored);
  CHECK(count_present(pool, huge, n - 3, 3) == 2);
  pool.check_at_rest();
}

TEST_CASE("room: a block that cannot fit now is refused, and costs nobody a block") {
  Pool pool(Pool::plain(64 * kMiB));
  Namespace &small = pool.space(1, 64 * kKiB), &large = pool.space(2, 40 * kMiB);
  REQUIRE(pool.put(large, key_of(1)) == PutStatus::stored);
  REQUIRE(pool.node->resize(16 * kMiB, 0, test::never_hung()));
  for (std::uint64_t i = 0; i < 200; ++i)
    REQUIRE(pool.put(small, key_of(100 + i)) <= PutStatus::present);
  for (std::uint64_t i = 0; i < 10; ++i)
    CHECK(pool.put(large, key_of(1000 + i)) == PutStatus::too_large);
  CHECK(count_present(pool, small, 100, 200) == 200);
  pool.check_at_rest();
}

TEST_CASE("room: every block that fits into the pool finds a place in an empty one") {
  test::Random random("room fits");
  for (std::size_t round = 0; round < test::scaled(60); ++round) {
    const std::uint64_t units = random.between<std::uint64_t>(1, 12);
    const std::uint64_t bytes = random.between<std::uint64_t>(1, units * kUnitBytes);
    CAPTURE(units);
    CAPTURE(bytes);
    Pool pool(Pool::plain(units * kUnitBytes));
    Namespace& space = pool.space(1, bytes);
    CHECK(pool.put(space, key_of(1)) == PutStatus::stored);
  }
}

TEST_CASE("room: a put into an empty pool does not fail because memory is just being made") {
  for (const Prefault prefault : {Prefault::ahead, Prefault::all})
    for (std::uint64_t units = 1; units <= 4; ++units)
      for (std::size_t round = 0; round < test::scaled(24); ++round) {
        NodeOptions options = Pool::plain(units * kUnitBytes);
        options.prefault = prefault;
        options.warm_threads = 4;
        Pool pool(options);
        Namespace& space = pool.space(1, 64 * kKiB);
        for (std::uint64_t n = 0; n < 32 * units; ++n)
          REQUIRE(pool.put(space, key_of(n)) == PutStatus::stored);
        REQUIRE(pool.node->stats().store.evictions == 0);
        pool.check_at_rest();
        REQUIRE(pool.node->stats().bytes_arena <= units * kUnitBytes);
      }
}

TEST_CASE("room: evicting ahead keeps a share free, and no more than that") {
  for (const std::uint64_t bytes : {4 * kKiB, 64 * kKiB, 1 * kMiB, 2 * kMiB, 5 * kMiB}) {
    CAPTURE(bytes);
    NodeOptions options = Pool::plain(100 * kMiB);
    options.evict_ahead = 0.05;
    Pool pool(options);
    Namespace& space = pool.space(1, bytes);
    const std::uint64_t fit = 100 * kMiB / bytes;
    for (std::uint64_t n = 0; n < fit + fit / 2; ++n)
      REQUIRE(pool.put(space, key_of(n)) == PutStatus::stored);
    pool.check_at_rest();
    const NodeStats stats = pool.node->stats();
    CHECK(stats.blocks * 10 >= fit * 9 - 10);
    CHECK(stats.blocks < fit);
    CHECK(stats.evicted_ahead > 0);
  }
  NodeOptions options = Pool::plain(16 * kMiB, 200);
  options.evict_ahead = 0.05;
  Pool pool(options);
  Namespace& space = pool.space(1, 4 * kKiB);
  for (std::uint64_t n = 0; n < 500; ++n) REQUIRE(pool.put(space, key_of(n)) == PutStatus::stored);
  pool.check_at_rest();
  CHECK(pool.node->stats().blocks == 190);
}

// What the kernel says is there, against what may be there.
TEST_CASE("room: memory falls at once to what pins leave, and wholly when they go") {
  constexpr std::uint64_t kPinned = 24;
  Pool pool(Pool::plain(256 * kMiB));
  Namespace& space = pool.space(1, 64 * kKiB);
  for (std::uint64_t n = 0; n < 4096; ++n) REQUIRE(pool.put(space, key_of(n)) == PutStatus::stored);
  CHECK(pool.node->stats().bytes_arena == 256 * kMiB);
  std::vector<Lease> leases;
  for (std::uint64_t i = 0; i < kPinned; ++i) {  // one in every fifth slab
    const Hash128 key = key_of(i * 160 + 7);
    leases.emplace_back();
    REQUIRE(pool.node->acquire(space, {&key, 1}, &leases.back()) == 1);
  }
  const std::byte* const base = pool.node->arena();
  REQUIRE(pool.node->resize(16 * kMiB, 0, test::never_hung()));
  pool.settle();
  const std::uint64_t left = pool.node->stats().bytes_arena;
  MESSAGE("MiB left with " << kPinned << " pins: " << left / kMiB);
  CHECK(left <= 16 * kMiB + kPinned * kUnitBytes);
  CHECK(left >= kPinned * 64 * kKiB);
  for (std::uint64_t i = 0; i < kPinned; ++i)
    CHECK(
        test::is_payload(base + leases[i].offset, 64 * kKiB, key_of(i * 160 + 7), 0, kStrideBytes));
  pool.node->release(leases);
  pool.check_at_rest();
  CHECK(pool.node->stats().bytes_arena <= 16 * kMiB);
  CHECK(pool.node->arena() == base);
  REQUIRE(pool.node->resize(256 * kMiB, 0, test::never_hung()));
  pool.clock->set(10);
  for (std::uint64_t n = 5000; n < 9000; ++n)
    REQUIRE(pool.put(space, key_of(n)) == PutStatus::stored);
  CHECK(count_present(pool, space, 5000, 4000) == 4000);
}

// Two sizes whose slabs all hold something pinned must not keep a third from shrinking.
TEST_CASE("room: a shrink goes round sizes that can give nothing") {
  Pool pool(Pool::plain(96 * kMiB));
  Namespace* spaces[] = {&pool.space(1, 128 * kKiB), &pool.space(2, 256 * kKiB),
                         &pool.space(3, 64 * kKiB)};
  std::vector<Lease> leases;
  std::uint64_t n = 0;
  for (int i = 0; i < 3; ++i) {
    const std::uint64_t per_slab = kUnitBytes / spaces[i]->block_bytes;
    for (std::uint64_t slab = 0; slab < 16; ++slab)
      for (std::uint64_t slot = 0; slot < per_slab; ++slot) {
        const Hash128 key = key_of(n++);
        REQUIRE(pool.put(*spaces[i], key) == PutStatus::stored);
        if (i == 2 || slot != 0) continue;
        leases.emplace_back();
        REQUIRE(pool.node->acquire(*spaces[i], {&key, 1}, &leases.back()) == 1);
      }
  }
  pool.clock->set(100);
  for (std::uint64_t i = n - 512; i < n; ++i)  // so that it is asked last
    use(pool, *spaces[2], std::vector{key_of(i)});
  REQUIRE(pool.node->resize(70 * kMiB, 0, test::never_hung()));
  pool.settle();
  CHECK(pool.node->stats().bytes_arena <= 70 * kMiB);
  pool.node->check_invariants();
  pool.node->release(leases);
  pool.check_at_rest();
}

TEST_CASE("room: pages that late reads bring back do not stay") {
  Pool pool(Pool::plain(64 * kMiB));
  Namespace& space = pool.space(1, 64 * kKiB);
  pool.stride = 8;
  for (std::uint64_t n = 0; n < 600; ++n) pool.put(space, key_of(n));
  pool.node->remove(space, keys_from(64, 536));
  pool.node->trim();
  const std::uint64_t held = pool.node->stats().bytes_committed;
  REQUIRE(held <= 8 * kMiB);
  volatile std::byte sum{};
  for (std::uint64_t at = 0; at < 36 * kMiB; at += kPageBytes) sum = pool.node->arena()[at];
  (void)sum;
  pool.settle();
  CHECK(pool.node->stats().bytes_arena <= held + kUnitBytes);
  CHECK(pool.get(space, keys_from(0, 64)) == 64);
}

TEST_CASE("room: warm memory stays within the limit, and trim gives it back") {
  NodeOptions options = Pool::plain(64 * kMiB);
  options.prefault = Prefault::all;
  options.warm_threads = 3;
  options.huge_pages = true;
  Pool pool(options);
  pool.settle();
  CHECK(pool.node->stats().bytes_arena == 64 * kMiB);
  CHECK(pool.node->stats().warm_units == 32);
  REQUIRE(pool.node->resize(16 * kMiB, 0, test::never_hung()));
  CHECK(pool.node->stats().bytes_arena <= 16 * kMiB);
  Pool plain(Pool::plain(64 * kMiB));
  Namespace& space = plain.space(1, 64 * kKiB);
  for (std::uint64_t n = 0; n < 1024; ++n) plain.put(space, key_of(n));
  plain.node->remove(space, keys_from(0, 1000));
  CHECK(plain.node->stats().bytes_arena == 64 * kMiB);
  plain.node->trim();
  CHECK(plain.node->stats().bytes_arena == plain.node->stats().bytes_in_slabs);
  CHECK(plain.node->stats().bytes_arena <= 4 * kMiB);
}

// Under the lock, while others wait for it.
TEST_CASE("room: memory is given back in small pieces, however much it is") {
  constexpr std::uint64_t kUnits = 500, kPieceMax = 16;
  for (const bool shrinks : {true, false}) {
    StoreOptions options;
    options.bytes_limit = kUnits * kUnitBytes;
    const auto store = std::move(*Store::create(options));
    while (const auto unit = store->start_warming()) store->warmed(*unit, true);
    REQUIRE(store->warm_units() == kUnits);
    if (shrinks) store->set_limit(kUnitBytes, 0);
    REQUIRE(store->warm_units() == kUnits);
    for (bool more = true; more;) {
      const std::uint32_t before = store->warm_units();
      more = shrinks ? store->shrink_step(0) : store->trim_step() > 0;
      REQUIRE(before - store->warm_units() <= kPieceMax);
    }
    CHECK(store->warm_units() == (shrinks ? 1 : 0));
    store->check_invariants();
  }
}

TEST_CASE("room: options beyond what a machine can have are an error that says so") {
  for (const std::uint64_t bytes :
       {std::uint64_t{0}, std::uint64_t{1}, kUnitBytes - 1, std::uint64_t{1} << 46,
        std::uint64_t{1} << 51, std::uint64_t{1} << 52, std::uint64_t{1} << 53,
        (std::uint64_t{1} << 53) + kUnitBytes, (std::uint64_t{1} << 54) + 5 * kUnitBytes,
        ~std::uint64_t{0} - kUnitBytes, ~std::uint64_t{0}}) {
    CAPTURE(bytes);
    NodeOptions options = Pool::plain(bytes);
    const auto clock = std::make_shared<ManualClock>();
    CHECK_FALSE(Node::open(options, clock).has_value());
    options.store.bytes_limit = kUnitBytes;
    options.store.bytes_max = bytes;
    if (bytes > kUnitBytes) CHECK_FALSE(Node::open(options, clock).has_value());
  }
}

TEST_CASE("room: a pool can be resized to what it was opened for, whole units or not") {
  NodeOptions options = Pool::plain(3 * kMiB);
  Pool pool(options);
  CHECK(pool.node->resize(3 * kMiB, 0, test::never_hung()).has_value());
  CHECK(pool.node->resize(pool.node->stats().bytes_max, 0, test::never_hung()).has_value());
  CHECK(pool.node->resize(1, 0, test::never_hung()).value() <= kUnitBytes);
  for (const std::uint64_t bytes : {std::uint64_t{0}, 5 * kMiB, ~std::uint64_t{0}})
    CHECK_FALSE(pool.node->resize(bytes, 0, test::never_hung()).has_value());
}

TEST_CASE("room: block sizes from one byte to the limit, and a clear refusal of the others") {
  Pool pool(Pool::plain(16 * kMiB));
  for (const std::uint64_t bytes : {std::uint64_t{0}, 16 * kMiB + 1, std::uint64_t{1} << 31,
                                    (std::uint64_t{1} << 31) + 1, ~std::uint64_t{0}})
    CHECK_FALSE(pool.node->open_namespace(key_of(bytes), bytes).has_value());
  CHECK(pool.node->open_namespace(key_of(1), 16 * kMiB).has_value());
  REQUIRE(pool.node->open_namespace(key_of(2), 100).has_value());
  // The same id with other sizes is refused, however often, and takes nothing from others.
  for (std::uint64_t i = 1; i <= 1000; ++i)
    CHECK_FALSE(pool.node->open_namespace(key_of(2), 100 + i * kPageBytes).has_value());
  CHECK(pool.node->open_namespace(key_of(3), 3'000'000).has_value());
}

// Without a node, which would make 2 GiB of pages: of these two are touched.
TEST_CASE("room: blocks of nearly 2^31 bytes keep their length and their last byte") {
  for (const std::uint64_t bytes : {(1ull << 31) - 4095, 1ull << 31}) {
    StoreOptions options;
    options.bytes_limit = 2ull << 31;
    auto store = Store::create(options);
    REQUIRE(store.has_value());
    const auto space = (*store)->open_namespace(key_of(1), bytes);
    REQUIRE(space.has_value());
    for (std::uint64_t n = 1; n <= 3; ++n) {
      const auto reserved = (*store)->reserve(**space, key_of(n), 0);
      REQUIRE(reserved.outcome == Store::Reserved::Outcome::reserved);
      (*store)->arena().base()[reserved.offset + bytes - 1] = static_cast<std::byte>(n);
      (*store)->commit(reserved.record, {}, kNoBlock, 0);
      Found found;
      REQUIRE(IndexReader((*store)->view()).find(key_of(n), (*space)->incarnation, found));
      CHECK(found.bytes == bytes);
      CHECK((*store)->arena().base()[found.offset + bytes - 1] == static_cast<std::byte>(n));
    }
    CHECK((*store)->resident() == 2);
    (*store)->check_invariants();
  }
}

TEST_CASE("room: a limit of blocks beyond all numbers is no limit, and leaves the ghosts alone") {
  for (const std::uint64_t limit : {std::uint64_t{1} << 60, ~std::uint64_t{0}}) {
    Pool pool(Pool::plain(16 * kMiB, limit));
    Namespace& space = pool.space(1, 64 * kKiB);
    for (std::uint64_t n = 0; n < 1000; ++n)
      REQUIRE(pool.put(space, key_of(n)) == PutStatus::stored);
    CHECK(pool.node->stats().policy.ghosts > 700);
    pool.check_at_rest();
  }
}

TEST_CASE("room: dropped blocks go before blocks that somebody may still want") {
  Pool pool(Pool::plain(16 * kMiB, 100));
  Namespace &kept = pool.space(1, 4 * kKiB), &dropped = pool.space(2, 4 * kKiB);
  for (std::uint64_t n = 0; n < 50; ++n) pool.put(kept, key_of(n));
  pool.clock->set(10);
  for (std::uint64_t n = 100; n < 150; ++n) pool.put(dropped, key_of(n));
  pool.node->drop_namespace(dropped, test::never_hung());
  for (std::uint64_t n = 200; n < 240; ++n) pool.put(kept, key_of(n));
  CHECK(count_present(pool, kept, 0, 50) == 50);
  pool.check_at_rest();
}

double process_seconds() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

TEST_CASE("room: an idle node takes no processor time") {
  NodeOptions options = Pool::plain(64 * kMiB);
  options.prefault = Prefault::ahead;
  options.evict_ahead = 0.05;
  Pool pool(options);
  Namespace& space = pool.space(1, 64 * kKiB);
  for (std::uint64_t n = 0; n < 2000; ++n) pool.put(space, key_of(n));
  pool.settle();
  const double before = process_seconds();
  std::this_thread::sleep_for(1s);  // what is measured, not waited for
  const double used = process_seconds() - before;
  MESSAGE("processor ms in one idle second: " << used * 1000);
  CHECK(used < 0.05);
}

}  // namespace
}  // namespace kvpool
