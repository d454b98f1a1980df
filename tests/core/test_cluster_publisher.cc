// From a node's changes to the directories of others: real nodes, servers and streams. Whatever is
// lost on the way, the directory comes to equal what the node has.
#include <map>

#include "cluster/publisher.h"
#include "cluster_cases.h"

namespace kvpool {
namespace {

using namespace test;

constexpr std::size_t kBlock = 4096;
const Hash128 kSelf = key_of(900);

Hash128 id_of(std::size_t member) { return member == 0 ? kSelf : key_of(900 + member); }

// The node that tells, in a cluster with members that keep parts of the directory.
struct Cluster {
  Pool pool{Pool::plain(8 * kMiB)};
  std::shared_ptr<DirectoryShard> own = std::make_shared<DirectoryShard>(DirectoryOptions{});
  std::map<MemberHandle, std::unique_ptr<Member>> others;
  StreamWire wire;
  OwnerView view;
  std::unique_ptr<Publisher> publisher;
  Publisher::Time now = std::chrono::steady_clock::now();
  Namespace* space = &pool.space(1, kBlock);

  explicit Cluster(std::size_t members, const PublisherOptions& options = {}) {
    for (std::size_t i = 1; i < members; ++i) begin(static_cast<MemberHandle>(i));
    publisher = std::make_unique<Publisher>(
        Publisher::Parts{*pool.node, *own, wire, {.node = kSelf, .incarnation = 1}}, options);
    std::vector<std::uint32_t> weights(members, 1);
    see(weights);
  }

  // Another life of a member, that knows nothing.
  void begin(MemberHandle handle) {
    auto member = std::make_unique<Member>();
    wire.connect(handle, member->dial({kSelf, 1}));
    others[handle] = std::move(member);
  }
  DirectoryShard& shard(MemberHandle handle) {
    return handle == 0 ? *own : *others.at(handle)->shard;
  }
  // Members by handle; of weight 0: none.
  void see(const std::vector<std::uint32_t>& weights, std::uint64_t incarnation_of_1 = 1) {
    std::vector<Voter> voters;
    std::map<Hash128, MemberHandle> handles;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      if (weights[i] == 0) continue;
      voters.push_back({id_of(i), weights[i]});
      handles[id_of(i)] = static_cast<MemberHandle>(i);
    }
    const OwnerTable before = view.table ? *view.table : OwnerTable();
    view = {.table = std::make_shared<OwnerTable>(OwnerTable::build(voters)),
            .handles = {},
            .incarnations = {},
            .self = 0};
    for (const Voter& each : view.table->voters()) {
      view.handles.push_back(handles[each.id]);
      view.incarnations.push_back(handles[each.id] == 1 ? incarnation_of_1 : 1);
    }
    for (std::size_t i = 0; i < weights.size(); ++i)
      shard(static_cast<MemberHandle>(i))
          .forget_slots(~view.table->slots_of(view.table->index_of(id_of(i))));
    publisher->set_view(view);
  }
  // Turns until nothing is left to tell, but for those out of reach.
  void tell() {
    for (int turns = 0; turns < 10'000; ++turns) {
      now += std::chrono::milliseconds(25);
      publisher->turn(now);
      if (publisher->is_done()) return;
    }
    FAIL("never done");
  }
  void turns(int count) {
    for (; count > 0; --count) publisher->turn(now += std::chrono::milliseconds(25));
  }
  void put(std::uint64_t first, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i)
      REQUIRE(pool.put(*space, key_of(first + i)) <= PutStatus::present);
  }
  void remove(std::uint64_t first, std::size_t count) {
    pool.node->remove(*space, keys_from(first, count));
  }
  // Every key below `keys` is known by its owner if it is here, and by nobody if not.
  void check_truth(std::uint64_t keys) {
    std::size_t wrong = 0;
    for (std::uint64_t i = 0; i < keys; ++i) {
      const DirectoryKey name = make_directory_key(space->id, key_of(i));
      const MemberHandle owner = view.handles[view.table->owner_of(name)];
      const std::set<Hash128> found = located(shard(owner), name);
      wrong += found.contains(kSelf) != pool.has(*space, key_of(i));
      if (owner != 0) wrong += !located(*own, name).empty();
    }
    CHECK(wrong == 0);
  }
};

