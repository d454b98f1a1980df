// Copies of hot prefixes: who asks whom for how much, and when not. Turns are taken by hand, at
// times that the test makes up; members, sockets and payload are real.
#include "cluster/peer_desk.h"
#include "cluster/replicator.h"
#include "cluster_members.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;
using namespace test;
using Time = Replicator::Time;

constexpr std::uint32_t kBlock = 64 * kKiB;

ReplicaOptions patient() {
  ReplicaOptions options;
  options.search_every = 1s;
  options.search_share = 0;
  options.ask_max = 20s;  // the machine may be busy
  return options;
}

NodeOptions slow_to_cool(std::uint64_t bytes = 64 * kMiB) {
  NodeOptions options = TestCluster::plain(bytes);
  options.store.tau_s = 1000;
  return options;
}

// What a cluster adds to a member for copies, with its turns in the hands of the test.
struct Copier {
  TestMember& member;
  std::shared_ptr<Puller> puller;
  std::shared_ptr<PeerDesk> desk;
  Replicator replicator;

  Copier(TestMember& of, const ReplicaOptions& options, const PullOptions& pulls, Time now)
      : member(of),
        puller(std::make_shared<Puller>(std::shared_ptr<Node>(std::shared_ptr<void>{}, &of.node()),
                                        pulls, now)),
        desk(std::make_shared<PeerDesk>(of.shard, puller)),
        replicator({of.node(), of.view, of.peers, of.shard.get()}, options) {
    of.served->server->set_directory(desk);
  }
  ~Copier() { member.served->server->set_directory(member.shard); }
};

struct Scene {
  TestCluster cluster;
  std::vector<std::unique_ptr<Copier>> copiers;
  Time now = std::chrono::steady_clock::now();
  std::size_t askers = 100;  // so many of them look what is hot

  explicit Scene(std::size_t members, const ReplicaOptions& options = patient(),
                 PullOptions pulls = {}, const NodeOptions& node = slow_to_cool())
      : cluster(members, node) {
    pulls.piece_max = 20s;
    for (const auto& each : cluster.members)
      copiers.push_back(std::make_unique<Copier>(*each, options, pulls, now));
  }
  Copier& operator[](std::size_t i) const { return *copiers[i]; }
  TestMember& member(std::size_t i) const { return cluster[i]; }
  Namespace& space(std::size_t i) const { return cluster[i].space(kBlock); }

  // Put at one member, told to all, and used so often there.
  std::vector<Hash128> hot(std::size_t at, std::uint64_t first, std::size_t count, int uses) {
    const auto keys = keys_from(first, count);
    cluster.put(member(at), keys, kBlock);
    use(at, keys, uses);
    return keys;
  }
  void use(std::size_t at, std::span<const Hash128> keys, int uses) const {
    for (int i = 0; i < uses; ++i) CHECK(member(at).pool().get(space(at), keys) == keys.size());
  }
  std::size_t here(std::size_t at, std::span<const Hash128> keys) const {
    std::size_t count = 0;
    for (const Hash128& key : keys)
      count += member(at).node().look(space(at), {&key, 1}, nullptr).present;
    return count;
  }
  std::size_t places(std::span<const Hash128> keys) const {
    std::size_t count = 0;
    for (std::size_t i = 0; i < cluster.members.size(); ++i) count += here(i, keys);
    return count;
  }
  // All who are asked fetch what their budget allows by then; then time goes on.
  void pass(std::chrono::milliseconds time) {
    for (std::size_t i = 0; i < std::min(askers, copiers.size()); ++i)
      copiers[i]->replicator.turn(now);
    for (const auto& each : copiers) {
      while (each->puller->step(now)) {
      }
    }
    now += time;
  }
  // What came where is told to whoever keeps the directory, as a publisher would.
  void tell(std::size_t at, std::span<const Hash128> keys) {
    cluster.announce(member(at), space(at), keys);
  }
  void tell_what_came(std::size_t at, std::span<const std::vector<Hash128>> chains) {
    std::vector<Hash128> came;
    for (const auto& keys : chains)
      std::ranges::copy_if(keys, std::back_inserter(came),
                           [&](const Hash128& key) { return here(at, {&key, 1}) == 1; });
    tell(at, came);
  }
  // So many searches of each.
  void search(int times) {
    for (int i = 0; i < times * 12; ++i) pass(100ms);
  }
  ReplicaStats stats(std::size_t i) const { return copiers[i]->replicator.stats(); }
};

