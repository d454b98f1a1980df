// Whole hosts joined to a cluster: what is put at one is got at any other, and what becomes of that
// when some of them go.
#include <cstdio>

#include "cluster/cluster.h"
#include "cluster_town.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;
using namespace test;
using std::chrono::steady_clock;

constexpr std::uint64_t kBlock = 64 * kKiB;
constexpr std::size_t kKeys = 200;  // 12.5 MiB of such blocks

double seconds_since(steady_clock::time_point began) {
  return std::chrono::duration<double>(steady_clock::now() - began).count();
}

// Ids of the hosts that have it.
std::set<Hash128> truth_of(Town& town, const Hash128& key, std::uint64_t block_bytes) {
  std::set<Hash128> ids;
  for (Host* host : town.all())
    if (host->has(host->space(block_bytes), key)) ids.insert(host->id);
  return ids;
}

std::vector<std::set<Hash128>> located_by(Host& host, const Namespace& space,
                                          std::span<const Hash128> keys) {
  const Cluster::Holders found = host.cluster->locate(space.id, keys, never_hung());
  CHECK(found.why == Miss::none);
  std::vector<std::set<Hash128>> ids;
  for (const auto& of : found.of) ids.emplace_back(of.begin(), of.end());
  return ids;
}

std::size_t count_located(Host& host, const Namespace& space, std::span<const Hash128> keys) {
  const Cluster::Holders found = host.cluster->locate(space.id, keys, never_hung());
  return static_cast<std::size_t>(
      std::ranges::count_if(found.of, [](const auto& of) { return !of.empty(); }));
}

// What asking once more costs, at best: a machine that does other things adds to one try.
double ask_again_s(Host& host, const Namespace& space, std::span<const Hash128> keys) {
  double best = 60;
  for (int i = 0; i < 10; ++i) {
    const auto began = steady_clock::now();
    Miss why{};
    host.get(space, keys, why);
    CHECK(why != Miss::none);
    best = std::min(best, seconds_since(began));
  }
  return best;
}

// --- everybody is well ---------------------------------------------------------------------------

void check_got_anywhere(std::size_t hosts, Kind kind) {
  Town town(hosts, 64 * kMiB, Town::without_copies(), kind);
  town.introduce();
  const std::size_t each = 40;
  const auto keys_of = [&](std::size_t host) { return keys_from(host * 1000, each); };
  for (std::size_t i = 0; i < hosts; ++i) town[i].served.put(town[i].space(kBlock), keys_of(i));
  town.settle();
  std::vector<std::uint8_t> tiers(each);
  for (std::size_t at = 0; at < hosts; ++at) {
    const Namespace& space = town[at].space(kBlock);
    for (std::size_t of = 0; of < hosts; ++of) {
      const auto keys = keys_of(of);
      CHECK(town[at].node().lookup(space, keys, tiers.data()) == each);
      const std::uint8_t tier = at == of ? std::uint8_t{kTierDram} : kTierRemote;
      CHECK(std::ranges::all_of(tiers, [&](std::uint8_t each_tier) { return each_tier == tier; }));
      Miss why{};
      CHECK(town[at].get(space, keys, why) == each);
      CHECK(why == Miss::none);
      // It is a copy that stays: there is room.
      CHECK(town[at].node().look(space, keys, tiers.data()).present == each);
    }
    CHECK(town[at].node().stats().far.blocks == each * (hosts - 1));
  }
  town.settle();
  for (const Hash128& key : keys_of(0)) {
    const auto found = located_by(town[1], town[1].space(kBlock), {&key, 1});
    CHECK(found[0].size() >= std::min<std::size_t>(hosts, kHoldersPerKey));
  }
  town.check_at_rest();
}

TEST_CASE("cluster whole: what is put at one of three hosts is got at any, every byte") {
  check_got_anywhere(3, Kind::unix_socket);
}

TEST_CASE("cluster whole: what is put at one of five hosts is got at any, over tcp") {
  check_got_anywhere(5, Kind::tcp);
}