TEST_CASE("cluster publisher: what comes and goes is told to the owners") {
  Cluster cluster(3);
  cluster.put(0, 50);  // before anybody heard of this node
  cluster.tell();
  cluster.check_truth(100);
  cluster.put(50, 100);
  cluster.remove(20, 60);
  cluster.put(30, 5);
  cluster.tell();
  cluster.check_truth(200);
  const PublisherStats stats = cluster.publisher->stats();
  CHECK(stats.owners == 3);
  CHECK(stats.begun_anew == 3);
  CHECK(stats.gaps == 0);
  CHECK(stats.retries == 0);
}

TEST_CASE("cluster publisher: what is evicted is withdrawn") {
  Cluster cluster(3);
  cluster.put(0, 6000);  // the pool has room for 2048
  cluster.tell();
  CHECK(cluster.pool.node->stats().blocks <= 2048);
  cluster.check_truth(6000);
}

TEST_CASE("cluster publisher: a queue that overflows, and a node that lost count") {
  PublisherOptions options;
  SUBCASE("queue") { options.keys_queued_max = 0; }  // the least that it takes
  SUBCASE("ring") { options.changes_max = 64; }
  Cluster cluster(2, options);
  cluster.tell();
  for (std::uint64_t round = 0; round < 30; ++round) {
    cluster.put(round * 10, 400);
    cluster.remove(round * 10 + 1, 350);
  }
  cluster.tell();
  const PublisherStats stats = cluster.publisher->stats();
  CHECK(stats.overflows == (options.keys_queued_max == 0 ? 2 : 0));
  CHECK(stats.lost == (options.keys_queued_max == 0 ? 0 : 1));
  CHECK(stats.begun_anew == 4);
  cluster.check_truth(1000);
}

TEST_CASE("cluster publisher: a queue overflows while its owner is out of reach") {
  PublisherOptions options;
  options.keys_queued_max = 8192;
  Cluster cluster(3, options);
  cluster.put(0, 200);
  cluster.tell();
  cluster.wire.out_of_reach.insert(1);
  for (std::uint64_t round = 0; round < 10; ++round) {
    cluster.put(200, 1500);
    cluster.remove(200, 1500);
    cluster.turns(1);
  }
  cluster.remove(0, 100);
  cluster.put(5000, 100);
  cluster.turns(40);
  CHECK(cluster.publisher->stats().overflows > 0);
  CHECK(cluster.publisher->stats().retries > 0);
  CHECK(!cluster.publisher->is_done());
  cluster.wire.out_of_reach.clear();
  cluster.tell();
  cluster.check_truth(5200);
}

TEST_CASE("cluster publisher: one out of reach costs little, and hears all when it is back") {
  Cluster cluster(3);
  cluster.tell();
  cluster.wire.out_of_reach.insert(2);
  const std::uint64_t before = cluster.wire.sent;
  for (std::uint64_t i = 0; i < 200; ++i) {
    cluster.put(i * 3, 3);
    cluster.remove(i * 3, 1);
    cluster.turns(1);  // 5 s in all
  }
  // Five for the one that is away: after .25, .5, 1, 2 s; and some two a turn for the other.
  CHECK(cluster.publisher->stats().retries <= 6);
  CHECK(cluster.wire.sent - before <= 6 + 2 * 200);
  cluster.wire.out_of_reach.clear();
  cluster.tell();
  cluster.check_truth(600);
  CHECK(cluster.publisher->stats().begun_anew == 3);  // its queue held it all
}

