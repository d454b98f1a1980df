// Members that are slow, hang or are busy: they take no time from the others, and who asked in
// haste blames nobody.
#include "cluster/peer_wire.h"
#include "cluster_members.h"

using namespace kvpool;
using namespace kvpool::test;

namespace {

constexpr std::uint32_t kBlockBytes = 50'000;

// Two members beside the last, which is connected to the second; the first hangs: its streams take
// what is sent and answer nothing.
struct Scene {
  TestCluster cluster;
  std::vector<Descriptor> silent;

  explicit Scene(const PeerOptions& options = {})
      : cluster(3, TestCluster::plain(), 0, Kind::unix_socket, options) {
    TestCluster::connect(us(), other(), 3);
    hang();
  }
  TestMember& us() { return cluster[2]; }
  TestMember& other() { return cluster[1]; }
  Peer& hanging() { return *us().peer(cluster[0]); }
  Peer& working() { return *us().peer(other()); }
  void hang() {
    Ends ends(Kind::unix_socket);
    REQUIRE(hanging().add_stream(give(ends.near)).has_value());
    silent.push_back(std::move(ends.far));
  }
  // Directory keys, of which the members have this many each or more.
  static std::vector<DirectoryKey> names() {
    std::vector<DirectoryKey> names;
    for (std::uint64_t i = 0; i < 100; ++i)
      names.push_back(make_directory_key(key_of(1), key_of(i)));
    return names;
  }
  // Whether all keys of that member are known, or none is.
  bool are_known(TestMember& owner, std::span<const Whereabouts> where, bool is_known) {
    const auto view = us().view.now();
    const MemberHandle handle = view->by_id(owner.id)->handle;
    const auto all = names();
    for (std::size_t i = 0; i < all.size(); ++i)
      if (view->owner_of(all[i]) == handle && where[i].is_known != is_known) return false;
    return true;
  }
  Miss locate(Elsewhere::Deadline deadline, std::vector<Whereabouts>& where) {
    const auto all = names();
    where.assign(all.size(), {});
    const auto view = us().view.now();
    return LocateRound(*view, us().peers, us().shard.get()).run(all, deadline, where);
  }
};

}  // namespace

TEST_CASE("cluster haste: all who answer are heard, whoever hangs") {
  Scene scene;
  std::vector<Whereabouts> where;
  CHECK(scene.locate(after(3s), where) == Miss::timed_out);
  CHECK(scene.are_known(scene.us(), where, true));
  CHECK(scene.are_known(scene.other(), where, true));
  CHECK(scene.are_known(scene.cluster[0], where, false));
  CHECK(scene.working().stats().breaker == BreakerState::closed);
  CHECK(scene.hanging().stats().breaker == BreakerState::open);
}

TEST_CASE("cluster haste: a member whose streams are all lent takes no time from the others") {
  Scene scene;
  bool late = false;
  const auto lent = scene.hanging().borrow_short(after(10s), late);
  REQUIRE(!lent.empty());
  std::vector<Whereabouts> where;
  CHECK(scene.locate(after(3s), where) == Miss::timed_out);
  CHECK(scene.are_known(scene.other(), where, true));
  // Busy is not broken.
  CHECK(scene.hanging().stats().breaker == BreakerState::closed);
  CHECK(scene.working().stats().breaker == BreakerState::closed);
  CHECK(scene.working().stats().failures == 0);
}

TEST_CASE("cluster haste: no time at all, and nobody is blamed") {
  Scene scene;
  bool late = false;
  const auto lent = scene.hanging().borrow_short(after(10s), late);
  std::vector<Whereabouts> where;
  const Miss why = scene.locate(std::chrono::steady_clock::now(), where);
  CHECK(why == Miss::timed_out);
  CHECK(scene.working().stats().breaker == BreakerState::closed);
  CHECK(scene.are_known(scene.us(), where, true));
}

TEST_CASE("cluster haste: a request that had little time is no failure of whom it was for") {
  Scene scene({.patience = 10s});
  std::vector<Whereabouts> where;
  CHECK(scene.locate(after(30ms), where) == Miss::timed_out);
  CHECK(scene.hanging().stats().breaker == BreakerState::closed);
  CHECK(scene.hanging().stats().hurried == 1);
  CHECK(scene.hanging().stats().failures == 0);
  CHECK(scene.hanging().streams() == 0);  // an answer that comes after all belongs to nobody
  REQUIRE(!scene.us().peers.wanted().wait(after(10s)).empty());

  Scene patient({.patience = 10ms});
  CHECK(patient.locate(after(200ms), where) == Miss::timed_out);
  CHECK(patient.hanging().stats().breaker == BreakerState::open);
  CHECK(patient.hanging().stats().hurried == 0);
}

TEST_CASE("cluster haste: a member that takes no more connections serves those that it has") {
  Scene scene({.pause_min = 60s, .pause_max = 60s});
  scene.working().dial_failed();
  CHECK(scene.working().stats().breaker == BreakerState::closed);
  CHECK(scene.working().may_ask());
  // It is not dialled again at once, whoever asks for it.
  scene.us().peers.wanted().wait(std::chrono::steady_clock::now());
  bool late = false;
  const auto lent = scene.working().borrow_bulk(4, after(10s), late);
  CHECK(!lent.empty());
  for (const WantedStream& each : scene.us().peers.wanted().wait(std::chrono::steady_clock::now()))
    CHECK(each.id != scene.other().id);

  Scene alone;
  alone.silent.clear();
  std::vector<Whereabouts> where;
  alone.locate(after(10s), where);  // so its end is seen
  CHECK(alone.hanging().streams() == 0);
  alone.hanging().dial_failed();
  CHECK(alone.hanging().stats().breaker == BreakerState::open);
}

