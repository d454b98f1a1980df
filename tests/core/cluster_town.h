// Several hosts in one process: each a node, its server and its part in a cluster, joined by real
// sockets. A thread of each host dials whom its cluster wants, as a daemon does.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "cluster/cluster.h"
#include "cluster_relay.h"
#include "net_cases.h"

namespace kvpool::test {

class Town;

struct Host {
  Hash128 id;
  std::uint64_t incarnation = 1;
  Served served;
  std::unique_ptr<Cluster> cluster;
  std::atomic<bool> is_away{false};  // nobody reaches it any more by dialling
  Meter* meter = nullptr;            // on the links to it that are made from now on
  std::thread dialer;

  Host(std::size_t number, const NodeOptions& options, ClusterOptions wanted,
       const std::optional<UcxOptions>& lane)
      : id(key_of(1'000'000 + number)), served(options) {
    wanted.id = id;
    wanted.incarnation = incarnation;
    wanted.fetch_max = 60s;  // calls name their own
    auto opened = Cluster::open(shared(), wanted);
    REQUIRE(opened.has_value());
    cluster = std::move(*opened);
    if (lane) REQUIRE(cluster->open_lane(*lane).has_value());
    REQUIRE(cluster->serve(server_).has_value());
  }
  // The pool keeps the node; the cluster is gone before it.
  std::shared_ptr<Node> shared() const {
    return std::shared_ptr<Node>(std::shared_ptr<void>{}, served.pool.node.get());
  }
  Node& node() const { return *served.pool.node; }
  Namespace& space(std::uint64_t block_bytes) { return served.pool.space(1, block_bytes); }
  ClusterMember member(std::uint32_t weight = 1, bool is_draining = false) const {
    return {id, incarnation, weight, is_draining};
  }
  bool has(const Namespace& space, const Hash128& key) const {
    return node().look(space, {&key, 1}, nullptr).present == 1;
  }
  // Leading blocks delivered; every byte of them is compared.
  std::size_t get(const Namespace& from, std::span<const Hash128> keys, Miss& why,
                  const Reach& reach = Reach::by(never_hung())) const {
    KeySink sink(keys, from.block_bytes);
    const std::size_t count = node().get(from, keys, sink, &why, reach);
    KVP_CHECK(sink.wrong == 0);
    return count;
  }

 private:
  // Its owner is `served`; the cluster asks whether it is still there.
  const std::shared_ptr<Server> server_{served.server.get(), [](Server*) {}};
};

class Town {
 public:
  // Blocks are where they were put or asked for, and nowhere else.
  static ClusterOptions without_copies() {
    ClusterOptions options;
    options.replicas.max_replicas = 1;
    return options;
  }
  explicit Town(std::size_t hosts, std::uint64_t bytes = 64 * kMiB,
                ClusterOptions options = without_copies(), Kind kind = Kind::unix_socket,
                std::optional<UcxOptions> lane = {})
      : kind_(kind), options_(options), bytes_(bytes), lane_(std::move(lane)) {
    for (std::size_t i = 0; i < hosts; ++i) add();
  }
  ~Town() {
    for (const auto& host : hosts_) end(*host);
    relays_.clear();
  }

  Host& add() {
    NodeOptions node = Pool::plain(bytes_);
    node.store.sealed = lane_.has_value();
    auto made = std::make_unique<Host>(hosts_.size(), node, options_, lane_);
    Host& host = *made;
    {
      const std::lock_guard lock(mutex_);
      hosts_.push_back(std::move(made));
    }
    host.dialer = std::thread([this, &host] { dial_for(host); });
    return host;
  }
  Host& operator[](std::size_t i) { return *hosts_[i]; }
  std::size_t size() const { return hosts_.size(); }
  std::vector<Host*> all() const {
    std::vector<Host*> hosts;
    for (const auto& host : hosts_) hosts.push_back(host.get());
    return hosts;
  }

  // Each of them is told that these are the members; and they are connected to each other.
  void introduce(std::span<Host* const> members) {
    std::vector<ClusterMember> view;
    for (const Host* host : members) view.push_back(host->member());
    for (Host* host : members) REQUIRE(host->cluster->set_members(view).has_value());
    for (Host* host : members)
      wait_until([&] {
        const auto peers = host->cluster->peers();
        return std::ranges::all_of(peers, [](const auto& p) { return p.stats.streams > 0; });
      });
  }
  void introduce() { introduce(all()); }

  // All that these have is known to whoever keeps the directory.
  static void settle(std::span<Host* const> hosts) {
    for (Host* host : hosts) {
      host->served.pool.settle();
      // One turn may be half way through; the next one sees all of it.
      const std::uint64_t turns = host->cluster->stats().turns;
      wait_until([&] {
        const ClusterStats stats = host->cluster->stats();
        return stats.turns >= turns + 2 && stats.is_told;
      });
    }
  }
  void settle() const { settle(all()); }

  void end(Host& host) {
    if (host.cluster) host.cluster->close(never_hung());
    if (host.dialer.joinable()) host.dialer.join();
  }
  // Nobody holds anything of anybody.
  void check_at_rest() {
    for (const auto& host : hosts_) {
      CHECK(host->cluster->close(never_hung()));
      CHECK(host->cluster->stats().calls_inside == 0);
    }
    for (const auto& host : hosts_) end(*host);
    {
      const std::lock_guard lock(mutex_);
      relays_.clear();
    }
    for (const auto& host : hosts_) host->served.check_at_rest();
  }

 private:
  void dial_for(Host& host) {
    while (!host.cluster->is_closed())
      for (const WantedStream& wanted : host.cluster->wait_wanted(after(1s)))
        for (std::size_t i = 0; i < wanted.count; ++i)
          if (!dial(host, wanted.id)) {
            host.cluster->note_failed(wanted.id, 1);
            break;
          }
  }
  bool dial(Host& from, const Hash128& id) {
    const std::lock_guard lock(mutex_);
    const auto to = std::ranges::find(hosts_, id, [](const auto& host) { return host->id; });
    if (to == hosts_.end() || (*to)->is_away) return false;
    Ends ends(kind_);
    Server& server = *(*to)->served.server;
    const HolderName as{from.id, from.incarnation};
    if (!server.add_stream((*to)->served.client, give(ends.far), StreamKind::peer, as))
      return false;
    if ((*to)->meter != nullptr) {
      Ends second(kind_);
      relays_.push_back(
          std::make_unique<Relay>(std::move(second.far), std::move(ends.near), *(*to)->meter));
      ends.near = std::move(second.near);
    }
    const std::vector<std::byte> lane =
        (*to)->cluster->is_closed() ? std::vector<std::byte>{} : (*to)->cluster->lane_address();
    return from.cluster->add_stream(id, (*to)->incarnation, give(ends.near), lane).has_value();
  }

  const Kind kind_;
  const ClusterOptions options_;
  const std::uint64_t bytes_;
  const std::optional<UcxOptions> lane_;
  std::mutex mutex_;  // guards relays_, and hosts_ where it grows
  std::vector<std::unique_ptr<Relay>> relays_;
  std::vector<std::unique_ptr<Host>> hosts_;
};

}  // namespace kvpool::test
