// Members that die, stop, or send what is wrong, while others fetch from them.
#include <poll.h>

#include <thread>

#include "cluster/finder.h"
#include "cluster_members.h"

using namespace kvpool;
using namespace kvpool::test;

namespace {

constexpr std::uint32_t kBlockBytes = 50'000;

// The far end of a peer's stream, by hand: serves find_space, and then a get as it is told.
class HostilePeer {
 public:
  enum class Does : std::uint8_t { stops, trickles, closes, wrong_bytes, wrong_key, wrong_size };
  // Sends `good` blocks as they should be, then does that.
  HostilePeer(const TestMember& holder, Peer& at, std::size_t good, Does does)
      : HostilePeer(Ends(Kind::unix_socket), holder, at, good, does) {}
  ~HostilePeer() {
    end_.store(true);
    shutdown(far_.get(), SHUT_RDWR);
    thread_.join();
  }
  std::atomic<int> gets{0};

 private:
  HostilePeer(Ends ends, const TestMember& holder, Peer& at, std::size_t good, Does does)
      : far_(std::move(ends.far)), good_(good), does_(does) {
    REQUIRE(at.add_stream(give(ends.near)).has_value());
    number_ = holder.space(kBlockBytes).number;
    thread_ = std::thread([this] { serve(); });
  }
  bool receive(void* to, std::size_t bytes) {
    auto* at = static_cast<std::byte*>(to);
    for (std::size_t done = 0; done < bytes;) {
      const ssize_t got = recv(far_.get(), at + done, bytes - done, 0);
      if (got <= 0) return false;
      done += static_cast<std::size_t>(got);
    }
    return true;
  }
  void serve() {
    Request head;
    while (receive(&head, sizeof head)) {
      std::vector<Hash128> keys(head.count);
      if (!receive(keys.data(), keys.size() * sizeof(Hash128))) return;
      Bytes made;
      if (head.op == Op::find_space) {
        append(made, Answer{.op = head.op,
                            .id = head.id,
                            .count = head.count,
                            .body_bytes = sizeof(FoundSpace)});
        append(made, FoundSpace{number_, kBlockBytes});
      } else if (head.op == Op::get) {
        ++gets;
        for (std::size_t i = 0; i < std::min(good_, keys.size()); ++i)
          append_block(made, head, i, keys[i], kBlockBytes);
        if (good_ < keys.size() && does_ >= Does::wrong_bytes) append_bad(made, head, keys);
      }
      if (!send_bytes(far_, made)) return;
      if (head.op != Op::get) continue;
      if (does_ == Does::trickles && good_ < keys.size()) trickle(head, keys[good_]);
      if (does_ == Does::closes) shutdown(far_.get(), SHUT_RDWR);
      std::byte any;
      while (!end_ && recv(far_.get(), &any, 1, 0) > 0) {
      }
      return;
    }
  }
  // What comes next, a byte at a time, for as long as somebody takes it.
  void trickle(const Request& head, const Hash128& key) const {
    Bytes made;
    append_block(made, head, good_, key, kBlockBytes);
    pollfd ended{.fd = far_.get(), .events = POLLIN, .revents = 0};
    for (std::size_t i = 0; i + 1 < made.size() && poll(&ended, 1, 10) == 0; ++i)
      if (!send_bytes(far_, std::span(made).subspan(i, 1))) return;
  }
  void append_bad(Bytes& made, const Request& head, const std::vector<Hash128>& keys) const {
    const Hash128& key = keys[good_];
    Bytes payload = payload_of(key, kBlockBytes);
    Block block = block_head(head, good_, key, payload);
    if (does_ == Does::wrong_bytes) payload[kBlockBytes / 2] ^= std::byte{1};
    if (does_ == Does::wrong_key) block.key_low ^= 1;
    if (does_ == Does::wrong_size) block.bytes -= 1;
    block.check = check_of(block);
    append(made, block);
    append_bytes(made, payload);
  }

  const Descriptor far_;
  const std::size_t good_;
  const Does does_;
  std::uint32_t number_ = 0;
  std::atomic<bool> end_{false};
  std::thread thread_;
};

// Member 2 asks; members 0 and 1 have the blocks; 0 is known to it by the hostile stream alone.
struct Threatened {
  TestCluster cluster;
  std::vector<Hash128> keys = keys_from(1, 60);
  std::unique_ptr<HostilePeer> hostile;

