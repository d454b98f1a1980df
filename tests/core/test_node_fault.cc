// Every step of put and get fails in turn: the caller is told, a get gives the right bytes or a
// miss, nothing leaks, and the next call works.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <future>

#include "node/node.h"
#include "node_cases.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;
using test::key_of;
using test::keys_from;
using test::kKiB;
using test::kMiB;
using test::Pool;

constexpr std::uint64_t kBlock = 64 * kKiB;

struct PutStep {
  const char* point;
  PutStatus told;
};
constexpr PutStep kPutSteps[] = {{"put.reserve", PutStatus::failed},
                                 {"put.pages", PutStatus::no_memory},
                                 {"put.copy", PutStatus::failed},
                                 {"put.commit", PutStatus::failed}};

TEST_CASE("fault: a put that fails at any step leaves no block and breaks its chain there") {
  for (const PutStep& step : kPutSteps)
    for (std::uint64_t at = 0; at < 4; ++at) {
      CAPTURE(std::string(step.point));
      CAPTURE(at);
      Pool pool(Pool::plain(16 * kMiB));
      Namespace& space = pool.space(1, kBlock);
      const auto keys = keys_from(0, 4);
      pool.node->faults().fail(step.point, 1, at);
      const auto statuses = pool.put(space, keys);
      CHECK(pool.node->faults().hits(step.point) == 1);
      for (std::uint64_t i = 0; i < 4; ++i)
        CHECK(statuses[i] == (i < at    ? PutStatus::stored
                              : i == at ? step.told
                                        : PutStatus::chain_broken));
      CHECK(pool.get(space, keys) == at);
      const NodeStats stats = pool.node->stats();
      CHECK(stats.blocks == at);
      CHECK(stats.bytes_taken == at * kBlock);
      CHECK(stats.not_stored == 4 - at);
      pool.check_at_rest();
      CHECK(pool.put(space, std::span(keys).subspan(at))[0] == PutStatus::stored);
      CHECK(pool.get(space, keys) == 4);
      CHECK(pool.node->faults().hits(step.point) == 1);
    }
}

