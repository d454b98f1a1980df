// Blocks that come from other members: real nodes and servers, joined by sockets in this process.
#include <thread>

#include "cluster/finder.h"
#include "cluster_members.h"

using namespace kvpool;
using namespace kvpool::test;

namespace {

constexpr std::uint32_t kBlockBytes = 50'000;

}  // namespace

TEST_CASE("cluster fetch: what one member was given, another delivers") {
  for (const Kind kind : {Kind::unix_socket, Kind::tcp})
    for (const std::uint32_t block_bytes : {1u, 4096u, 50'000u, 1'500'001u}) {
      CAPTURE(block_bytes);
      TestCluster cluster(2, TestCluster::plain(), 3, kind);
      const auto keys = keys_from(1, 20);
      cluster.put(cluster[0], keys, block_bytes);
      Miss why{};
      std::vector<std::uint8_t> tiers(20);
      CHECK(cluster[1].node().lookup(cluster[1].space(block_bytes), keys, tiers.data()) == 20);
      CHECK(std::ranges::count(tiers, kTierRemote) == 20);
      CHECK(cluster[1].get(keys, block_bytes, why) == 20);
      CHECK(why == Miss::none);
      CHECK(cluster[1].node().lookup(cluster[1].space(block_bytes), keys, tiers.data(),
                                     Reach::here()) == 20);
      CHECK(cluster[1].node().stats().far.kept == 20);
      cluster.check_at_rest();
    }
}

TEST_CASE("cluster fetch: a long chain comes over several holders and streams at once") {
  TestCluster cluster(4, TestCluster::plain(128 * kMiB), 4);
  const auto keys = keys_from(1, 1000);
  cluster.put(cluster[0], keys, kBlockBytes);
  cluster.put(cluster[1], keys, kBlockBytes);
  cluster.put(cluster[2], std::span(keys).subspan(300), kBlockBytes);
  Miss why{};
  CHECK(cluster[3].get(keys, kBlockBytes, why) == 1000);
  CHECK(why == Miss::none);
  std::uint64_t blocks = 0;
  for (const PeerStats& stats : cluster[3].peers.stats()) {
    CHECK(stats.fetched_blocks > 0);
    blocks += stats.fetched_blocks;
  }
  CHECK(blocks == 1000);
  CHECK(cluster[3].node().stats().far.missed == 0);
  cluster.check_at_rest();
}

TEST_CASE("cluster fetch: what nobody has ends the call there, with the reason") {
  TestCluster cluster(3);
  const auto keys = keys_from(1, 30);
  cluster.put(cluster[0], std::span(keys).first(12), kBlockBytes);
  cluster.put(cluster[1], std::span(keys).subspan(13), kBlockBytes);
  Miss why{};
  CHECK(cluster[2].get(keys, kBlockBytes, why) == 12);
  CHECK(why == Miss::absent);
  const auto others = keys_from(1000, 5);
  CHECK(cluster[2].get(others, kBlockBytes, why) == 0);
  CHECK(why == Miss::absent);
  cluster.check_at_rest();
}

TEST_CASE("cluster fetch: many who want the same cause one fetch") {
  for (const std::size_t count : {2u, 16u}) {
    CAPTURE(count);
    TestCluster cluster(2);
    const auto keys = keys_from(1, 200);
    cluster.put(cluster[0], keys, kBlockBytes);
    std::vector<std::thread> threads;
    std::atomic<std::size_t> served{0}, wrong{0};
    for (std::size_t i = 0; i < count; ++i)
      threads.emplace_back([&] {
        KeySink sink(keys, kBlockBytes);
        served += cluster[1].node().get(cluster[1].space(kBlockBytes), keys, sink);
        wrong += sink.wrong;
      });
    for (std::thread& thread : threads) thread.join();
    CHECK(served == count * 200);
    CHECK(wrong == 0);
    // The holder sent each once.
    CHECK(cluster[0].space(kBlockBytes).traffic->totals().loaded() == 200);
    cluster.check_at_rest();
  }
}

TEST_CASE("cluster fetch: a hint that proves stale costs one try, and is dropped") {
  TestCluster cluster(3);
  TestMember& asks = cluster[2];  // and remembers for longer than any machine takes
  asks.finder = std::make_shared<Finder>(asks.view, asks.peers, asks.shard.get(),
                                         Finder::Options{.keep_absent = 60s, .locate_max = 20s});
  asks.node().set_elsewhere(asks.finder);
  const auto keys = keys_from(1, 40);
  cluster.put(cluster[0], keys, kBlockBytes);
  cluster.put(cluster[1], keys, kBlockBytes);
  // Gone, and nobody was told.
  for (std::size_t i = 0; i < 40; i += 3)
    cluster[0].node().remove(cluster[0].space(kBlockBytes), {&keys[i], 1});
  Miss why{};
  CHECK(asks.get(keys, kBlockBytes, why) == 40);
  // Of all others that now say so, nobody has the next ones.
  const auto lost = keys_from(100, 10);
  cluster.put(cluster[0], lost, kBlockBytes);
  cluster[0].node().remove(cluster[0].space(kBlockBytes), lost);
  CHECK(asks.get(lost, kBlockBytes, why) == 0);
  CHECK(why == Miss::absent);
  const std::uint64_t stale = asks.finder->stats().stale;
  CHECK(stale > 0);
  CHECK(asks.get(lost, kBlockBytes, why) == 0);
  CHECK(asks.finder->stats().stale == stale);  // it was not asked again
  cluster.check_at_rest();
}

TEST_CASE("cluster fetch: a full node delivers what it cannot keep") {
  TestCluster cluster(2, TestCluster::plain(4 * kMiB));
  const auto mine = keys_from(5000, 90);
  cluster[1].pool().put(cluster[1].space(kBlockBytes), mine);
  std::vector<Lease> pins(90);
  const std::size_t pinned = cluster[1].node().acquire(cluster[1].space(kBlockBytes), mine,
                                                       pins.data(), nullptr, Reach::here());
  const auto keys = keys_from(1, 50);
  cluster.put(cluster[0], keys, kBlockBytes);
  Miss why{};
  CHECK(cluster[1].get(keys, kBlockBytes, why) == 50);
  CHECK(cluster[1].node().stats().far.aside > 0);
  cluster[1].node().release(std::span(pins).first(pinned));
  cluster.check_at_rest();
}

TEST_CASE("cluster fetch: a peer is answered from its holder alone, a client from everybody") {
  TestCluster cluster(3);
  const auto keys = keys_from(1, 25);
  cluster.put(cluster[0], keys, kBlockBytes);
  auto made = StreamChannel::create({.timeout = 60s});
  REQUIRE(made.has_value());
  Space space;
  name(space, cluster[1].space(kBlockBytes));
  Miss why{};

  // As a client of member 1.
  cluster[1].served->attach(**made, Kind::unix_socket, 2);
  CHECK((*made)->lookup(space, keys, nullptr, why) == 25);
  CHECK(get(**made, space, keys, why) == 25);
  CHECK(cluster[1].space(kBlockBytes).traffic->totals().loaded_remote == 25);
  (*made)->close();

  // As a peer of member 2, which has nothing.
  auto peers = StreamChannel::create({.timeout = 60s});
  REQUIRE(peers.has_value());
  Ends ends(Kind::unix_socket);
  REQUIRE(
      cluster[2]
          .served->server->add_stream(cluster[2].served->client, give(ends.far), StreamKind::peer)
          .has_value());
  const int number = give(ends.near);
  REQUIRE((*peers)->attach({&number, 1}).has_value());
  name(space, cluster[2].space(kBlockBytes));
  CHECK((*peers)->lookup(space, keys, nullptr, why) == 0);
  CHECK(get(**peers, space, keys, why) == 0);
  CHECK(why == Miss::absent);
  CHECK(cluster[2].finder->stats().fetches == 0);
  (*peers)->close();
  cluster.check_at_rest();
}

TEST_CASE("cluster fetch: members that ask each other at the same time") {
  TestCluster cluster(3, TestCluster::plain(16 * kMiB));
  std::vector<std::vector<Hash128>> keys;
  for (std::size_t i = 0; i < 3; ++i) {
    keys.push_back(keys_from(1 + i * 1000, 100));
    cluster.put(cluster[i], keys.back(), 20'000);
  }
  std::vector<std::thread> threads;
  std::atomic<std::size_t> wrong{0}, served{0};
  for (std::size_t t = 0; t < 6; ++t)
    threads.emplace_back([&, t] {
      for (std::size_t round = 0; round < 10; ++round) {
        const auto& from = keys[(t + round) % 3];
        KeySink sink(from, 20'000);
        served += cluster[t % 3].node().get(cluster[t % 3].space(20'000), from, sink);
        wrong += sink.wrong;
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(served > 0);
  cluster.check_at_rest();
}