  Threatened(bool has_other, HostilePeer::Does does, std::size_t good,
             std::chrono::milliseconds far_timeout)
      : cluster(3, TestCluster::plain(64 * kMiB, far_timeout), 0, Kind::unix_socket,
                {.pause_min = 60s, .pause_max = 60s}) {
    for (std::size_t from = 0; from < 3; ++from)
      for (std::size_t to = 0; to < 3; ++to)
        if (from != to && !(from == 2 && to == 0))
          TestCluster::connect(cluster[from], cluster[to], 3);
    Namespace& space = cluster[0].space(kBlockBytes);
    // Such keys alone as the hostile one has no part of the directory for.
    std::erase_if(keys,
                  [&](const Hash128& key) { return &cluster.owner_of(space, key) == &cluster[0]; });
    cluster.put(cluster[0], keys, kBlockBytes);
    if (has_other) cluster.put(cluster[1], keys, kBlockBytes);
    hostile = std::make_unique<HostilePeer>(cluster[0], *cluster[2].peer(cluster[0]), good, does);
  }
  Peer& victim() const { return *cluster[2].peer(cluster[0]); }
};

MemberInfo member(std::uint64_t n, std::uint64_t incarnation, bool is_self = false) {
  MemberInfo info;
  info.id = key_of(n);
  info.incarnation = incarnation;
  info.is_self = is_self;
  return info;
}

}  // namespace

TEST_CASE("cluster faults: bytes that are not what was announced are never delivered") {
  using Does = HostilePeer::Does;
  for (const Does does : {Does::wrong_bytes, Does::wrong_key, Does::wrong_size}) {
    CAPTURE(static_cast<int>(does));
    Threatened alone(false, does, 3, 30s);
    Miss why{};
    CHECK(alone.cluster[2].get(alone.keys, kBlockBytes, why) == 3);
    CHECK(why == Miss::damaged);
    CHECK(alone.victim().stats().damaged == 1);
    CHECK(alone.victim().stats().breaker == BreakerState::open);
    CHECK(alone.cluster[2].node().lookup(alone.cluster[2].space(kBlockBytes), alone.keys, nullptr,
                                         Reach::here()) == 3);
    alone.cluster.check_at_rest();

    Threatened two(true, does, 3, 30s);
    CHECK(two.cluster[2].get(two.keys, kBlockBytes, why) == two.keys.size());
    two.cluster.check_at_rest();
  }
}

TEST_CASE("cluster faults: a holder that closes in the middle is replaced, or missed") {
  Threatened alone(false, HostilePeer::Does::closes, 3, 30s);
  Miss why{};
  CHECK(alone.cluster[2].get(alone.keys, kBlockBytes, why) == 3);
  CHECK(why == Miss::disconnected);
  alone.cluster.check_at_rest();

  Threatened two(true, HostilePeer::Does::closes, 3, 30s);
  CHECK(two.cluster[2].get(two.keys, kBlockBytes, why) == two.keys.size());
  CHECK(why == Miss::none);
  two.cluster.check_at_rest();
}

TEST_CASE("cluster faults: a holder that stops in the middle costs a share of the deadline") {
  Threatened alone(false, HostilePeer::Does::stops, 3, 3s);
  Miss why{};
  const auto began = std::chrono::steady_clock::now();
  CHECK(alone.cluster[2].get(alone.keys, kBlockBytes, why, Reach::by(after(3s))) <= 3);
  CHECK(why == Miss::timed_out);
  CHECK(std::chrono::steady_clock::now() - began < 20s);
  CHECK(alone.victim().stats().breaker == BreakerState::open);
  alone.cluster.check_at_rest();

  // One holder more, and all of it comes before the deadline.
  Threatened two(true, HostilePeer::Does::stops, 3, 8s);
  CHECK(two.cluster[2].get(two.keys, kBlockBytes, why) == two.keys.size());
  CHECK(why == Miss::none);
  CHECK(two.cluster[2].node().stats().far.timed_out == 0);
  two.cluster.check_at_rest();
}