TEST_CASE("cluster copies: what is hot gets its second holder, and no third") {
  Scene scene(4);
  const auto keys = scene.hot(0, 1, 40, 6);
  const auto cold = scene.hot(0, 1000, 40, 1);
  scene.search(2);
  CHECK(scene.places(keys) == 80);
  CHECK(scene.places(cold) == 40);
  for (std::size_t i = 1; i < 4; ++i)
    if (const std::size_t here = scene.here(i, keys); here > 0) {
      CHECK(here == 40);  // in one place, as one chain
      scene.tell(i, keys);
      CHECK(scene.member(i).node().chain_of(scene.space(i), keys.back(), 100).size() == 40);
    }
  scene.search(10);
  CHECK(scene.places(keys) == 80);
  CHECK(scene.stats(0).asked_blocks == 40);
  CHECK(scene.stats(0).copied_blocks == 40);
  CHECK(scene.stats(0).copied_bytes == 40ull * kBlock);
  scene.cluster.check_at_rest();
}

TEST_CASE("cluster copies: as many as are wanted, asked for by one of those who have it") {
  ReplicaOptions options = patient();
  options.max_replicas = 3;
  Scene scene(5, options);
  const auto keys = scene.hot(0, 1, 20, 10);
  for (int round = 0; round < 6; ++round) {
    std::vector<std::size_t> before;
    for (std::size_t i = 0; i < 5; ++i) before.push_back(scene.here(i, keys));
    scene.search(1);
    for (std::size_t i = 0; i < 5; ++i)
      if (before[i] == 0 && scene.here(i, keys) == 20) {
        scene.tell(i, keys);
        scene.use(i, keys, 10);  // it is as hot there: two may ask now
      }
    CHECK(scene.places(keys) <= 60);
  }
  CHECK(scene.places(keys) == 60);
  options.max_replicas = 1;
  Scene alone(3, options);
  const auto others = alone.hot(0, 1, 20, 10);
  alone.search(3);
  CHECK(alone.places(others) == 20);
  CHECK(alone.stats(0).searches == 0);
  scene.cluster.check_at_rest();
}

TEST_CASE("cluster copies: two prefixes that share their beginning have it copied once") {
  Scene scene(4);
  const auto trunk = scene.hot(0, 1, 20, 4);
  std::vector<std::vector<Hash128>> chains;
  for (std::uint64_t branch = 1; branch <= 2; ++branch) {
    auto keys = trunk;
    const auto more = keys_from(branch * 1000, 10);
    keys.insert(keys.end(), more.begin(), more.end());
    scene.cluster.put(scene.member(0), keys, kBlock);
    scene.use(0, keys, 6);
    chains.push_back(keys);
  }
  for (int round = 0; round < 2; ++round) {
    scene.search(2);
    for (std::size_t at = 1; at < 4; ++at) scene.tell_what_came(at, chains);
  }
  CHECK(scene.places(trunk) == 40);
  for (const auto& keys : chains) CHECK(scene.places(keys) == 60);
  scene.cluster.check_at_rest();
}