TEST_CASE("cluster publisher: answers that get lost") {
  Cluster cluster(2);
  cluster.wire.loses_answers = 1;
  cluster.put(0, 100);
  cluster.tell();
  for (std::uint64_t round = 1; round < 10; ++round) {
    cluster.wire.loses_answers = 2;
    cluster.put(round * 100, 100);
    cluster.remove(round * 100 - 50, 70);
    cluster.tell();
    cluster.check_truth(1000);
  }
  CHECK(cluster.shard(1).stats().repeated > 0);
  CHECK(cluster.shard(1).stats().gaps == 0);
}

TEST_CASE("cluster publisher: an owner that began another life") {
  Cluster cluster(3);
  cluster.put(0, 300);
  cluster.tell();
  cluster.begin(1);
  SUBCASE("is told by its view") { cluster.see({1, 1, 1}, 2); }
  SUBCASE("says so when it hears more") { cluster.put(300, 50); }
  cluster.tell();
  cluster.check_truth(400);
}

TEST_CASE("cluster publisher: an owner forgot this node, which never saw that it was away") {
  PublisherOptions options;
  Cluster cluster(3, options);
  cluster.put(0, 300);
  cluster.tell();
  const std::vector<HolderName> without{{id_of(1), 1}, {id_of(2), 1}};
  cluster.shard(1).set_members(std::vector<HolderName>{{kSelf, 1}, {id_of(1), 1}, {id_of(2), 1}});
  cluster.shard(1).set_members(without);
  const DirectoryKey name = [&] {  // one that it keeps
    for (std::uint64_t i = 0;; ++i) {
      const DirectoryKey each = make_directory_key(cluster.space->id, key_of(i));
      if (cluster.view.handles[cluster.view.table->owner_of(each)] == 1) return each;
    }
  }();
  CHECK(located(cluster.shard(1), name).empty());
  cluster.now += options.check_every;
  cluster.turns(1);
  cluster.tell();
  cluster.check_truth(400);
  CHECK(cluster.publisher->stats().gaps == 1);
  // Who says nothing new is asked no more often than that.
  const std::uint64_t batches = cluster.publisher->stats().batches;
  cluster.turns(400);  // 10 s
  CHECK(cluster.publisher->stats().batches - batches <= 3 * 3);
  CHECK(cluster.publisher->stats().lost == 0);
}

TEST_CASE("cluster publisher: members that come and go take their slots along") {
  Cluster cluster(4);
  cluster.see({1, 1, 0, 0});
  cluster.put(0, 500);
  cluster.tell();
  cluster.check_truth(600);
  const std::uint64_t announced = cluster.publisher->stats().announced;
  cluster.see({1, 1, 1, 0});
  cluster.tell();
  cluster.check_truth(600);
  // The slots that moved, for the one that came: a third, told once, or twice with its first round.
  CHECK(cluster.publisher->stats().announced - announced <= 2 * 220);
  cluster.see({1, 0, 1, 2});
  cluster.put(500, 100);
  cluster.remove(0, 50);
  cluster.tell();
  cluster.check_truth(600);
  cluster.see({0, 1, 1, 0});
  cluster.tell();
  cluster.see({1, 1, 1, 1});
  cluster.tell();
  cluster.check_truth(600);
}

TEST_CASE("cluster publisher: a namespace that is dropped") {
  Cluster cluster(2);
  cluster.put(0, 300);
  cluster.tell();
  REQUIRE(cluster.pool.node->drop_namespace(*cluster.space, never_hung()).has_value());
  cluster.put(100, 20);
  cluster.tell();
  cluster.check_truth(300);
}

TEST_CASE("cluster publisher: a later life of this node ends what it tells") {
  Cluster cluster(2);
  cluster.put(0, 10);
  cluster.tell();
  const Announcement later{.node = kSelf, .incarnation = 2, .sequence = 1};
  CHECK(cluster.shard(1).publish(later, {}, true) == Told::ok);
  cluster.put(10, 100);
  cluster.tell();
  CHECK(cluster.shard(1).stats().stale == 1);
  cluster.put(200, 100);
  cluster.tell();
  CHECK(cluster.shard(1).stats().stale == 1);
}

