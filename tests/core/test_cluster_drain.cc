// Whole hosts: what is hot at one outlives it, and one that leaves takes nothing warm along.
#include "cluster/cluster.h"
#include "cluster_town.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;
using namespace test;

constexpr std::uint64_t kBlock = 64 * kKiB;

ClusterOptions copying(std::uint32_t max_replicas = 2) {
  ClusterOptions options;
  options.replicas.max_replicas = max_replicas;
  options.replicas.search_every = 50ms;
  options.replicas.search_share = 0;
  options.replicas.ask_max = 20s;
  options.replicas.busy_pause = 20ms;
  options.pulls.piece_max = 20s;
  options.finder.locate_max = 20s;
  return options;
}

std::size_t count_at(Host& host, std::span<const Hash128> keys) {
  const Namespace& space = host.space(kBlock);
  return static_cast<std::size_t>(
      std::ranges::count_if(keys, [&](const Hash128& key) { return host.has(space, key); }));
}

std::size_t places(Town& town, std::span<const Hash128> keys) {
  std::size_t count = 0;
  for (Host* host : town.all()) count += count_at(*host, keys);
  return count;
}

void use(Host& host, std::span<const Hash128> keys, int times) {
  Miss why{};
  for (int i = 0; i < times; ++i) CHECK(host.get(host.space(kBlock), keys, why) == keys.size());
}

// As if its process were killed: nobody reaches it, and it tells nobody.
void kill(Town& town, Host& host) {
  host.is_away = true;
  host.served.server->close();
  town.end(host);
}

TEST_CASE("cluster copies: what is hot outlives the host that had it, byte for byte") {
  Town town(3, 64 * kMiB, copying());
  town.introduce();
  Host& first = town[0];
  const auto hot = keys_from(1, 30), cold = keys_from(1000, 30);
  first.served.put(first.space(kBlock), hot);
  first.served.put(first.space(kBlock), cold);
  use(first, hot, 8);
  wait_until([&] { return places(town, hot) == 60; });
  town.settle();
  // It stays at that, however often it is looked for.
  const std::uint64_t searches = first.cluster->stats().replicas.searches;
  wait_until([&] { return first.cluster->stats().replicas.searches >= searches + 5; });
  CHECK(places(town, hot) == 60);
  CHECK(places(town, cold) == 30);
  CHECK(first.cluster->stats().replicas.copied_blocks == 30);
  kill(town, first);
  const std::vector<Host*> others{&town[1], &town[2]};
  town.introduce(others);
  Town::settle(others);
  for (const std::size_t at : {1, 2}) {
    Miss why{};
    CHECK(town[at].get(town[at].space(kBlock), hot, why) == 30);
    CHECK(town[at].get(town[at].space(kBlock), cold, why) == 0);
  }
}

TEST_CASE("cluster drain: what is warm and nowhere else is at others before it has left") {
  Town town(3, 64 * kMiB, copying(1));
  town.introduce();
  Host& leaves = town[0];
  std::vector<Hash128> all;
  for (std::uint64_t chain = 1; chain <= 10; ++chain) {
    const auto keys = keys_from(chain * 1000, 20);
    leaves.served.put(leaves.space(kBlock), keys);
    all.insert(all.end(), keys.begin(), keys.end());
  }
  // Two branches of one chain, and what another has as well.
  const auto trunk = std::span(all).first(20);
  for (std::uint64_t branch = 1; branch <= 2; ++branch) {
    std::vector<Hash128> keys(trunk.begin(), trunk.end());
    const auto more = keys_from(100'000 * branch, 7);
    keys.insert(keys.end(), more.begin(), more.end());
    leaves.served.put(leaves.space(kBlock), keys);
    all.insert(all.end(), more.begin(), more.end());
  }
  town.settle();
  Miss why{};
  CHECK(town[1].get(town[1].space(kBlock), std::span(all).subspan(20, 20), why) == 20);
  town.settle();
  CHECK(leaves.cluster->drain(never_hung()));
  const ClusterStats stats = leaves.cluster->stats();
  CHECK(stats.has_left);
  CHECK(stats.drain.is_over);
  CHECK(!stats.drain.is_running);
  CHECK(stats.drain.moved_blocks == all.size() - 20);
  CHECK(stats.drain.moved_bytes == (all.size() - 20) * kBlock);
  CHECK(stats.drain.refused_blocks == 0);
  CHECK(stats.drain.prefixes_left == 0);
  kill(town, leaves);
  const std::vector<Host*> others{&town[1], &town[2]};
  town.introduce(others);
  Town::settle(others);
  for (Host* host : others)
    for (const Hash128& key : all) CHECK(host->get(host->space(kBlock), {&key, 1}, why) == 1);
}

TEST_CASE("cluster drain: of full members each takes what is warmer than what it has") {
  Town town(3, 8 * kMiB, copying(1));
  town.introduce();
  for (const std::size_t at : {1, 2}) {
    const auto keys = keys_from(at * 10'000, 120);
    town[at].served.put(town[at].space(kBlock), keys);
    use(town[at], std::span(keys).first(100), 4);
  }
  const auto hot = keys_from(1, 20), cold = keys_from(500, 20);
  town[0].served.put(town[0].space(kBlock), hot);
  town[0].served.put(town[0].space(kBlock), cold);
  use(town[0], hot, 30);
  town.settle();
  CHECK(town[0].cluster->drain(never_hung()));
  CHECK(count_at(town[1], hot) + count_at(town[2], hot) == 20);
  const DrainStats stats = town[0].cluster->stats().drain;
  CHECK(stats.moved_blocks >= 20);
  CHECK(stats.moved_blocks + stats.refused_blocks >= 40);
  town.check_at_rest();
}

TEST_CASE("cluster drain: with nobody there, no time, or nothing to do it ends at once") {
  Town alone(1, 64 * kMiB, copying());
  alone.introduce();
  CHECK(alone[0].cluster->drain(never_hung()));  // it has nothing
  Town second(1, 64 * kMiB, copying());
  second.introduce();
  second[0].served.put(second[0].space(kBlock), keys_from(1, 10));
  CHECK(!second[0].cluster->drain(never_hung()));
  CHECK(second[0].cluster->stats().has_left);
  Town late(2, 64 * kMiB, copying(1));
  late.introduce();
  late[0].served.put(late[0].space(kBlock), keys_from(1, 10));
  late.settle();
  CHECK(!late[0].cluster->drain(after(0ms)));
  CHECK(late[0].cluster->stats().has_left);
  Town strange(1, 64 * kMiB, copying());
  CHECK(!strange[0].cluster->drain(never_hung()));  // it is no member
  CHECK(!strange[0].cluster->stats().has_left);
  late.check_at_rest();
}

TEST_CASE("cluster drain: closing ends it") {
  ClusterOptions options = copying(1);
  options.pulls.last_bytes_per_s = 1;  // it would take weeks
  Town town(2, 64 * kMiB, options);
  town.introduce();
  town[0].served.put(town[0].space(kBlock), keys_from(1, 200));
  town.settle();
  std::thread drains([&] { CHECK(!town[0].cluster->drain(never_hung())); });
  wait_until([&] { return town[0].cluster->stats().drain.is_running; });
  CHECK(town[0].cluster->close(never_hung()));
  drains.join();
  town.check_at_rest();
}

}  // namespace
}  // namespace kvpool