TEST_CASE("cluster haste: connections that ended unseen fail once, all together") {
  Scene scene({.pause_min = 60s, .pause_max = 60s});
  scene.other().served->server->drop_client(scene.other().served->client);
  wait_until([&] { return scene.other().served->server->stats().streams == 0; });
  CHECK(scene.working().streams() == 3);
  std::vector<Whereabouts> where;
  scene.locate(after(200ms), where);
  CHECK(scene.are_known(scene.other(), where, false));
  CHECK(scene.working().streams() == 0);
  scene.other().served->client = scene.other().served->server->add_client();
  TestCluster::connect(scene.us(), scene.other(), 3);
  CHECK(scene.working().streams() == 3);
  scene.locate(after(10s), where);
  CHECK(scene.are_known(scene.other(), where, true));
}

TEST_CASE("cluster haste: a stream is given back with its answer, not with the last one") {
  Scene scene;
  scene.hang();
  std::thread slow([&] {
    std::vector<Whereabouts> where;
    scene.locate(after(3s), where);
  });
  wait_until([&] { return scene.working().stats().requests > 0; });
  bool late = false;
  CHECK(!scene.working().borrow_short(after(1s), late).empty());
  slow.join();
}

TEST_CASE("cluster haste: batches to one that hangs take no time from the others") {
  Scene scene;
  PeerWire wire(scene.us().view, scene.us().peers, *scene.us().shard);
  const auto view = scene.us().view.now();
  const std::vector<DirectoryKey> keys = keys_from(0, 10);
  std::vector<Wire::Parcel> parcels;
  for (const auto& each : scene.cluster.members)
    parcels.push_back({.to = view->by_id(each->id)->handle,
                       .batch = {.from = {scene.us().id, 1, 1}, .is_fresh = true, .keys = keys}});
  wire.send_all(parcels, after(3s));
  CHECK(parcels[0].sent == Sent::retry);
  CHECK(parcels[1].sent == Sent::ok);
  CHECK(parcels[2].sent == Sent::ok);
  CHECK(scene.other().shard->stats().published == 10);
  CHECK(scene.us().shard->stats().published == 10);
  CHECK(scene.working().stats().breaker == BreakerState::closed);
  CHECK(scene.hanging().stats().breaker == BreakerState::open);
  // Lent to others: that is no pause.
  bool late = false;
  const auto bulk = scene.working().borrow_bulk(4, after(10s), late);
  const auto rest = scene.working().borrow_short(after(10s), late);
  REQUIRE(scene.working().streams() == bulk.streams().size() + rest.streams().size());
  CHECK(wire.send(parcels[1].to, parcels[1].batch, after(1s)) == Sent::busy);
  CHECK(scene.working().stats().breaker == BreakerState::closed);
}

// A sink whose node has no memory at all for what comes.
class NoMemory final : public BlockSink {
 public:
  bool deliver(std::size_t, const IndexReader&, const Found&) override { return false; }
  bool deliver_whole(std::size_t, std::span<const std::byte>) override { return false; }
};

TEST_CASE("cluster haste: want of memory here is no failure of a holder") {
  TestCluster cluster(3);
  const auto keys = keys_from(1, 5);
  cluster.put(cluster[0], keys, kBlockBytes);
  NoMemory sink;
  const Elsewhere::Ask ask{cluster[2].space(kBlockBytes), keys, after(10s)};
  CHECK(cluster[2].finder->fetch(ask, sink) == Miss::moved);
  CHECK(cluster[2].peer(cluster[0])->stats().breaker == BreakerState::closed);
  CHECK(cluster[2].peer(cluster[0])->stats().failures == 0);
  wait_until([&] { return cluster[0].node().stats().pinned == 0; });
}

TEST_CASE("cluster haste: a holder that was asked in vain says once more that it has it not") {
  TestCluster cluster(3);
  Namespace& space = cluster[0].space(kBlockBytes);
  const auto keys = keys_from(1, 3);
  cluster.announce(cluster[0], space, keys);  // of what it never had
  Node& holder = cluster[0].node();
  Changes* const heard = holder.listen(1 << 10);
  std::vector<Change> changes;
  CHECK(!holder.take_changes(heard, changes));
  Miss why{};
  CHECK(cluster[2].get(keys, kBlockBytes, why) == 0);
  CHECK(why == Miss::absent);
  CHECK(cluster[2].finder->stats().stale == 1);
  REQUIRE(holder.take_changes(heard, changes));
  REQUIRE(changes.size() == 1);
  CHECK((changes[0].key == keys[0] && !changes[0].came() && changes[0].space == &space));

  // Nobody makes a node deny what it has; and it says so a few times, not without end.
  cluster[0].served->put(space, std::span(keys).first(1));
  REQUIRE(holder.take_changes(heard, changes));
  holder.deny(space, keys[0]);
  CHECK((holder.take_changes(heard, changes) && changes.empty()));
  for (int i = 0; i < 5000; ++i) holder.deny(space, keys[1]);
  CHECK(holder.take_changes(heard, changes));
  CHECK(changes.size() <= 100);
  // A client that asks for what is not here is nobody's concern.
  const auto channel = cluster[0].served->channel(Kind::unix_socket, 1);
  Space there;
  name(there, space);
  CHECK(get(*channel, there, std::span(keys).subspan(1), why) == 0);
  channel->close();
  CHECK((holder.take_changes(heard, changes) && changes.empty()));
  holder.stop_listening(heard);
}