TEST_CASE("cluster faults: a holder from which next to nothing comes is replaced in time") {
  Threatened two(true, HostilePeer::Does::trickles, 1, 8s);
  Miss why{};
  CHECK(two.cluster[2].get(two.keys, kBlockBytes, why) == two.keys.size());
  CHECK(why == Miss::none);
  CHECK(two.hostile->gets > 0);
  CHECK(two.cluster[2].node().stats().far.timed_out == 0);
  two.cluster.check_at_rest();

  // With nobody else it is waited for, as long as there is time.
  Threatened alone(false, HostilePeer::Does::trickles, 1, 500ms);
  CHECK(alone.cluster[2].get(alone.keys, kBlockBytes, why) <= 1);
  CHECK(why == Miss::timed_out);
  alone.cluster.check_at_rest();
}

TEST_CASE("cluster faults: whoever failed is not asked until a pause is over") {
  Threatened alone(false, HostilePeer::Does::closes, 0, 30s);
  Miss why{};
  CHECK(alone.cluster[2].get(alone.keys, kBlockBytes, why) == 0);
  REQUIRE(alone.victim().stats().breaker == BreakerState::open);
  const int gets = alone.hostile->gets;
  auto least = std::chrono::nanoseconds(1h);
  for (int i = 0; i < 20; ++i) {
    const auto before = std::chrono::steady_clock::now();
    if (!alone.victim().is_open()) break;  // a very slow machine
    CHECK(alone.cluster[2].get(std::span(alone.keys).first(5), kBlockBytes, why) == 0);
    least = std::min<std::chrono::nanoseconds>(least, std::chrono::steady_clock::now() - before);
  }
  CHECK(least < 5ms);
  CHECK(alone.hostile->gets == gets);
  // The dialer was asked for streams, and with one that works it goes on.
  const auto wanted = alone.cluster[2].peers.wanted().wait(after(10s));
  REQUIRE(!wanted.empty());
  CHECK(alone.cluster[2].peers.of(wanted[0].member) != nullptr);
  TestCluster::connect(alone.cluster[2], alone.cluster[0], 3);
  CHECK(alone.cluster[2].get(alone.keys, kBlockBytes, why) == alone.keys.size());
  CHECK(alone.victim().stats().breaker == BreakerState::closed);
  alone.cluster.check_at_rest();
}

TEST_CASE("cluster faults: a node that drains is left, its blocks come from elsewhere") {
  TestCluster cluster(3);
  auto keys = keys_from(1, 60);
  std::erase_if(keys, [&](const Hash128& key) {
    return &cluster.owner_of(cluster[0].space(kBlockBytes), key) == &cluster[0];
  });
  cluster.put(cluster[0], keys, kBlockBytes);
  cluster.put(cluster[1], keys, kBlockBytes);
  cluster[0].served->server->drain(after(10s));
  Miss why{};
  CHECK(cluster[2].get(keys, kBlockBytes, why) == keys.size());
  cluster[0].served->server->close();
  const auto others = keys_from(1000, 30);
  cluster.put(cluster[1], others, kBlockBytes);
  const std::size_t got = cluster[2].get(others, kBlockBytes, why);
  // Where the one that is gone kept the entry, it is not known.
  CHECK((got == 30 || why == Miss::disconnected));
  cluster[2].pool().check_at_rest();
}

TEST_CASE("cluster faults: a member of the view leaves, and its handle stays its own") {
  MemberView view;
  std::vector<MemberInfo> infos;
  for (std::uint64_t i = 0; i < 5; ++i) infos.push_back(member(i, 1, i == 0));
  REQUIRE(view.set(infos).has_value());
  const auto before = view.now();
  const auto handle = before->by_id(key_of(3))->handle;
  infos.erase(infos.begin() + 3);
  infos[1].state = MemberState::draining;
  REQUIRE(view.set(infos).has_value());
  const auto without = view.now();
  CHECK(without->by_handle(handle) == nullptr);
  CHECK(without->by_id(key_of(1)) != nullptr);
  for (std::uint64_t i = 0; i < 2000; ++i)
    CHECK(without->owner_of(key_of(i)) != without->by_id(key_of(1))->handle);
  infos.push_back(member(3, 2));
  REQUIRE(view.set(infos).has_value());
  CHECK(view.now()->by_handle(handle)->info.incarnation == 2);
  CHECK(before->by_handle(handle)->info.incarnation == 1);
  infos.push_back(member(3, 2));
  CHECK(!view.set(infos).has_value());
  infos.back() = member(9, 1);
  infos.back().weight = 0;
  CHECK(!view.set(infos).has_value());
}