TEST_CASE("fault: a put that fails again and again leaks neither slots nor records") {
  Pool pool(Pool::plain(2 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  const auto keys = keys_from(0, 32);
  for (const PutStep& step : kPutSteps) {
    pool.node->faults().fail(step.point, 1'000, 0);
    for (std::uint64_t n = 0; n < 1'000; ++n)
      REQUIRE(pool.put(space, key_of(100 + n)) == step.told);
    REQUIRE(pool.node->faults().hits(step.point) == 1'000);
  }
  CHECK(pool.node->stats().store.evictions == 0);
  pool.check_at_rest();
  for (const PutStatus status : pool.put(space, keys)) CHECK(status == PutStatus::stored);
  CHECK(pool.get(space, keys) == 32);
  CHECK(pool.node->stats().bytes_books < 64 * kKiB);
}

TEST_CASE("fault: a reservation that fails at reserve or for want of pages leaves nothing") {
  for (const PutStep& step : std::span(kPutSteps).first(2)) {
    Pool pool(Pool::plain(16 * kMiB));
    Namespace& space = pool.space(1, kBlock);
    const auto keys = keys_from(0, 2);
    REQUIRE(pool.put(space, keys[0]) == PutStatus::stored);
    pool.node->faults().fail(step.point, 1, 0);
    Ticket ticket;
    CHECK(pool.node->reserve({space, {&keys[1], 1}, &keys[0], test::never_hung()}, ticket) ==
          step.told);
    CHECK(pool.node->faults().hits(step.point) == 1);
    pool.check_at_rest();
    CHECK(pool.put(space, keys[1]) == PutStatus::stored);
  }
}

TEST_CASE("fault: a get that fails at any step counts as missing from there on") {
  struct Step {
    const char* point;
    std::uint64_t times;  // passes of it that must fail before the block is given up
  };
  for (const Step& step :
       {Step{"get.lookup", 1}, Step{"get.copy", 3}, Step{"get.deliver", 1}, Step{"get.acquire", 1}})
    for (std::uint64_t at = 0; at < 3; ++at) {
      CAPTURE(std::string(step.point));
      Pool pool(Pool::plain(16 * kMiB));
      Namespace& space = pool.space(1, kBlock);
      const auto keys = keys_from(0, 3);
      pool.put(space, keys);
      FaultPoints& faults = pool.node->faults();
      const std::string point = step.point;
      const bool is_last_try = point == "get.deliver" || point == "get.acquire";
      // The last try, with a pin, is made after three copies that failed.
      if (is_last_try || point == "get.copy") faults.fail("get.copy", 3, at);
      if (point != "get.copy") faults.fail(point, 1, is_last_try ? 0 : at);
      const std::size_t expected = point == "get.copy" ? 3 : at;
      CHECK(pool.get(space, keys) == expected);
      CHECK(faults.hits(point) == step.times);
      const NodeStats stats = pool.node->stats();
      CHECK(stats.missed_absent == 0);
      CHECK(stats.missed_fault + stats.missed_moved == (expected == 3 ? 0 : 1));
      CHECK(stats.pinned == 0);
      pool.check_at_rest();
      CHECK(pool.get(space, keys) == 3);
    }
}

TEST_CASE("fault: a copy that fails once is tried again, and the block delivered") {
  for (std::uint64_t times = 1; times <= 3; ++times) {
    Pool pool(Pool::plain(16 * kMiB));
    Namespace& space = pool.space(1, kBlock);
    const auto keys = keys_from(0, 2);
    pool.put(space, keys);
    pool.node->faults().fail("get.copy", times, 1);
    CHECK(pool.get(space, keys) == 2);
    CHECK(pool.node->faults().hits("get.copy") == times);
    CHECK(pool.node->stats().pinned == 0);
  }
}

TEST_CASE("fault: an acquire that fails pins nothing beyond what it returned") {
  Pool pool(Pool::plain(16 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  const auto keys = keys_from(0, 5);
  pool.put(space, keys);
  pool.node->faults().fail("get.acquire", 1, 2);
  std::vector<Lease> leases(5);
  CHECK(pool.node->acquire(space, keys, leases.data()) == 2);
  CHECK(pool.node->faults().hits("get.acquire") == 1);
  CHECK(pool.node->stats().pinned == 2);
  pool.node->release(std::span(leases).first(2));
  pool.check_at_rest();
}

TEST_CASE("fault: a writer held at any step blocks nobody else, and what it held comes back") {
  for (const char* point : {"put.pages", "put.copy", "put.commit"}) {
    CAPTURE(std::string(point));
    Pool pool(Pool::plain(16 * kMiB));
    Namespace& space = pool.space(1, kBlock);
    const auto keys = keys_from(0, 8);
    pool.node->faults().pause(point, 60s);
    auto held = std::async(std::launch::async, [&] { return pool.put(space, keys[0]); });
    test::wait_for_waiter(*pool.node, point);
    pool.node->faults().fail(point, 0, 0);
    CHECK_FALSE(pool.has(space, keys[0]));
    CHECK(pool.get(space, keys) == 0);
    CHECK(pool.node->stats().reserved == 1);
    test::KeySource source({&keys[0], 1}, kBlock);
    PutStatus status{};
    pool.node->put({space, {&keys[0], 1}, nullptr, test::after(1ms)}, source, &status);
    CHECK(status == PutStatus::timed_out);
    pool.node->drop_namespace(space, test::never_hung());
    pool.node->faults().resume(point);
    CHECK(held.get() == PutStatus::dropped);
    CHECK(pool.node->stats().bytes_taken == 0);
    pool.check_at_rest();
  }
}

// The mapping of the pool is laid over a file that is too short: the kernel then refuses pages in
// the same place, and with the same result, as where it has none left.
void refuse_pages(const Node& node) {
  const int empty = memfd_create("kvpool-empty", MFD_CLOEXEC);
  REQUIRE(empty >= 0);
  void* const at = const_cast<std::byte*>(node.arena());
  REQUIRE(mmap(at, node.arena_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, empty, 0) ==
          at);
  close(empty);
}

TEST_CASE("fault: pages that the machine refuses are a reason, not a crash, and not counted") {
  for (const bool huge : {false, true}) {
    NodeOptions options = Pool::plain(16 * kMiB);
    options.huge_pages = huge;
    Pool pool(options);
    Namespace& space = pool.space(1, kBlock);
    refuse_pages(*pool.node);
    for (std::uint64_t n = 0; n < 3; ++n) CHECK(pool.put(space, key_of(n)) == PutStatus::no_memory);
    Ticket ticket;
    const Hash128 key = key_of(1);
    CHECK(pool.node->reserve({space, {&key, 1}, nullptr, test::never_hung()}, ticket) ==
          PutStatus::no_memory);
    const NodeStats stats = pool.node->stats();
    CHECK(stats.bytes_taken == 0);
    CHECK(stats.bytes_committed == 0);
    CHECK(stats.bytes_arena == 0);
    pool.check_at_rest();
  }
}

TEST_CASE("fault: no writer relies on pages that another one is still making") {
  StoreOptions options;
  options.bytes_limit = 2 * kUnitBytes;
  const auto store = std::move(*Store::create(options));
  Namespace& space = **store->open_namespace(key_of(~1ull), kBlock);
  const auto reserve = [&](std::uint64_t n) { return store->reserve(space, key_of(n), 0); };
  const auto first = reserve(1), second = reserve(2);
  CHECK(first.makes_slab);
  CHECK(first.pages_bytes == kUnitBytes);
  CHECK_FALSE(second.makes_slab);
  CHECK(second.pages_offset == second.offset);
  CHECK(second.pages_bytes == kBlock);
  store->pages_made(first.record, false);
  store->abort(first.record);
  const auto third = reserve(3);  // the first one was refused, so this one tries again
  CHECK(third.makes_slab);
  store->pages_made(third.record, true);
  CHECK(reserve(4).pages_bytes == 0);
  store->check_invariants();
}

TEST_CASE("fault: a node that is refused pages comes to rest, and takes no processor time") {
  for (const Prefault prefault : {Prefault::ahead, Prefault::all}) {
    NodeOptions options = Pool::plain(512 * kMiB);
    options.prefault = prefault;
    options.warm_threads = 2;
    Pool pool(options);
    pool.node->trim();
    refuse_pages(*pool.node);
    CHECK(pool.node->settle(test::after(10s)));
  }
}

TEST_CASE("fault: points count what failed and what waited, and nothing else") {
  FaultPoints points;
  CHECK_FALSE(points.fires("a"));
  points.fail("a", 2, 3);
  CHECK_FALSE(points.fires("b"));
  for (int i = 0; i < 3; ++i) CHECK_FALSE(points.fires("a"));
  CHECK(points.hits("a") == 0);
  CHECK(points.fires("a"));
  CHECK(points.fires("a"));
  CHECK_FALSE(points.fires("a"));
  CHECK(points.hits("a") == 2);
  points.pause("b", 60s);
  auto waits = std::async(std::launch::async, [&] { return points.fires("b"); });
  while (points.waiting("b") == 0) std::this_thread::yield();
  points.clear();  // lets it go
  CHECK_FALSE(waits.get());
  CHECK(points.waiting("b") == 0);
  CHECK(points.hits("b") == 1);
  CHECK_FALSE(points.fires("a"));
  points.pause("c", 1ms);  // nobody resumes it
  CHECK_FALSE(points.fires("c"));
  CHECK(points.hits("c") == 1);
}

}  // namespace
}  // namespace kvpool