TEST_CASE(
    "cluster whole: each keeps its share of the directory, and no more is told than there is") {
  Town town(3);
  town.introduce();
  std::uint64_t slots = 0, owners = town[0].cluster->stats().owners;
  for (Host* host : town.all()) {
    host->served.put(host->space(kKiB), keys_from(0, 500));
    const ClusterStats stats = host->cluster->stats();
    CHECK(stats.is_member);
    CHECK(stats.members == 3);
    CHECK(stats.owners == owners);
    slots += stats.slots_owned;
  }
  CHECK(slots == kDirectorySlots);
  town.settle();
  std::uint64_t keys = 0;
  for (Host* host : town.all()) {
    const ClusterStats stats = host->cluster->stats();
    keys += stats.shard.directory.entries;
    CHECK(stats.shard.members == 3);
    CHECK(stats.shard.gaps == 0);
    CHECK(stats.shard.stale == 0);
  }
  CHECK(keys == 500);
  town.check_at_rest();
}

TEST_CASE("cluster whole: two clusters of other members never meet") {
  Town town(4);
  const std::vector<Host*> all = town.all();
  town.introduce(std::span(all).first(2));
  town.introduce(std::span(all).last(2));
  town[0].served.put(town[0].space(kBlock), keys_from(0, 20));
  town.settle();
  Miss why{};
  CHECK(town[1].get(town[1].space(kBlock), keys_from(0, 20), why) == 20);
  for (const std::size_t other : {2, 3}) {
    const Namespace& space = town[other].space(kBlock);
    CHECK(town[other].get(space, keys_from(0, 20), why) == 0);
    CHECK(why == Miss::absent);
    CHECK(count_located(town[other], space, keys_from(0, 20)) == 0);
    CHECK(town[other].cluster->stats().shard.directory.entries == 0);
    CHECK(town[other].cluster->peers().size() == 1);
  }
  town.check_at_rest();
}

TEST_CASE("cluster whole: without members a node serves alone") {
  Town town(1);
  Host& host = town[0];
  Namespace& space = host.space(kBlock);
  host.served.put(space, keys_from(0, 5));
  Miss why{};
  CHECK(host.get(space, keys_from(0, 9), why) == 5);
  CHECK(why == Miss::absent);
  CHECK(count_located(host, space, keys_from(0, 9)) == 5);
  const ClusterMember self = host.member();
  REQUIRE(host.cluster->set_members({&self, 1}).has_value());
  town.settle();
  CHECK(host.cluster->stats().slots_owned == kDirectorySlots);
  CHECK(host.cluster->stats().shard.directory.entries == 5);
  CHECK(host.get(space, keys_from(0, 9), why) == 5);
  CHECK(why == Miss::absent);
  town.check_at_rest();
}

// --- blocks go -----------------------------------------------------------------------------------

TEST_CASE("cluster whole: after evictions and removals the directory is what is there") {
  Town town(3, 8 * kMiB);
  town.introduce();
  Random random("cluster whole evictions");
  const std::size_t keys_max = 600;  // some 120 fit at each
  for (int round = 0; round < 200; ++round) {
    Host& host = town[random.between<std::size_t>(0, 2)];
    Namespace& space = host.space(kBlock);
    const auto keys = keys_from(random.between<std::uint64_t>(0, keys_max - 8), 8);
    Miss why{};
    switch (random.between(0, 3)) {
      case 0:
      case 1:
        host.served.put(space, keys);
        break;
      case 2:
        host.get(space, keys, why);
        break;
      default:
        host.node().remove(space, keys);
    }
  }
  town.settle();
  const auto keys = keys_from(0, keys_max);
  std::size_t there = 0;
  for (Host* host : town.all()) {
    const auto found = located_by(*host, host->space(kBlock), keys);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const auto truth = truth_of(town, keys[i], kBlock);
      there += truth.size();
      CHECK(found[i] == truth);
    }
  }
  CHECK(there > 300);
  std::printf("cluster whole evictions: %zu places of %zu keys\n", there / 3, keys_max);
  town.check_at_rest();
}

TEST_CASE("cluster whole: a dropped namespace is nowhere any more") {
  Town town(3);
  town.introduce();
  Namespace& space = town[0].space(kBlock);
  town[0].served.put(space, keys_from(0, 50));
  town.settle();
  CHECK(count_located(town[1], space, keys_from(0, 50)) == 50);
  REQUIRE(town[0].node().drop_namespace(space, never_hung()).has_value());
  town.settle();
  CHECK(count_located(town[1], space, keys_from(0, 50)) == 0);
  town.check_at_rest();
}

// --- hosts come and go ---------------------------------------------------------------------------

