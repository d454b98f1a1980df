#include <algorithm>
#include <thread>

#include "block_random.h"
#include "net/ucx_lane.h"
#include "net_ucx.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;
using test::count_of;
using test::no_ucx;
using test::UcxBlocks;
using test::UcxPeerProcess;
using test::UcxReader;
using Clock = std::chrono::steady_clock;

Clock::time_point after(Clock::duration wait) { return Clock::now() + wait; }

// What the peer holds, told by its seed.
std::vector<std::byte> held_by(std::uint64_t bytes, std::uint64_t seed) {
  std::vector<std::byte> held(bytes);
  test::fill_arena(held, seed);
  return held;
}

// True: there is nothing to test here.
bool is_skipped(const std::string& kind) {
  const std::string why = no_ucx(kind);
  if (why.empty()) return false;
  MESSAGE("not tested: " << why);
  CHECK_FALSE(why.empty());
  return true;
}

void read_at_random(const std::string& kind) {
  test::Random random("ucx reads");
  const std::uint64_t bytes = 32ull << 20, seed = test::run_seed();
  const UcxPeerProcess holder(kind, bytes, seed);
  const auto held = held_by(bytes, seed);
  const UcxReader reader(kind);
  const auto peer = reader.connect(holder.address());
  CHECK(peer->arena_bytes() == bytes);
  std::uint64_t asked = 0;
  for (std::size_t left = test::scaled(1000); left > 0;) {
    const std::size_t count = std::min(left, random.between<std::size_t>(1, 100));
    left -= count;
    std::vector<std::vector<std::byte>> into;
    std::vector<UcxPlace> places;
    for (std::size_t i = 0; i < count; ++i) {
      const auto length = random.between<std::uint64_t>(1, 1 << random.between(0, 20));
      const auto offset = random.between<std::uint64_t>(0, bytes - length);
      into.emplace_back(length, std::byte{0xee});
      places.push_back({.offset = offset,
                        .bytes = length,
                        .sum = checksum(held.data() + offset, length),
                        .into = into.back().data()});
      asked += length;
    }
    REQUIRE(count_of(peer->read(places, nullptr, after(30s)), UcxOutcome::whole) == count);
    for (std::size_t i = 0; i < count; ++i)
      REQUIRE(std::memcmp(into[i].data(), held.data() + places[i].offset, into[i].size()) == 0);
  }
  CHECK(reader.lane->totals().whole == test::scaled(1000));
  CHECK(reader.lane->totals().bytes == asked);
}

TEST_CASE("ucx: a thousand reads at random bring the peer's bytes, over tcp") {
  if (!is_skipped("tcp")) read_at_random("tcp");
}

TEST_CASE("ucx: a thousand reads at random bring the peer's bytes, out of its memory") {
  if (!is_skipped("posix,cma")) read_at_random("posix,cma");
}

TEST_CASE("ucx: a block that lies across two registrations comes whole") {
  if (is_skipped("tcp")) return;
  const std::uint64_t bytes = test::kUcxHollowFrom + 2 * kUnitBytes, seed = test::run_seed();
  const UcxPeerProcess holder("tcp", bytes, seed);
  const auto held = held_by(3 * kUnitBytes, seed);
  const UcxReader reader("tcp");
  const auto peer = reader.connect(holder.address());
  for (const std::uint64_t length : {2ull, 4096ull, 1ull << 20}) {
    std::vector<std::byte> into(length);
    const UcxPlace place{.offset = test::kUcxHollowFrom - length / 2,
                         .bytes = length,
                         .sum = checksum(held.data() + kUnitBytes - length / 2, length),
                         .into = into.data()};
    CHECK(peer->read({&place, 1}, nullptr, after(30s)).front() == UcxOutcome::whole);
  }
}