TEST_CASE("cluster copies: who asks and who fetches keep to their budgets, whatever there is") {
  ReplicaOptions options = patient();
  options.bytes_per_s = 2 * kMiB;
  PullOptions pulls;
  pulls.bytes_per_s = 1 * kMiB;
  Scene scene(3, options, pulls);
  const auto keys = scene.hot(0, 1, 160, 6);  // 10 MiB
  const Time began = scene.now;
  const std::uint64_t piece = Puller::kPieceBytes, batch = options.bytes_per_s / 4;
  std::uint64_t copied = 0;
  for (int i = 0; i < 400 && copied < 160; ++i) {
    scene.pass(100ms);
    const double passed = std::chrono::duration<double>(scene.now - began).count();
    const ReplicaStats asked = scene.stats(0);
    copied = asked.copied_blocks;
    CHECK(static_cast<double>(asked.asked_bytes) <=
          static_cast<double>(options.bytes_per_s) * (passed + 1) + static_cast<double>(batch));
    for (std::size_t at = 1; at < 3; ++at) {
      const PullStats pulled = scene[at].puller->stats();
      // One that begins has no second of its budget saved up.
      CHECK(static_cast<double>(pulled.bytes) <= static_cast<double>(pulls.bytes_per_s) * passed +
                                                     static_cast<double>(std::min(piece, batch)));
      CHECK(pulled.queued <= 1);
    }
  }
  CHECK(copied == 160);
  CHECK(std::chrono::duration<double>(scene.now - began).count() > 8);
  scene.cluster.check_at_rest();
}

TEST_CASE("cluster copies: one that comes new and empty is asked by all, and takes what it can") {
  PullOptions pulls;
  pulls.bytes_per_s = 1 * kMiB;
  Scene scene(4, patient(), pulls);
  // All but the last are full of what is hot, so that it has the least to do.
  std::vector<std::vector<Hash128>> keys;
  for (std::size_t at = 0; at < 3; ++at) {
    keys.push_back(scene.hot(at, 1000 * (at + 1), 100, 6));
    scene[at].desk->set_load({.served_kib_s = 100'000, .taken = 60'000, .is_told = 1});
  }
  scene[3].desk->set_load({.served_kib_s = 0, .taken = 0, .is_told = 1});
  for (std::size_t at = 0; at < 3; ++at) scene.tell(at, keys[at]);
  const Time began = scene.now;
  for (int i = 0; i < 40; ++i) {
    scene.pass(100ms);
    const double passed = std::chrono::duration<double>(scene.now - began).count();
    CHECK(static_cast<double>(scene[3].puller->stats().bytes) <=
          static_cast<double>(pulls.bytes_per_s) * passed +
              static_cast<double>(Puller::kPieceBytes));
  }
  CHECK(scene[3].puller->stats().blocks > 0);
  scene.cluster.check_at_rest();
}