TEST_CASE("cluster whole: one that joins gets its slots, and what is in them is told anew") {
  Town town(3);
  town.introduce();
  const std::size_t each = 2000;
  for (std::size_t i = 0; i < 3; ++i)
    town[i].served.put(town[i].space(kKiB), keys_from(i * each, each));
  town.settle();
  Host& joins = town.add();
  const Namespace& space = joins.space(kKiB);
  const auto keys = keys_from(0, 3 * each);
  const auto turns_of = [&] {
    std::uint64_t turns = 0;
    for (Host* host : town.all()) turns = std::max(turns, host->cluster->stats().turns);
    return turns;
  };
  town.introduce();
  const std::uint64_t before = turns_of();
  std::size_t located = count_located(joins, space, keys);
  std::printf("cluster whole join: %zu of %zu keys found at once", located, keys.size());
  const auto deadline = never_hung();
  while (located < keys.size()) {
    REQUIRE(steady_clock::now() < deadline);
    std::this_thread::yield();
    located = count_located(joins, space, keys);
  }
  std::printf(", all after %llu turns\n", static_cast<unsigned long long>(turns_of() - before));
  town.settle();
  std::uint64_t entries = 0, announced = 0;
  for (Host* host : town.all()) {
    const ClusterStats stats = host->cluster->stats();
    entries += stats.shard.directory.entries;
    announced += stats.publisher.announced;
    CHECK(count_located(*host, host->space(kKiB), keys) == keys.size());
    // Within a fifth of its share.
    CHECK(stats.slots_owned * 5 > kDirectorySlots);
    CHECK(stats.slots_owned * 10 < kDirectorySlots * 3);
  }
  CHECK(entries == keys.size());  // who kept them before keeps them no more
  CHECK(announced < 2 * keys.size());
  Miss why{};
  CHECK(joins.get(space, keys, why) == keys.size());
  town.check_at_rest();
}

TEST_CASE("cluster whole: one that leaves takes its word back; it may still ask") {
  Town town(3);
  town.introduce();
  Host& leaves = town[2];
  leaves.served.put(leaves.space(kBlock), keys_from(0, 50));
  town[0].served.put(town[0].space(kBlock), keys_from(100, 50));
  town.settle();
  CHECK(count_located(town[0], town[0].space(kBlock), keys_from(0, 50)) == 50);
  CHECK(leaves.cluster->leave(never_hung()));
  CHECK(leaves.cluster->leave(never_hung()));
  CHECK(count_located(town[0], town[0].space(kBlock), keys_from(0, 50)) == 0);
  CHECK(leaves.cluster->stats().has_left);
  Miss why{};
  CHECK(leaves.get(leaves.space(kBlock), keys_from(100, 50), why) == 50);
  leaves.served.put(leaves.space(kBlock), keys_from(200, 5));
  const std::vector<Host*> all = town.all();
  Town::settle(std::span(all).first(2));
  CHECK(count_located(town[0], town[0].space(kBlock), keys_from(200, 5)) == 0);
  town.check_at_rest();
}

TEST_CASE("cluster whole: one that is in the view no more is asked nothing") {
  Town town(3);
  town.introduce();
  town[1].served.put(town[1].space(kBlock), keys_from(0, 50));
  town[2].served.put(town[2].space(kBlock), keys_from(100, 50));
  town.settle();
  const std::vector<Host*> stay{&town[0], &town[2]};
  town.introduce(stay);
  Town::settle(stay);
  const Namespace& space = town[0].space(kBlock);
  CHECK(town[0].cluster->peers().size() == 1);
  Miss why{};
  CHECK(town[0].get(space, keys_from(0, 50), why) == 0);
  CHECK(why == Miss::absent);
  CHECK(town[0].get(space, keys_from(100, 50), why) == 50);
  CHECK(ask_again_s(town[0], space, keys_from(0, 50)) < 0.005);
  // It hears of that, and is a member again: all is told anew, and streams are dialled.
  const std::vector<ClusterMember> without{town[0].member(), town[2].member()};
  REQUIRE(town[1].cluster->set_members(without).has_value());
  Town::settle(std::span(&stay[0], 1));
  town.introduce();
  town.settle();
  CHECK(town[0].get(space, keys_from(0, 50), why) == 50);
  town.check_at_rest();
}