TEST_CASE("ucx: what is outside the peer's arena is not asked for, and the rest is") {
  if (is_skipped("tcp")) return;
  const std::uint64_t bytes = kUnitBytes, seed = test::run_seed();
  const UcxPeerProcess holder("tcp", bytes, seed);
  const auto held = held_by(bytes, seed);
  const UcxReader reader("tcp");
  const auto peer = reader.connect(holder.address());
  std::vector<std::byte> into(8192);
  const auto place = [&](std::uint64_t offset, std::uint64_t length) {
    return UcxPlace{.offset = offset, .bytes = length, .sum = {}, .into = into.data()};
  };
  std::vector<UcxPlace> places = {place(bytes, 1),      place(bytes - 1, 2), place(0, bytes + 1),
                                  place(~0ull, 2),      place(2, ~0ull),     place(~0ull, ~0ull),
                                  place(1ull << 63, 1), place(0, 0)};
  places.push_back(place(0, 1));
  places.back().into = nullptr;
  places.push_back(place(bytes - 4096, 4096));
  places.back().sum = checksum(held.data() + bytes - 4096, 4096);
  const auto outcomes = peer->read(places, nullptr, after(30s));
  CHECK(count_of(outcomes, UcxOutcome::failed) == places.size() - 1);
  CHECK(outcomes.back() == UcxOutcome::whole);
  CHECK_FALSE(peer->is_broken());
  CHECK(peer->read({}, nullptr, after(30s)).empty());
  // More than one read takes: what is too much fails.
  const std::vector<UcxPlace> many(kUcxPlacesMax + 3, places.back());
  const auto most = peer->read(many, nullptr, after(120s));
  CHECK(count_of(most, UcxOutcome::whole) == kUcxPlacesMax);
  CHECK(most.back() == UcxOutcome::failed);
}

TEST_CASE("ucx: a block that is not what was asked for is damaged, never whole") {
  if (is_skipped("tcp")) return;
  const std::uint64_t bytes = 4 * kUnitBytes, seed = test::run_seed();
  const UcxPeerProcess holder("tcp", bytes, seed);
  const UcxReader reader("tcp");
  const auto peer = reader.connect(holder.address());
  UcxBlocks blocks(held_by(bytes, seed), 8, kUnitBytes / 2);
  blocks.places[5].sum.high ^= 1;
  auto outcomes = peer->read(blocks.places, blocks.memory, after(30s));
  CHECK(outcomes[5] == UcxOutcome::damaged);
  CHECK(count_of(outcomes, UcxOutcome::whole) == 7);
  // Other blocks have come into the first two slots since the holder told where they lie.
  holder.rewrite();
  outcomes = peer->read(blocks.places, blocks.memory, after(30s));
  CHECK(outcomes[0] == UcxOutcome::damaged);
  CHECK(outcomes[1] == UcxOutcome::damaged);
  CHECK(count_of(outcomes, UcxOutcome::whole) == 5);
  CHECK(reader.lane->totals().damaged == 4);
  CHECK_FALSE(peer->is_broken());
}

void kill_while_reading(const std::string& kind) {
  const std::uint64_t bytes = 64 * kUnitBytes, seed = test::run_seed();
  UcxPeerProcess holder(kind, bytes, seed), other(kind, bytes, seed + 1);
  const UcxReader reader(kind);
  const auto peer = reader.connect(holder.address());
  const auto held = held_by(bytes, seed);
  UcxBlocks first(held, 1, kUnitBytes), blocks(held, 64, kUnitBytes);
  REQUIRE(peer->read(first.places, nullptr, after(30s)).front() == UcxOutcome::whole);
  std::vector<UcxOutcome> outcomes;
  Clock::time_point returned;
  std::thread waiting([&] {
    outcomes = peer->read(blocks.places, blocks.memory, after(60s));
    returned = Clock::now();
  });
  // Some of the first block is here: the others are asked for.
  const auto* const begun = reinterpret_cast<const volatile std::byte*>(blocks.memory->data());
  while (*begun == std::byte{0x5a} && held[0] != std::byte{0x5a}) std::this_thread::yield();
  const auto killed = Clock::now();
  holder.kill();
  waiting.join();
  // Over shared memory nothing breaks: that the peer is gone a keepalive finds, once a second.
  const bool is_tcp = kind == "tcp";
  CHECK(returned - killed < (is_tcp && !test::kUnderAsan ? 1s : 3s));
  CHECK(count_of(outcomes, UcxOutcome::damaged) == 0);
  const std::size_t whole = count_of(outcomes, UcxOutcome::whole);
  MESSAGE(kind << ": " << whole << " of 64 blocks had come");
  if (whole < 64) CHECK(peer->is_broken());
  CHECK(blocks.memory.use_count() == 1);  // nothing keeps them for bytes that may come
  blocks.set_all(std::byte{0xa5});
  // The next one is told at once, and another peer is read as if nothing had been.
  const auto asked = Clock::now();
  CHECK(peer->read(first.places, nullptr, after(60s)).front() == UcxOutcome::failed);
  CHECK(Clock::now() - asked < (is_tcp ? 1s : 3s));
  UcxBlocks more(held_by(bytes, seed + 1), 64, kUnitBytes);
  const auto next = reader.connect(other.address());
  CHECK(count_of(next->read(more.places, nullptr, after(60s)), UcxOutcome::whole) == 64);
  CHECK(blocks.are_all(std::byte{0xa5}));
  // A peer that is gone before anything is asked of it.
  const auto sought = Clock::now();
  const auto none = reader.lane->connect(holder.address(), after(60s));
  // There nobody answers, and nobody says so: this costs the deadline.
  const auto until = after(is_tcp ? 60s : 1s);
  if (none)
    CHECK((*none)->read(first.places, nullptr, until).front() == UcxOutcome::failed);
  else
    CHECK(none.error().code == Code::refused);
  CHECK(Clock::now() - sought < 3s);
}

