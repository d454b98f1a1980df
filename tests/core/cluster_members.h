// Members of a cluster for a test, all in this process: real nodes, servers and directories, joined
// by real sockets. Nobody dials: the test gives each its streams.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "cluster/directory_shard.h"
#include "cluster/finder.h"
#include "cluster/member_view.h"
#include "cluster/peer_book.h"
#include "net_cases.h"

namespace kvpool::test {

struct TestMember {
  Hash128 id;
  std::shared_ptr<DirectoryShard> shard = std::make_shared<DirectoryShard>(DirectoryOptions{});
  MemberView view;
  PeerBook peers;
  std::unique_ptr<Served> served;
  std::shared_ptr<Finder> finder;
  std::uint64_t sequence = 0;  // of what it told everyone

  TestMember(std::uint64_t n, const NodeOptions& options, const PeerOptions& peer_options)
      : id(key_of(n << 32)), peers(peer_options), served(std::make_unique<Served>(options)) {
    served->server->set_directory(shard);
    // No test but those of faults may depend on how busy the machine is.
    finder = std::make_shared<Finder>(view, peers, shard.get(), Finder::Options{.locate_max = 20s});
    served->pool.node->set_elsewhere(finder);
  }
  ~TestMember() {
    if (served) served->pool.node->set_elsewhere(nullptr);
    peers.close();
  }
  Node& node() const { return *served->pool.node; }
  Pool& pool() const { return served->pool; }
  Namespace& space(std::uint32_t block_bytes) const { return pool().space(1, block_bytes); }
  std::shared_ptr<Peer> peer(const TestMember& other) const { return peers.of(other.id); }
  // Leading blocks that came; every one of them is compared.
  std::size_t get(std::span<const Hash128> keys, std::uint32_t block_bytes, Miss& why,
                  const Reach& reach = {}) const {
    KeySink sink(keys, block_bytes);
    const std::size_t count = node().get(space(block_bytes), keys, sink, &why, reach);
    REQUIRE(sink.wrong == 0);
    return count;
  }
};

struct TestCluster {
  std::vector<std::unique_ptr<TestMember>> members;

  static NodeOptions plain(std::uint64_t bytes = 64 * kMiB,
                           std::chrono::milliseconds far_timeout = 30s) {
    NodeOptions options = Pool::plain(bytes);
    options.far_timeout = far_timeout;
    return options;
  }
  explicit TestCluster(std::size_t count, const NodeOptions& options = plain(),
                       std::size_t streams = 3, Kind kind = Kind::unix_socket,
                       const PeerOptions& peer_options = {}) {
    for (std::size_t i = 0; i < count; ++i)
      members.push_back(std::make_unique<TestMember>(i + 1, options, peer_options));
    tell_members();
    for (const auto& from : members)
      for (const auto& to : members)
        if (from != to) connect(*from, *to, streams, kind);
  }
  TestMember& operator[](std::size_t i) const { return *members[i]; }

  void tell_members() {
    for (const auto& each : members) {
      std::vector<MemberInfo> infos;
      for (const auto& other : members)
        infos.push_back({.id = other->id,
                         .incarnation = 1,
                         .weight = 1,
                         .addresses = {},
                         .state = MemberState::up,
                         .is_self = other == each});
      REQUIRE(each->view.set(infos).has_value());
      each->peers.set_members(*each->view.now());
    }
  }
  static void connect(TestMember& from, TestMember& to, std::size_t streams,
                      Kind kind = Kind::unix_socket) {
    for (std::size_t i = 0; i < streams; ++i) {
      Ends ends(kind);
      REQUIRE(to.served->server
                  ->add_stream(to.served->client, give(ends.far), StreamKind::peer, {from.id, 1})
                  .has_value());
      REQUIRE(from.peer(to)->add_stream(give(ends.near)).has_value());
    }
  }
  TestMember& owner_of(const Namespace& space, const Hash128& key) const {
    const auto view = members[0]->view.now();
    const auto* owner = view->by_handle(view->owner_of(make_directory_key(space.id, key)));
    for (const auto& each : members)
      if (each->id == owner->info.id) return *each;
    return *members[0];
  }
  // Every owner hears that `holder` has them.
  void announce(TestMember& holder, const Namespace& space, std::span<const Hash128> keys) {
    for (const auto& owner : members) {
      std::vector<DirectoryKey> names;
      for (const Hash128& key : keys)
        if (&owner_of(space, key) == owner.get())
          names.push_back(make_directory_key(space.id, key));
      const Announcement from{holder.id, 1, holder.sequence + 1};
      REQUIRE(owner->shard->publish(from, names, holder.sequence == 0) == Told::ok);
    }
    ++holder.sequence;
  }
  void put(TestMember& holder, std::span<const Hash128> keys, std::uint32_t block_bytes) {
    holder.served->put(holder.space(block_bytes), keys);
    announce(holder, holder.space(block_bytes), keys);
  }
  void check_at_rest() {
    for (const auto& each : members) {
      CHECK(each->node().stats().far_fetching == 0);
      each->pool().check_at_rest();
      for (const PeerStats& stats : each->peers.stats()) CHECK(stats.in_flight_bytes == 0);
    }
  }
};

}  // namespace kvpool::test