TEST_CASE("cluster whole: who comes back in another life is known by it alone") {
  Town town(2);
  town.introduce();
  town[1].served.put(town[1].space(kBlock), keys_from(0, 20));
  town.settle();
  std::vector<ClusterMember> view{town[0].member(), town[1].member()};
  view[1].incarnation = 2;
  REQUIRE(town[0].cluster->set_members(view).has_value());
  const Namespace& space = town[0].space(kBlock);
  Miss why{};
  CHECK(town[0].get(space, keys_from(0, 20), why, Reach::by(after(500ms))) == 0);
  CHECK(why != Miss::none);
  Ends ends(Kind::unix_socket);
  CHECK(!town[0].cluster->add_stream(town[1].id, 1, give(ends.near)).has_value());
  CHECK(is_closed_by_peer(ends.far));
  CHECK(town[0].cluster->stats().streams_refused > 0);
  town.check_at_rest();
}

TEST_CASE("cluster whole: views that cannot be are refused, and change nothing") {
  Town town(2);
  town.introduce();
  Cluster& cluster = *town[0].cluster;
  const std::uint64_t owners = cluster.stats().owners;
  const ClusterMember one = town[0].member(), other = town[1].member();
  const std::vector<ClusterMember> twice{one, other, other};
  CHECK(!cluster.set_members(twice).has_value());
  for (const std::uint32_t weight : {0u, 257u}) {
    const std::vector<ClusterMember> wrong{one, {other.id, 1, weight, false}};
    CHECK(!cluster.set_members(wrong).has_value());
  }
  std::vector<ClusterMember> many;
  for (std::uint64_t i = 0; i <= kMembersMax; ++i) many.push_back({key_of(i), 1, 1, false});
  CHECK(!cluster.set_members(many).has_value());
  CHECK(cluster.stats().owners == owners);
  CHECK(cluster.stats().members == 2);
  town.check_at_rest();
}

// --- ends in the middle of something -------------------------------------------------------------

// Host 1 has kKeys, and so have `others`; host 0 asks. What host 1 sends ends after some of them.
struct Interrupted {
  Meter meter;
  Town town;
  const std::vector<Hash128> keys = keys_from(0, kKeys);

  explicit Interrupted(std::size_t hosts, std::span<const std::size_t> others = {}) : town(hosts) {
    meter.left = std::int64_t{1} << 40;
    town[1].meter = &meter;
    town.introduce();
    town[1].served.put(town[1].space(kBlock), keys);
    for (const std::size_t other : others) town[other].served.put(town[other].space(kBlock), keys);
    town.settle();
  }
  // Once it has sent some of them.
  void then(std::function<void()> happens) {
    meter.spent = std::move(happens);
    meter.left = 3 * kMiB;
  }
  std::span<const Hash128> rest(std::size_t count) const { return std::span(keys).subspan(count); }
  const Namespace& space() { return town[0].space(kBlock); }
};

TEST_CASE("cluster whole: a host that ends in the middle of a get costs a miss, once") {
  Interrupted is(3);
  is.then([&] {
    is.town[1].is_away = true;
    is.town[1].served.server->close();
  });
  Miss why{};
  const auto began = steady_clock::now();
  const std::size_t count = is.town[0].get(is.space(), is.keys, why, Reach::by(after(10s)));
  CHECK(seconds_since(began) < 9);
  CHECK(count < kKeys);
  CHECK((why == Miss::disconnected || why == Miss::timed_out));
  CHECK(ask_again_s(is.town[0], is.space(), is.rest(count)) < 0.005);
  is.town.check_at_rest();
}

TEST_CASE(
    "cluster whole: a host that falls silent in the middle of a get costs its deadline, once") {
  Interrupted is(3);
  is.then([&] {
    is.town[1].is_away = true;
    is.meter.is_frozen = true;
  });
  Miss why{};
  const auto began = steady_clock::now();
  const std::size_t count = is.town[0].get(is.space(), is.keys, why, Reach::by(after(400ms)));
  const double took = seconds_since(began);
  std::printf("cluster whole silent: %zu blocks, %.0f ms of 400\n", count, took * 1e3);
  CHECK(took < 2);
  CHECK(count < kKeys);
  CHECK((why == Miss::timed_out || why == Miss::disconnected));
  CHECK(ask_again_s(is.town[0], is.space(), is.rest(count)) < 0.005);
  is.town.check_at_rest();
}

TEST_CASE("cluster whole: what one host fails to send another one does") {
  for (const bool is_silent : {false, true}) {
    const std::size_t other = 2;
    Interrupted is(3, {&other, 1});
    is.then([&] {
      is.town[1].is_away = true;
      is.meter.is_frozen = is_silent;
      if (!is_silent) is.town[1].served.server->close();
    });
    Miss why{};
    CHECK(is.town[0].get(is.space(), is.keys, why, Reach::by(after(20s))) == kKeys);
    CHECK(why == Miss::none);
    is.town.check_at_rest();
  }
}