TEST_CASE("cluster publisher: all is told again from time to time, at its pace") {
  PublisherOptions options;
  options.announced_per_s = 1000;
  Cluster cluster(2, options);
  cluster.put(0, 500);
  cluster.tell();
  const auto rounds = cluster.publisher->stats().rounds;
  const auto began = cluster.now;
  cluster.now += options.announce_every;
  cluster.turns(1);
  cluster.tell();
  CHECK(cluster.publisher->stats().rounds == rounds + 1);
  cluster.now = began + 2 * options.announce_every + std::chrono::seconds(1);
  cluster.publisher->turn(cluster.now);
  cluster.see({1, 2});  // so another round is asked for, half a second of telling later
  const auto asked = cluster.now;
  cluster.tell();
  CHECK(cluster.now - asked >= std::chrono::milliseconds(450));
  cluster.check_truth(500);
}

TEST_CASE("cluster publisher: any operations, faults and views") {
  Random random("cluster publisher");
  PublisherOptions options;
  options.changes_max = 300;
  options.keys_queued_max = 6000;
  Cluster cluster(4, options);
  constexpr std::uint64_t kKeys = 3000;
  std::uint64_t life = 1;
  std::vector<std::uint32_t> weights(4, 1);
  for (std::size_t step = 0; step < scaled(300); ++step) {
    const int what = random.between(0, 99);
    const auto first = random.between<std::uint64_t>(0, kKeys - 300);
    if (what < 40)
      cluster.put(first, random.between<std::size_t>(1, 300));
    else if (what < 65)
      cluster.remove(first, random.between<std::size_t>(1, 300));
    else if (what < 70)
      cluster.wire.loses_answers = random.between(1, 3);
    else if (what < 75)
      cluster.wire.out_of_reach.insert(MemberHandle(random.between(1, 3)));
    else if (what < 80)
      cluster.wire.out_of_reach.clear();
    else if (what < 83)
      cluster.begin(MemberHandle(random.between(1, 3)));
    else if (what < 86) {
      cluster.begin(1);
      cluster.see(weights, ++life);
    } else if (what < 90) {
      for (std::uint32_t& each : weights) each = random.between(0u, 2u);
      weights[0] = 1;
      cluster.see(weights, life);
    } else if (what < 91) {
      (void)cluster.pool.node->drop_namespace(*cluster.space, never_hung());
    }
    cluster.turns(random.between(0, 3));
    if (step % 30 != 29) continue;
    cluster.wire.out_of_reach.clear();
    cluster.wire.loses_answers = 0;
    // Those that began another life unnoticed say so when they hear of something.
    cluster.remove(0, kKeys);
    cluster.put(0, 200);
    cluster.tell();
    cluster.check_truth(kKeys);
  }
}

TEST_CASE("cluster publisher: its own thread, beside puts") {
  Cluster cluster(2);
  cluster.publisher->start();
  std::vector<std::thread> writers;
  for (std::uint64_t writer = 0; writer < 2; ++writer)
    writers.emplace_back([&, writer] {
      for (std::uint64_t round = 0; round < scaled(20); ++round) {
        cluster.pool.node->remove(*cluster.space, keys_from(writer * 1000, 500));
        for (std::uint64_t i = 0; i < 200; ++i) {
          const Hash128 key = key_of(writer * 1000 + (round * 37 + i) % 1000);
          PutStatus status{};
          KeySource one({&key, 1}, kBlock);
          cluster.pool.node->put({*cluster.space, {&key, 1}, nullptr, never_hung()}, one, &status);
        }
      }
    });
  for (std::thread& each : writers) each.join();
  cluster.put(5000, 1);
  const DirectoryKey last = make_directory_key(cluster.space->id, key_of(5000));
  wait_until([&] {
    const auto owner = cluster.view.handles[cluster.view.table->owner_of(last)];
    return cluster.publisher->is_done() && located(cluster.shard(owner), last).contains(kSelf);
  });
  cluster.publisher->stop();
  cluster.now = std::chrono::steady_clock::now();
  cluster.tell();
  cluster.check_truth(2000);
}

}  // namespace
}  // namespace kvpool