TEST_CASE("ucx: a peer that is killed fails all reads within a second, over tcp") {
  if (!is_skipped("tcp")) kill_while_reading("tcp");
}

TEST_CASE("ucx: a peer that is killed fails all reads by keepalives, out of its memory") {
  if (!is_skipped("posix,cma")) kill_while_reading("posix,cma");
}

TEST_CASE("ucx: a peer that is stopped costs a read its deadline, and nothing lands late") {
  if (is_skipped("tcp")) return;
  const std::uint64_t bytes = 64 * kUnitBytes, seed = test::run_seed();
  UcxPeerProcess holder("tcp", bytes, seed);
  const UcxReader reader("tcp");
  auto peer = reader.connect(holder.address());
  const auto held = held_by(bytes, seed);
  UcxBlocks blocks(held, 64, kUnitBytes), others(held, 64, kUnitBytes);
  for (int round = 0; round < 3; ++round) {
    CAPTURE(round);
    REQUIRE(count_of(peer->read(others.places, nullptr, after(60s)), UcxOutcome::whole) == 64);
    holder.signal(SIGSTOP);
    const auto begin = Clock::now();
    const auto outcomes = peer->read(blocks.places, blocks.memory, begin + 200ms);
    const auto took = Clock::now() - begin;
    CHECK(count_of(outcomes, UcxOutcome::whole) < 64);
    CHECK(count_of(outcomes, UcxOutcome::damaged) == 0);
    CHECK(took >= 200ms);
    CHECK(took < 600ms);
    CHECK(peer->is_broken());
    CHECK(reader.lane->totals().late == static_cast<std::uint64_t>(round) + 1);
    CHECK(blocks.memory.use_count() == 1);
    blocks.set_all(std::byte{0xa5});  // used again, for something else
    holder.signal(SIGCONT);
    peer = reader.connect(holder.address());
    CHECK(count_of(peer->read(others.places, nullptr, after(60s)), UcxOutcome::whole) == 64);
    CHECK(blocks.are_all(std::byte{0xa5}));
  }
}

TEST_CASE("ucx: reads of several threads from several peers do not hold each other up") {
  if (is_skipped("tcp")) return;
  const std::uint64_t bytes = 16 * kUnitBytes, seed = test::run_seed();
  UcxPeerProcess one("tcp", bytes, seed), two("tcp", bytes, seed + 1), stopped("tcp", bytes, seed);
  const UcxReader reader("tcp");
  const auto first = reader.connect(one.address()), second = reader.connect(two.address()),
             third = reader.connect(stopped.address());
  const auto held = held_by(bytes, seed), held_too = held_by(bytes, seed + 1);
  stopped.signal(SIGSTOP);
  std::atomic<std::size_t> whole{0};
  const auto read = [&](UcxPeer& peer, std::span<const std::byte> what, std::size_t rounds) {
    for (std::size_t i = 0; i < rounds; ++i) {
      UcxBlocks blocks(what, 32, 256 << 10);
      whole += count_of(peer.read(blocks.places, nullptr, after(30s)), UcxOutcome::whole);
    }
  };
  const auto begin = Clock::now();
  std::vector<std::thread> threads;
  threads.emplace_back([&] {
    UcxBlocks blocks(held, 4, kUnitBytes);
    (void)third->read(blocks.places, blocks.memory, begin + 20s);
  });
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] { read(*first, held, 4); });
    threads.emplace_back([&] { read(*second, held_too, 4); });
  }
  for (std::size_t i = 1; i < threads.size(); ++i) threads[i].join();
  CHECK(Clock::now() - begin < 20s);
  CHECK(whole == 6 * 4 * 32);
  stopped.kill();
  threads[0].join();
  CHECK(third->is_broken());
}

}  // namespace
}  // namespace kvpool
