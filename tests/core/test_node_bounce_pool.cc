#include "node/bounce_pool.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "block_random.h"
#include "core_build.h"

namespace kvpool {
namespace {

constexpr std::size_t kMega = 1 << 20;

TEST_CASE("bounce: a buffer is aligned, all of it is usable, and it is nobody else's") {
  BouncePool pool;
  std::vector<Bounce> held;
  std::set<std::byte*> seen;
  for (const std::size_t bytes : {std::size_t{4096}, 5 * std::size_t{4096}, 3 * kMega, kMega})
    for (int i = 0; i < 4; ++i) {
      held.push_back(pool.take(bytes));
      std::byte* memory = held.back().memory();
      REQUIRE(memory != nullptr);
      CHECK(reinterpret_cast<std::uintptr_t>(memory) % 4096 == 0);
      CHECK(seen.insert(memory).second);
      std::memset(memory, i, bytes);
    }
}

TEST_CASE("bounce: a buffer given back is the next one of its size") {
  BouncePool pool;
  std::byte* first = nullptr;
  {
    const Bounce bounce = pool.take(kMega);
    first = bounce.memory();
    *first = std::byte{7};
  }
  const Bounce other = pool.take(2 * kMega);
  CHECK(other.memory() != first);
  const Bounce again = pool.take(kMega);
  CHECK(again.memory() == first);
  CHECK(*first == std::byte{7});  // the same pages, not new ones at that address
}

TEST_CASE("bounce: a moved buffer is given back once, by its last holder") {
  BouncePool pool;
  Bounce a = pool.take(kMega);
  std::byte* memory = a.memory();
  Bounce b(std::move(a));
  CHECK(b.memory() == memory);
  {
    Bounce c;
    c = std::move(b);
    CHECK(c.memory() == memory);
    const Bounce other = pool.take(kMega);  // c has it still
    CHECK(other.memory() != memory);
  }
  std::set<std::byte*> free;
  std::vector<Bounce> taken;
  for (int i = 0; i < 3; ++i) {
    taken.push_back(pool.take(kMega));
    CHECK(free.insert(taken.back().memory()).second);
  }
}

TEST_CASE("bounce: what the machine cannot give is said, not thrown") {
  BouncePool pool;
  const Bounce none = pool.take(std::size_t{1} << 60);
  CHECK(none.memory() == nullptr);
  const Bounce some = pool.take(4096);
  CHECK(some.memory() != nullptr);
}

// More than is kept: 128 MiB. Pages are only addresses here until they are touched, but each buffer
// comes populated, so few large ones.
TEST_CASE("bounce: the pool keeps no more than it may") {
  BouncePool pool;
  std::byte* oldest = nullptr;
  {
    std::vector<Bounce> held;
    for (int i = 0; i < 5; ++i) held.push_back(pool.take(32 * kMega));
    oldest = held.front().memory();
    *oldest = std::byte{9};
    for (Bounce& bounce : held) Bounce(std::move(bounce));  // oldest first: it makes way
  }
  std::size_t same_pages = 0;
  std::vector<Bounce> held;
  for (int i = 0; i < 5; ++i) {
    held.push_back(pool.take(32 * kMega));
    same_pages += *held.back().memory() == std::byte{9};
  }
  CHECK(same_pages == 0);
}

TEST_CASE("bounce: many threads never hold the same buffer") {
  test::Random random("bounce threads");
  BouncePool pool;
  std::vector<std::thread> threads;
  std::vector<int> wrong(4, 0);
  for (int id = 0; id < 4; ++id)
    threads.emplace_back([&, id, seed = random.engine()()] {
      std::mt19937_64 engine(seed);
      for (std::size_t i = 0; i < test::scaled(500); ++i) {
        const std::size_t bytes = (engine() % 3 + 1) * 4096;
        const Bounce bounce = pool.take(bytes);
        std::memset(bounce.memory(), id + 1, bytes);
        std::this_thread::yield();
        for (std::size_t at = 0; at < bytes; at += 512)
          wrong[static_cast<std::size_t>(id)] +=
              bounce.memory()[at] != static_cast<std::byte>(id + 1);
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const int count : wrong) CHECK(count == 0);
}

}  // namespace
}  // namespace kvpool
