// Clients that pin by naming slots: a slot that is named keeps its bytes and its pages,
// whatever happens to the block; once it is named no more, it comes back.
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <thread>

#include "node/hazards.h"
#include "node_cases.h"

namespace kvpool {
namespace {

using test::key_of;
using test::keys_from;
using test::kMiB;
using test::Pool;

constexpr std::uint64_t kBlock = 256 << 10;  // 8 of them in the 2 MiB that the pools here have

// A client of the same process: its page, and an index reader of its own.
struct Client {
  explicit Client(Pool& of) : pool(of), page(std::make_unique<ClientPage>()) {
    of.node->attach(*page);
  }
  ~Client() {
    if (attached) pool.node->detach(*page);
  }
  void leave() {
    pool.node->detach(*page);
    attached = false;
  }

  // As a client does: name, fence, look again.
  bool pin(std::uint32_t word, const Namespace& space, const Hash128& key) {
    Found& found = pins[word];
    IndexReader reader = reader_of();
    if (!reader.find(key, space.incarnation.load(), found)) return false;
    auto& hazards = page->hazards;
    hazards.in_use[word / 64].fetch_or(1ull << (word % 64), std::memory_order_relaxed);
    hazards.word[word].store(Hazards::word_of(found.offset), std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (reader.still_there(found)) return true;
    unpin(word);
    return false;
  }
  void unpin(std::uint32_t word) {
    page->hazards.word[word].store(0, std::memory_order_release);
    page->hazards.in_use[word / 64].fetch_and(~(1ull << (word % 64)), std::memory_order_release);
  }
  bool is_whole(std::uint32_t word, const Hash128& key, std::uint64_t version = 0) const {
    return test::is_payload(pool.node->arena() + pins[word].offset, pins[word].bytes, key, version);
  }

  IndexReader reader_of() const {
    if (!mapped) {
      const auto memory = pool.node->open_index();
      REQUIRE(memory);
      index_bytes = pool.node->index_bytes();
      mapped = mmap(nullptr, index_bytes, PROT_READ, MAP_SHARED, *memory, 0);
      REQUIRE(mapped != MAP_FAILED);
      close(*memory);
    }
    return IndexReader(
        {static_cast<std::byte*>(mapped), const_cast<std::byte*>(pool.node->arena())});
  }

  Pool& pool;
  std::unique_ptr<ClientPage> page;
  std::array<Found, kHazards> pins;
  bool attached = true;
  mutable void* mapped = nullptr;
  mutable std::uint64_t index_bytes = 0;
};

// The node's own thread looks at what is held; a test waits for it to have done so.
std::uint64_t held_after_a_look(Pool& pool) {
  pool.settle();
  return pool.node->stats().held_slots;
}

TEST_CASE("hazards: a page names what its used words say, and nothing else") {
  auto page = std::make_unique<ClientPage>();
  HazardBoard board;
  CHECK_FALSE(board.names(7));
  board.add(page->hazards);
  for (const std::uint32_t word : {0u, 63u, 64u, kHazards - 1}) {
    page->hazards.word[word] = Hazards::word_of(word + 7);
    CHECK_FALSE(board.names(word + 7));  // not said to be in use
    page->hazards.in_use[word / 64] = 1ull << (word % 64);
    CHECK(board.names(word + 7));
    CHECK_FALSE(board.names(word + 8));
    page->hazards.in_use[word / 64] = 0;
  }
  board.remove(page->hazards);
  page->hazards.in_use[0] = ~0ull;
  CHECK_FALSE(board.names(7));
}

TEST_CASE("hazards: a named block is not evicted, and may be once it is named no more") {
  Pool pool(Pool::plain(2 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  const auto keys = keys_from(0, 20);
  Client client(pool);
  REQUIRE(pool.put(space, keys[0]) == PutStatus::stored);
  REQUIRE(client.pin(200, space, keys[0]));
  for (std::size_t i = 1; i < keys.size(); ++i)
    REQUIRE(pool.put(space, keys[i]) == PutStatus::stored);
  CHECK(pool.has(space, keys[0]));  // the coldest of all
  CHECK(client.is_whole(200, keys[0]));
  pool.node->check_invariants();
  client.unpin(200);
  pool.settle();
  for (const Hash128& key : keys_from(100, 20)) REQUIRE(pool.put(space, key) == PutStatus::stored);
  CHECK_FALSE(pool.has(space, keys[0]));
  pool.check_at_rest();
}

TEST_CASE("hazards: when all is named a put has no room, and has it when one is let go") {
  Pool pool(Pool::plain(2 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  Client client(pool);
  const auto keys = keys_from(0, 8);
  for (std::uint32_t i = 0; i < keys.size(); ++i) {
    REQUIRE(pool.put(space, keys[i]) == PutStatus::stored);
    REQUIRE(client.pin(i, space, keys[i]));
  }
  CHECK(pool.put(space, key_of(50)) == PutStatus::pool_pinned);
  pool.node->check_invariants();
  client.unpin(5);  // the put itself looks: it does not wait for the node's thread
  CHECK(pool.put(space, key_of(50)) == PutStatus::stored);
  CHECK_FALSE(pool.has(space, keys[5]));
  for (std::uint32_t i = 0; i < keys.size(); ++i)
    if (i != 5) CHECK(client.is_whole(i, keys[i]));
  client.leave();
  pool.check_at_rest();
}

TEST_CASE("hazards: a block that is removed or dropped keeps its bytes for who names it") {
  for (const bool drops : {false, true}) {
    CAPTURE(drops);
    Pool pool(Pool::plain(2 * kMiB));
    Namespace& space = pool.space(1, kBlock);
    Client client(pool);
    const auto keys = keys_from(0, 2);
    pool.put(space, keys);
    REQUIRE(client.pin(0, space, keys[0]));
    if (drops)
      REQUIRE(pool.node->drop_namespace(space, test::never_hung()));
    else
      REQUIRE(pool.node->remove(space, keys) == 2);
    CHECK_FALSE(client.pin(1, space, keys[0]));  // nobody can name it any more
    pool.settle();
    CHECK(pool.node->stats().held_slots == 1);
    pool.node->check_invariants();
    // All other room is used, several times over.
    for (const Hash128& key : keys_from(10, 40)) REQUIRE(pool.put(space, key) == PutStatus::stored);
    pool.node->trim();
    CHECK(client.is_whole(0, keys[0]));
    CHECK(pool.node->stats().held_slots == 1);
    client.unpin(0);
    CHECK(held_after_a_look(pool) == 0);
    pool.check_at_rest();
  }
}

TEST_CASE("hazards: what a client names is free when it has left") {
  Pool pool(Pool::plain(2 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  Client dying(pool), other(pool);
  const auto keys = keys_from(0, 4);
  pool.put(space, keys);
  for (std::uint32_t i = 0; i < 4; ++i) REQUIRE(dying.pin(i, space, keys[i]));
  REQUIRE(other.pin(9, space, keys[3]));
  REQUIRE(pool.node->remove(space, keys) == 4);
  CHECK(pool.node->stats().held_slots == 4);
  dying.leave();
  CHECK(pool.node->stats().held_slots == 1);
  CHECK(other.is_whole(9, keys[3]));
  other.leave();
  CHECK(pool.node->stats().held_slots == 0);
  pool.check_at_rest();
}

TEST_CASE("hazards: a block pinned by request and by name goes with the later of the two") {
  for (const bool name_first : {false, true}) {
    CAPTURE(name_first);
    Pool pool(Pool::plain(2 * kMiB));
    Namespace& space = pool.space(1, kBlock);
    Client client(pool);
    const Hash128 key = key_of(1);
    REQUIRE(pool.put(space, key) == PutStatus::stored);
    Lease lease;
    REQUIRE(client.pin(0, space, key));
    REQUIRE(pool.node->acquire(space, {&key, 1}, &lease) == 1);
    REQUIRE(pool.node->remove(space, {&key, 1}) == 1);
    pool.node->check_invariants();
    if (name_first) client.unpin(0);
    pool.settle();
    CHECK(client.is_whole(0, key));
    pool.node->release({&lease, 1});
    CHECK(pool.node->stats().held_slots == (name_first ? 0 : 1));
    if (!name_first) CHECK(client.is_whole(0, key));
    if (!name_first) client.unpin(0);
    CHECK(held_after_a_look(pool) == 0);
    pool.check_at_rest();
  }
}

TEST_CASE("hazards: a shrink goes round a named block, and ends when it is let go") {
  Pool pool(Pool::plain(8 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  Client client(pool);
  const auto keys = keys_from(0, 32);
  pool.put(space, keys);
  // One in each slab.
  for (std::uint32_t i = 0; i < 4; ++i) REQUIRE(client.pin(i, space, keys[8 * i + 3]));
  const auto shrunk =
      pool.node->resize(2 * kMiB, std::nullopt, test::after(std::chrono::seconds(0)));
  REQUIRE(shrunk);
  pool.settle();
  CHECK(pool.node->stats().bytes_committed > 2 * kMiB);
  for (std::uint32_t i = 0; i < 4; ++i) CHECK(client.is_whole(i, keys[8 * i + 3]));
  pool.node->check_invariants();
  for (std::uint32_t i = 0; i < 4; ++i) client.unpin(i);
  const auto deadline = test::never_hung();
  while (pool.node->stats().bytes_committed > 2 * kMiB) {
    REQUIRE(std::chrono::steady_clock::now() < deadline);
    pool.settle();
  }
  pool.check_at_rest();
}

// Another class takes slabs by moving blocks together: a block that is named in the middle of it
// keeps its old place too.
TEST_CASE("hazards: bytes stay while pools are churned by two sizes and readers come and go") {
  test::Random random("hazards: churn");
  Pool pool(Pool::plain(8 * kMiB));
  std::array<Namespace*, 2> spaces{&pool.space(1, kBlock), &pool.space(2, 96 << 10)};
  Client client(pool);
  std::array<Hash128, 24> held{};
  std::array<bool, 24> is_held{};
  std::uint64_t pinned = 0;
  for (std::uint64_t step = 0; step < test::scaled(1500); ++step) {
    Namespace& space = *spaces[random.between<std::size_t>(0, 1)];
    const Hash128 key = key_of(random.between<std::uint64_t>(0, 60));
    const auto word = random.between<std::uint32_t>(0, 23);
    if (is_held[word]) {
      REQUIRE(client.is_whole(word, held[word]));
      client.unpin(word);
      is_held[word] = false;
    } else if (client.pin(word, space, key)) {
      held[word] = key;
      is_held[word] = true;
      ++pinned;
    }
    switch (random.between<int>(0, 9)) {
      case 0:
        pool.node->remove(space, {&key, 1});
        break;
      case 1:
        REQUIRE(pool.node->resize(random.between<std::uint64_t>(2, 4) * 2 * kMiB, std::nullopt,
                                  test::after(std::chrono::seconds(0))));
        break;
      default:
        pool.put(space, key);
    }
    if (step % 64 == 0) pool.node->check_invariants();
    for (std::uint32_t i = 0; i < 24; ++i)
      if (is_held[i]) REQUIRE(client.is_whole(i, held[i]));
  }
  CHECK(pinned > test::scaled(1500) / 20);
  client.leave();
  pool.check_at_rest();
}

TEST_CASE("hazards: what clients used is hot, and what they counted is told") {
  Pool pool(Pool::plain(2 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  const auto keys = keys_from(0, 8);
  pool.put(space, keys);
  {
    Client client(pool);
    Found found;
    REQUIRE(client.reader_of().find(keys[0], space.incarnation.load(), found));
    auto& ring = client.page->touches;
    for (int i = 0; i < 50; ++i)
      ring.put(ring.claim(1),
               {found.generation, found.record, 1e9});  // its clock counts for nothing
    client.page->traffic.in_use = 1 << 5;
    TrafficRow& row = client.page->traffic[5];
    row[TrafficRow::space] = space.number + 1;
    row[TrafficRow::gets] += 50;
    row[TrafficRow::loaded] += 50;
    pool.clock->set(1);
    CHECK(*pool.node->temperature(space, keys[0]) > *pool.node->temperature(space, keys[7]));
    CHECK(pool.node->stats().gets == 50);
    CHECK(pool.node->stats().clients == 1);
  }
  CHECK(pool.node->stats().gets == 50);
  CHECK(pool.node->stats().clients == 0);
  for (const Hash128& key : keys_from(20, 7)) REQUIRE(pool.put(space, key) == PutStatus::stored);
  CHECK(pool.has(space, keys[0]));
  pool.check_at_rest();
}

TEST_CASE("hazards: a page of garbage harms nobody") {
  test::Random random("hazards: garbage");
  Pool pool(Pool::plain(2 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  Client hostile(pool);
  std::atomic<bool> ends{false};
  std::thread scribbler([&] {
    auto* words = reinterpret_cast<std::atomic<std::uint64_t>*>(hostile.page.get());
    test::Random own("hazards: garbage, the writer");
    while (!ends.load()) {
      const auto at = own.between<std::size_t>(0, sizeof(ClientPage) / 8 - 1);
      words[at].store(own.between<std::uint64_t>(0, 2) == 0 ? own.between<std::uint64_t>(0, 500)
                                                            : own.engine()(),
                      std::memory_order_relaxed);
    }
  });
  for (std::uint64_t step = 0; step < test::scaled(2000); ++step) {
    const Hash128 key = key_of(random.between<std::uint64_t>(0, 30));
    pool.put(space, key);  // there may be no room: it pins what it names
    pool.get(space, {&key, 1});
    if (step % 128 == 0) pool.settle();
  }
  ends = true;
  scribbler.join();
  pool.node->check_invariants();
  hostile.leave();
  pool.check_at_rest();
  for (const Hash128& key : keys_from(100, 8)) CHECK(pool.put(space, key) == PutStatus::stored);
}

TEST_CASE("wait: ends with the commit that completes the prefix, and not before") {
  Pool pool(Pool::plain(4 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  const auto keys = keys_from(0, 3);
  std::atomic<std::size_t> present{99};
  std::thread waiter([&] { present = pool.node->wait(space, keys, test::never_hung(), {}); });
  for (std::size_t i : {1u, 0u, 2u}) {
    const auto deadline = test::never_hung();
    while (pool.node->stats().waiting == 0) {
      REQUIRE(std::chrono::steady_clock::now() < deadline);
      std::this_thread::yield();
    }
    CHECK(present == 99);
    REQUIRE(pool.put(space, keys[i]) == PutStatus::stored);
  }
  waiter.join();
  CHECK(present == 3);
  CHECK(pool.node->stats().waiting == 0);
}

TEST_CASE("wait: ends at its deadline, when it is given up, dropped under or closed") {
  Pool pool(Pool::plain(4 * kMiB));
  Namespace& space = pool.space(1, kBlock);
  const auto keys = keys_from(0, 2);
  REQUIRE(pool.put(space, keys[0]) == PutStatus::stored);
  CHECK(pool.node->wait(space, keys, test::after(std::chrono::milliseconds(0)), {}) == 1);
  CHECK(pool.node->wait(space, keys, test::after(std::chrono::milliseconds(20)), {}) == 1);
  int asked = 0;
  CHECK(pool.node->wait(space, keys, test::never_hung(), [&] { return ++asked > 2; }) == 1);
  CHECK(pool.node->wait(space, {}, test::never_hung(), {}) == 0);
  const auto wait_until_waiting = [&] {
    const auto deadline = test::never_hung();
    while (pool.node->stats().waiting == 0) {
      REQUIRE(std::chrono::steady_clock::now() < deadline);
      std::this_thread::yield();
    }
  };
  std::size_t present = 99;
  std::thread dropped([&] { present = pool.node->wait(space, keys, test::never_hung(), {}); });
  wait_until_waiting();
  REQUIRE(pool.node->drop_namespace(space, test::never_hung()));
  REQUIRE(pool.put(space, keys).back() == PutStatus::stored);  // of the incarnation after the drop
  dropped.join();
  CHECK(present == 2);
  REQUIRE(pool.node->remove(space, keys) == 2);
  std::thread closed([&] { present = pool.node->wait(space, keys, test::never_hung(), {}); });
  wait_until_waiting();
  pool.node->close({});
  closed.join();
  CHECK(present == 0);
}

}  // namespace
}  // namespace kvpool