TEST_CASE("cluster copies: the one with the least to do is asked") {
  Scene scene(4);
  scene[1].desk->set_load({.served_kib_s = 500'000, .taken = 1000, .is_told = 1});
  scene[2].desk->set_load({.served_kib_s = 10, .taken = 1000, .is_told = 1});
  scene[3].desk->set_load({.served_kib_s = 10, .taken = 65'000, .is_told = 1});
  const auto keys = scene.hot(0, 1, 200, 6);  // each of them is asked who has some of these
  scene.search(1);                            // by then all have answered something
  for (std::size_t i = 1; i < 4; ++i)
    CHECK(scene.member(0).peer(scene.member(i))->load().is_told == 1);
  CHECK(scene.here(1, keys) == 0);
  CHECK(scene.here(2, keys) == 200);
  CHECK(scene.here(3, keys) == 0);
  scene.cluster.check_at_rest();
}

TEST_CASE("cluster copies: a prefix that was refused is left alone for a while") {
  Scene scene(2, patient(), {}, slow_to_cool(4 * kMiB));
  scene.askers = 1;
  scene.hot(1, 5000, 64, 40);  // the other member is full of these
  const auto keys = scene.hot(0, 1, 20, 5);
  scene.search(5);
  CHECK(scene.here(1, keys) == 0);
  CHECK(scene.stats(0).asked == 1);
  CHECK(scene.stats(0).too_cold == 1);
  CHECK(scene.stats(0).paused == 1);
  scene.now += 60s;
  scene.search(2);
  CHECK(scene.stats(0).asked == 2);
  CHECK(scene.stats(0).too_cold == 2);
  scene.use(0, keys, 200);
  scene.now += 60s;
  scene.search(2);
  CHECK(scene.here(1, keys) == 20);
  scene.cluster.check_at_rest();
}

TEST_CASE("cluster copies: one that is busy is asked later, and one that leaves refuses") {
  PullOptions pulls;
  pulls.bytes_per_s = 1 * kMiB;
  Scene scene(3, patient(), pulls);
  const auto keys = scene.hot(0, 1, 8, 6);
  const Hash128 someone = key_of(77);
  const auto much = keys_from(9000, 100);
  for (const std::size_t at : {1, 2})
    CHECK(
        scene[at]
            .puller
            ->ask({.space = scene.space(0).id, .from = someone, .number = 1, .block_bytes = kBlock},
                  much, false)
            .state == Pulling::working);
  for (int i = 0; i < 15; ++i) {
    for (const auto& each : scene.copiers) each->replicator.turn(scene.now);
    scene.now += 100ms;  // nobody fetches anything
  }
  CHECK(scene.stats(0).busy == 1);
  CHECK(scene.stats(0).asked == 1);
  scene[1].puller->stop();
  scene[2].puller->stop();
  scene.now += 3s;
  scene.search(3);
  CHECK(scene.stats(0).refused == 1);
  CHECK(scene.places(keys) == 8);
  scene.cluster.check_at_rest();
}

TEST_CASE("cluster copies: a prefix that cools stays hot for a while, and then is not") {
  Scene scene(2);
  scene.hot(0, 1, 5, 4);
  scene.search(1);
  scene.search(1);
  CHECK(scene.stats(0).hot == 1);
  auto& clock = *scene.member(0).pool().clock;
  clock.set(clock.now() + 900);  // heat 2.7: between the two bounds
  scene.search(2);
  CHECK(scene.stats(0).hot == 1);
  clock.set(clock.now() + 1000);
  scene.search(2);
  CHECK(scene.stats(0).hot == 0);
  clock.set(clock.now() + 1);
  scene.use(0, keys_from(1, 5), 2);  // heat 3.3
  scene.search(2);
  CHECK(scene.stats(0).hot == 0);
  scene.cluster.check_at_rest();
}

TEST_CASE("cluster copies: blocks that went meanwhile, and a namespace of other blocks") {
  Scene scene(2);
  const auto keys = scene.hot(0, 1, 20, 6);
  scene[0].replicator.turn(scene.now);
  scene.now += 1s;
  scene[0].replicator.turn(scene.now);  // asks
  CHECK(scene.stats(0).asked == 1);
  scene.member(0).node().remove(scene.space(0), std::span(keys).subspan(10));
  scene.search(1);
  CHECK(scene.here(1, keys) == 10);
  CHECK(scene.stats(0).given_up == 1);
  CHECK(scene.stats(0).copied_blocks == 10);
  PullHead head{.space = scene.space(0).id, .from = key_of(5), .number = 1, .block_bytes = 8};
  CHECK(scene[1].puller->ask(head, keys, false).state == Pulling::refused);
  head.space = key_of(123);  // one that nobody has opened here
  head.block_bytes = 0;
  CHECK(scene[1].puller->ask(head, keys, false).state == Pulling::refused);
  scene.cluster.check_at_rest();
}

TEST_CASE("cluster copies: a member that nobody can reach costs one request, then none") {
  Scene scene(3);
  const auto keys = scene.hot(0, 1, 300, 6);
  scene.search(0);
  scene.member(1).served->server->close();
  scene.member(2).served->server->close();
  scene.search(5);
  CHECK(scene.places(keys) == 300);
  CHECK(scene.stats(0).unanswered <= 2);
  CHECK(scene.stats(0).under_way == 0);
}

}  // namespace
}  // namespace kvpool
