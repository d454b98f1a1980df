// Members that read out of each other's arenas: UCX over tcp stands in for RDMA.
#include "cluster/far_read.h"
#include "cluster/far_way.h"

#include "cluster_town.h"
#include "net_ucx.h"

namespace kvpool {
namespace {

using namespace test;

constexpr std::uint32_t kBlock = 100'000;

// True: there is nothing to test here.
bool is_skipped() {
  const std::string why = no_ucx();
  if (why.empty()) return false;
  MESSAGE("not tested: " << why);
  CHECK_FALSE(why.empty());
  return true;
}

// A town whose hosts have a lane.
struct FarTown : Town {
  explicit FarTown(std::size_t hosts, std::uint64_t bytes = 64 * kMiB)
      : Town(hosts, bytes, without_copies(), Kind::tcp, ucx_options("tcp")) {
    introduce();
  }
  void put(Host& host, std::span<const Hash128> keys, std::uint32_t block_bytes = kBlock) {
    Payloads source(keys, block_bytes);
    std::vector<PutStatus> statuses(keys.size());
    host.node().put({host.space(block_bytes), keys, nullptr, never_hung()}, source,
                    statuses.data());
    REQUIRE(all_are(statuses, PutStatus::stored));
    settle();
  }
};

PeerStats link(const Host& from, const Host& to) {
  for (const ClusterPeer& each : from.cluster->peers())
    if (each.stats.id == to.id) return each.stats;
  FAIL("no such peer");
  return {};
}

TEST_CASE("cluster far: what a member has is read out of its arena") {
  if (is_skipped()) return;
  for (const std::uint32_t block_bytes : {4096u, 100'000u, 1'500'001u}) {
    CAPTURE(block_bytes);
    FarTown town(2);
    const auto keys = keys_from(1, 20);
    town.put(town[0], keys, block_bytes);
    Miss why{};
    CHECK(town[1].get(town[1].space(block_bytes), keys, why) == 20);
    CHECK(why == Miss::none);
    const PeerStats stats = link(town[1], town[0]);
    CHECK(stats.far.state == FarState::open);
    CHECK_MESSAGE(stats.far.blocks == 20, stats.far.trouble);
    CHECK(stats.fetched_blocks == 20);
    CHECK(stats.in_flight_bytes == 0);
    CHECK(town[0].served.server->stats().far_lent_bytes == 20ull * block_bytes);
    CHECK(town[0].served.server->stats().far_leases == 0);
    CHECK(town[1].cluster->stats().lane.whole == 20);
    CHECK(town[1].cluster->stats().lane_used == 0);
    town.check_at_rest();
  }
}

TEST_CASE("cluster far: a small get asks once, over a stream") {
  if (is_skipped()) return;
  FarTown town(2);
  const auto keys = keys_from(1, 4);
  town.put(town[0], keys, 4096);
  Miss why{};
  CHECK(town[1].get(town[1].space(4096), keys, why) == 4);
  CHECK(link(town[1], town[0]).far.blocks == 0);
  CHECK(link(town[1], town[0]).far.state == FarState::open);
  town.check_at_rest();
}

TEST_CASE("cluster far: a long chain comes out of several arenas") {
  if (is_skipped()) return;
  FarTown town(3, 256 * kMiB);
  const auto keys = keys_from(1, 600);
  town.put(town[0], std::span(keys).first(400));
  town.put(town[1], std::span(keys).subspan(200));
  Miss why{};
  CHECK(town[2].get(town[2].space(kBlock), keys, why) == 600);
  CHECK(why == Miss::none);
  CHECK(link(town[2], town[0]).far.blocks + link(town[2], town[1]).far.blocks > 0);
  CHECK(link(town[2], town[0]).fetched_blocks + link(town[2], town[1]).fetched_blocks == 600);
  town.check_at_rest();
}

TEST_CASE("cluster far: what a member has no more is a miss, and what is behind it comes") {
  if (is_skipped()) return;
  FarTown town(2);
  const auto keys = keys_from(1, 30);
  town.put(town[0], keys);
  CHECK(town[0].node().remove(town[0].space(kBlock), std::span(keys).subspan(12, 1)) == 1);
  Miss why{};
  CHECK(town[1].get(town[1].space(kBlock), keys, why) == 12);
  CHECK(why == Miss::absent);
  CHECK(town[1].get(town[1].space(kBlock), std::span(keys).subspan(13), why) == 17);
  CHECK(link(town[1], town[0]).far.failures == 0);
  town.check_at_rest();
}

TEST_CASE("cluster far: bytes that are not what they should be reach nobody") {
  if (is_skipped()) return;
  FarTown town(2);
  const auto keys = keys_from(1, 20);
  town.put(town[0], keys);
  Lease lease;
  REQUIRE(town[0].node().acquire(town[0].space(kBlock), {&keys[7], 1}, &lease) == 1);
  const_cast<std::byte*>(town[0].node().arena())[lease.offset + 999] ^= std::byte{1};
  town[0].node().release({&lease, 1});
  Miss why{};
  CHECK(town[1].get(town[1].space(kBlock), keys, why) == 7);
  CHECK(why == Miss::damaged);
  CHECK(link(town[1], town[0]).far.failures == 1);
  CHECK(town[1].cluster->stats().lane.damaged == 1);
  CHECK(town[0].served.server->stats().far_leases == 0);
  town.check_at_rest();
}

TEST_CASE("cluster far: a member without a lane is asked over streams, and asks so") {
  if (is_skipped()) return;
  FarTown town(2);
  Town plain(1, 64 * kMiB, Town::without_copies(), Kind::tcp);
  CHECK(plain[0].cluster->lane_address().empty());
  CHECK_FALSE(plain[0].cluster->stats().has_lane);
  CHECK_FALSE(town[0].cluster->lane_address().empty());
  CHECK_FALSE(town[0].cluster->open_lane(ucx_options("tcp")).has_value());   // too late
  CHECK_FALSE(plain[0].cluster->open_lane(ucx_options("tcp")).has_value());  // not sealed
  plain.check_at_rest();
  town.check_at_rest();
}

TEST_CASE("cluster far: a way that leads nowhere is left alone for a while") {
  if (is_skipped()) return;
  const UcxReader reader("tcp");
  const std::shared_ptr<UcxLane> lane(std::shared_ptr<void>{}, reader.lane.get());
  FarWay way({lane, std::make_shared<Staging>()});
  CHECK(way.stats().state == FarState::none);
  CHECK(way.get(never_hung()) == nullptr);
  CHECK(way.stats().failures == 0);
  std::vector<std::byte> address(lane->address().begin(), lane->address().end());
  address[20] ^= std::byte{1};
  way.set_address(address);
  CHECK(way.stats().state == FarState::unused);
  CHECK(way.get(never_hung()) == nullptr);
  CHECK(way.stats().state == FarState::broken);
  CHECK(way.stats().failures == 1);
  CHECK_FALSE(way.stats().trouble.empty());
  for (int i = 0; i < 100; ++i) CHECK(way.get(never_hung()) == nullptr);
  CHECK(way.stats().failures <= 2);
  // Another life of the member: at once.
  way.set_address(lane->address());
  const auto peer = way.get(never_hung());
  REQUIRE(peer != nullptr);
  CHECK(peer->lane() == lane->number());
  way.failed(peer, 3, "a test");
  way.failed(peer, 3, "a test");  // of two that failed together one counts
  CHECK(way.stats().failures <= 3);
  CHECK(way.stats().blocks_given_up == 6);
  CHECK(way.stats().trouble == "a test");
  way.close();
  CHECK(way.get(never_hung()) == nullptr);
  CHECK(way.stats().state == FarState::none);
}

TEST_CASE("cluster far: memory that reads land in is bounded, and outlives who took it") {
  auto staging = std::make_shared<Staging>();
  std::vector<std::shared_ptr<std::byte>> held;
  const std::size_t most = Staging::kBytesMax / (32ull << 20);
  for (std::size_t i = 0; i < most; ++i) held.push_back(staging->take(32ull << 20));
  CHECK(std::ranges::count(held, nullptr) == 0);
  CHECK(staging->take(1) == nullptr);
  held.pop_back();
  CHECK(staging->take(4096) != nullptr);
  CHECK(staging->used() == (most - 1) * (32ull << 20));
  staging.reset();
  *held.front() = std::byte{1};
}

TEST_CASE("cluster far: a member that closes while it is read from costs misses, never bytes") {
  if (is_skipped()) return;
  FarTown town(3, 256 * kMiB);
  const auto keys = keys_from(1, 400);
  town.put(town[0], keys);
  town.put(town[1], std::span(keys).first(100));
  std::atomic<std::size_t> delivered{0}, rounds{0};
  std::atomic<bool> is_over{false};
  std::thread reading([&] {
    while (!is_over) {
      Miss why{};
      delivered += town[2].get(town[2].space(kBlock), keys, why, Reach::by(after(2s)));
      town[2].node().remove(town[2].space(kBlock), keys);
      ++rounds;
    }
  });
  wait_until([&] { return rounds >= 2; });
  town[0].is_away = true;
  CHECK(town[0].cluster->close(never_hung()));
  const std::size_t before = rounds;
  wait_until([&] { return rounds >= before + 2; });
  is_over = true;
  reading.join();
  CHECK(delivered >= 400);
  CHECK(town[0].served.server->stats().far_leases == 0);
  // Who is left knows, once its part of the directory is another's.
  const std::vector<Host*> left = {&town[1], &town[2]};
  town.introduce(left);
  Town::settle(left);
  Miss why{};
  CHECK(town[2].get(town[2].space(kBlock), std::span(keys).first(100), why) == 100);
  CHECK(why == Miss::none);
  town.check_at_rest();
}

}  // namespace
}  // namespace kvpool