TEST_CASE("cluster whole: it is closed while many get from it") {
  Town town(3);
  town.introduce();
  for (const std::size_t i : {1, 2})
    town[i].served.put(town[i].space(kBlock), keys_from(i * 1000, 64));
  town.settle();
  Host& asks = town[0];
  Namespace& space = asks.space(kBlock);
  std::atomic<std::size_t> got{0};
  std::atomic<bool> is_over{false};
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 8; ++t)
    threads.emplace_back([&, t] {
      const auto keys = keys_from(1000 * (1 + t % 2) + t * 8, 8);
      while (!is_over) {
        Miss why{};
        got += asks.get(space, keys, why);
        asks.node().remove(space, keys);
      }
    });
  wait_until([&] { return got > 400; });
  CHECK(asks.cluster->close(never_hung()));
  CHECK(asks.cluster->close(never_hung()));
  CHECK(!asks.node().has_elsewhere());
  is_over = true;
  for (std::thread& thread : threads) thread.join();
  Miss why{};
  CHECK(asks.get(space, keys_from(1000, 8), why) == 0);
  CHECK(why == Miss::absent);
  CHECK(asks.cluster->locate(space.id, keys_from(1000, 8), never_hung()).why == Miss::absent);
  CHECK(!asks.cluster->set_members({}).has_value());
  town.check_at_rest();
}

TEST_CASE("cluster whole: the node may close first, and nobody need close the cluster") {
  Town town(2);
  town.introduce();
  town[0].served.put(town[0].space(kBlock), keys_from(0, 30));
  town.settle();
  town[1].node().close(after(0ms));
  town.end(town[1]);
  town[1].cluster.reset();
  Miss why{};
  CHECK(town[0].get(town[0].space(kBlock), keys_from(0, 30), why) == 30);
  ClusterOptions options;
  options.id = town[0].id;
  options.incarnation = 1;
  const auto second = Cluster::open(town[0].shared(), options);
  CHECK(!second.has_value());  // the node is in one
  town.end(town[0]);
  CHECK(Cluster::open(town[0].shared(), options).has_value());
}

// --- much ----------------------------------------------------------------------------------------

// The node keeps an eighth of them: a slot takes 4 KiB at least.
TEST_CASE("cluster whole: a million keys come, and most of them go, and all of it is told") {
  constexpr std::size_t kMany = scaled(1'000'000), kPart = 20'000;
  constexpr std::uint64_t kSmall = 64;
  Town town(3, 512 * kMiB);
  town.introduce();
  Host& has = town[0];
  Namespace& space = has.space(kSmall);
  auto began = steady_clock::now();
  for (std::size_t from = 0; from < kMany; from += kPart)
    has.served.put(space, keys_from(from, std::min(kPart, kMany - from)));
  const double put_s = seconds_since(began);
  town.settle();
  const double settled_s = seconds_since(began);
  began = steady_clock::now();
  std::size_t located = 0;
  for (std::size_t from = 0; from < kMany; from += kPart)
    located += count_located(town[1], space, keys_from(from, std::min(kPart, kMany - from)));
  const double locate_s = seconds_since(began);
  const std::uint64_t there = has.node().stats().blocks;
  CHECK(located == there);
  std::uint64_t entries = 0, bytes = 0;
  for (Host* host : town.all()) {
    const DirectoryStats stats = host->cluster->stats().shard.directory;
    entries += stats.entries;
    bytes += stats.bytes;
  }
  CHECK(entries == located);
  const PublisherStats told = has.cluster->stats().publisher;
  std::printf(
      "cluster whole many: %zu keys put in %.2f s, known after %.2f s; %.1f bytes a key; located "
      "in %.2f s; %llu batches, %llu announced, %llu lost, %llu overflows\n",
      kMany, put_s, settled_s, static_cast<double>(bytes) / static_cast<double>(entries), locate_s,
      static_cast<unsigned long long>(told.batches),
      static_cast<unsigned long long>(told.announced), static_cast<unsigned long long>(told.lost),
      static_cast<unsigned long long>(told.overflows));
  town.check_at_rest();
}

}  // namespace
}  // namespace kvpool
