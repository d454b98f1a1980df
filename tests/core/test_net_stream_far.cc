// lease_far: blocks that a peer reads by itself, as the server lends them and takes them back.
#include "net/leases.h"
#include "net/stream_serve.h"

#include "cluster_cases.h"
#include "node_ssd_cases.h"

namespace kvpool {
namespace {

using namespace test;

constexpr std::size_t kBlock = 4096;
constexpr std::uint64_t kLane = 77;

class Lending final : public DirectoryService {
 public:
  explicit Lending(std::uint64_t lane) : lane_(lane) {}
  Told publish(const Announcement&, std::span<const Hash128>, bool) override { return Told::ok; }
  Told withdraw(const Announcement&, std::span<const Hash128>) override { return Told::ok; }
  void locate(std::span<const Hash128>, Located&) override {}
  std::uint64_t lane() const override { return lane_; }

 private:
  const std::uint64_t lane_;
};

// What was answered to one lease_far.
struct Lent {
  Answer head;
  FarHead far;
  std::vector<FarPlace> places;
};

struct Lender {
  Served served;
  Namespace& space{served.pool.space(1, kBlock)};
  std::vector<Hash128> keys = keys_from(0, 100);

  explicit Lender(const ServerOptions& options = {}, std::uint64_t lane = kLane)
      : served(Pool::plain(64 * kMiB), options) {
    served.server->set_directory(std::make_shared<Lending>(lane));
    put(keys);
  }
  void put(std::span<const Hash128> which) {
    Payloads source(which, kBlock);
    std::vector<PutStatus> statuses(which.size());
    served.pool.node->put({space, which, nullptr, never_hung()}, source, statuses.data());
    REQUIRE(all_are(statuses, PutStatus::stored));
  }
  Descriptor dial(StreamKind kind = StreamKind::peer) {
    Ends ends(Kind::tcp);
    REQUIRE(
        served.server->add_stream(served.client, give(ends.far), kind, {key_of(9), 1}).has_value());
    return std::move(ends.near);
  }
  Lent lease(const Descriptor& stream, std::span<const Hash128> which) {
    REQUIRE(send_bytes(stream, frame(request(Op::lease_far, space.number, which.size()), which)));
    const PeerAnswer answer = receive_peer_answer(stream);
    REQUIRE(answer.head.magic == kAnswerMagic);
    Lent lent{.head = answer.head, .far = {}, .places = {}};
    if (answer.head.failed != 0) return lent;
    REQUIRE(answer.body.size() == sizeof(FarHead) + answer.head.count * sizeof(FarPlace));
    std::memcpy(&lent.far, answer.body.data(), sizeof(FarHead));
    lent.places.resize(answer.head.count);
    if (!lent.places.empty())
      std::memcpy(lent.places.data(), answer.body.data() + sizeof(FarHead),
                  answer.body.size() - sizeof(FarHead));
    return lent;
  }
  std::uint32_t give_back(const Descriptor& stream, const std::vector<FarPlace>& places) {
    std::vector<Hash128> numbers;
    for (const FarPlace& place : places) numbers.push_back({place.lease, 0});
    REQUIRE(send_bytes(stream, frame(request(Op::release, 0, numbers.size()), numbers)));
    return receive_answer(stream).count;
  }
  ServerStats stats() const { return served.server->stats(); }
  bool is_right(const FarPlace& place, const Hash128& key) const {
    const std::byte* at = served.pool.node->arena() + place.offset;
    return is_payload(at, place.bytes, key) &&
           checksum(at, place.bytes) == Hash128{place.sum_low, place.sum_high};
  }
};

TEST_CASE("net far: what was lent stays what it is until it is given back") {
  Lender lender;
  Descriptor stream = lender.dial();
  const Lent lent = lender.lease(stream, lender.keys);
  CHECK(lent.head.miss == 0);
  CHECK(lent.far.lane == kLane);
  CHECK(lent.far.limit_ms == 10'000);
  REQUIRE(lent.places.size() == 100);
  CHECK(lender.served.pool.node->remove(lender.space, lender.keys) == 100);
  for (std::size_t i = 0; i < 100; ++i) CHECK(lender.is_right(lent.places[i], lender.keys[i]));
  CHECK(lender.stats().far_leases == 100);
  CHECK(lender.stats().leases == 0);  // those are of clients that map the arena
  CHECK(lender.stats().far_lent_bytes == 100 * kBlock);
  const std::vector<FarPlace> few(lent.places.begin(), lent.places.begin() + 3);
  CHECK(lender.give_back(stream, few) == 3);
  CHECK(lender.give_back(stream, few) == 0);  // twice is once
  CHECK(lender.give_back(stream, {{.lease = 4711}, {.lease = 0}}) == 0);
  CHECK(lender.give_back(stream, lent.places) == 97);
  CHECK(lender.stats().far_leases == 0);
  stream = Descriptor();
  lender.served.check_at_rest();
}

TEST_CASE("net far: one stream gives back nothing of another's") {
  Lender lender;
  const Descriptor one = lender.dial(), other = lender.dial();
  const Lent lent = lender.lease(one, std::span(lender.keys).first(5));
  CHECK(lender.give_back(other, lent.places) == 0);
  CHECK(lender.stats().far_leases == 5);
  CHECK(lender.give_back(one, lent.places) == 5);
}

TEST_CASE("net far: leases end with their stream, whoever else the peer has") {
  Lender lender;
  Descriptor one = lender.dial();
  const Descriptor other = lender.dial();
  lender.lease(one, std::span(lender.keys).first(7));
  const Lent kept = lender.lease(other, std::span(lender.keys).first(3));
  CHECK(lender.stats().far_leases == 10);
  one = Descriptor();
  wait_until([&] { return lender.stats().far_leases == 3; });
  CHECK(lender.give_back(other, kept.places) == 3);

  SUBCASE("with its client") {
    lender.lease(other, lender.keys);
    lender.served.server->drop_client(lender.served.client);
    wait_until([&] { return lender.stats().far_leases == 0; });
  }
  SUBCASE("with the server") {
    lender.lease(other, lender.keys);
    lender.served.server->close();
    CHECK(lender.stats().far_leases == 0);
  }
  lender.served.pool.check_at_rest();
}

TEST_CASE("net far: a lease that is not given back ends by time") {
  Lender lender;
  const Descriptor stream = lender.dial();
  const Lent lent = lender.lease(stream, lender.keys);
  const auto now = std::chrono::steady_clock::now();
  lender.served.server->expire_far_leases(now);
  CHECK(lender.stats().far_leases == 100);
  lender.served.server->expire_far_leases(now + 11s);
  CHECK(lender.stats().far_leases == 0);
  CHECK(lender.stats().far_expired == 100);
  lender.served.server->expire_far_leases(now + 22s);
  CHECK(lender.stats().far_expired == 100);
  CHECK(lender.give_back(stream, lent.places) == 0);
  CHECK(lender.lease(stream, lender.keys).places.size() == 100);  // the stream is as good as new
}

TEST_CASE("net far: all peers together lease no more than one client may pin") {
  Lender lender({.pin_bytes = 10 * kBlock});
  const Descriptor one = lender.dial(), other = lender.dial();
  const Lent first = lender.lease(one, std::span(lender.keys).first(8));
  CHECK(first.places.size() == 8);
  const Lent second = lender.lease(other, lender.keys);
  CHECK(static_cast<Miss>(second.head.miss) == Miss::pin_limit);
  CHECK(second.places.size() == 2);
  CHECK(lender.lease(other, lender.keys).places.empty());
  CHECK(lender.give_back(one, first.places) == 8);
  CHECK(lender.lease(other, lender.keys).places.size() == 8);
}

TEST_CASE("net far: one stream has so many leases and no more") {
  Lender lender({.pin_bytes = 64 * kMiB});
  const auto many = keys_from(1000, kFarLeasesMax - 50);
  lender.put(many);
  const Descriptor stream = lender.dial();
  CHECK(lender.lease(stream, many).places.size() == many.size());
  const Lent rest = lender.lease(stream, lender.keys);
  CHECK(rest.places.size() == 50);
  const Lent none = lender.lease(stream, lender.keys);
  CHECK(none.places.empty());
  CHECK(static_cast<Miss>(none.head.miss) == Miss::pin_limit);
  CHECK(lender.give_back(stream, rest.places) == 50);
  CHECK(lender.lease(stream, lender.keys).places.size() == 50);
}

TEST_CASE("net far: what is not here is absent, behind what is") {
  Lender lender;
  const Descriptor stream = lender.dial();
  auto some = std::vector(lender.keys.begin(), lender.keys.begin() + 4);
  some[2] = key_of(4711);
  const Lent lent = lender.lease(stream, some);
  CHECK(lent.places.size() == 2);
  CHECK(static_cast<Miss>(lent.head.miss) == Miss::absent);
}

TEST_CASE("net far: over the limit of bytes nothing is lent, and that is no miss") {
  Lender lender({.get_bytes_per_s = 1});
  const Descriptor stream = lender.dial();
  CHECK(lender.lease(stream, std::span(lender.keys).first(1)).places.size() == 1);
  const Lent none = lender.lease(stream, std::span(lender.keys).first(1));
  CHECK(none.places.empty());
  CHECK(static_cast<Miss>(none.head.miss) == Miss::limited);
}

TEST_CASE("net far: who may not") {
  Lender lender;
  const auto refusal = [&](Lender& of, StreamKind kind) {
    const Descriptor stream = of.dial(kind);
    return static_cast<Refusal>(of.lease(stream, of.keys).head.failed);
  };
  CHECK(refusal(lender, StreamKind::client) == Refusal::not_here);
  Lender without({}, 0);
  CHECK(refusal(without, StreamKind::peer) == Refusal::not_here);
  Lender alone;
  alone.served.server->set_directory(nullptr);
  CHECK(refusal(alone, StreamKind::peer) == Refusal::not_here);

  const Descriptor stream = lender.dial();
  REQUIRE(send_bytes(stream, frame(request(Op::lease_far, 4711, 1), {lender.keys.data(), 1})));
  CHECK(static_cast<Refusal>(receive_answer(stream).failed) == Refusal::no_space);
  REQUIRE(send_bytes(stream, frame(request(Op::acquire, 0, 1), {lender.keys.data(), 1})));
  CHECK(static_cast<Refusal>(receive_answer(stream).failed) == Refusal::not_here);
  CHECK(lender.stats().far_leases == 0);
}

TEST_CASE("net far: a request that cannot be ends its stream and what it leased") {
  Lender lender;
  const auto with = [&](auto change) {
    Request head = request(Op::lease_far, lender.space.number, 1);
    change(head);
    return frame(head, {lender.keys.data(), 1});
  };
  const std::vector<Bytes> bad = {
      with([](Request& r) { r.count = kKeysPerRequest + 1; }),
      with([](Request& r) { r.count = 0; }), with([](Request& r) { r.flags = kHasParent; }),
      with([](Request& r) { r.skip = 1; }), with([](Request& r) { r.deadline_ms = ~0u; })};
  for (const Bytes& bytes : bad) {
    const Descriptor stream = lender.dial();
    CHECK(lender.lease(stream, lender.keys).places.size() == 100);
    send_bytes(stream, bytes);
    CHECK(is_closed_by_peer(stream));
    wait_until([&] { return lender.stats().far_leases == 0; });
  }
  CHECK(lender.stats().closed_garbage == bad.size());
  lender.served.check_at_rest();
}

TEST_CASE("net far: what lies on the SSD alone is to be had by a get") {
  SsdPool pool(SsdPool::small(8, 64));
  auto opened = pool.node->open_namespace(key_of(1), 1 << 20);
  REQUIRE(opened.has_value());
  Namespace& named = **opened;
  const auto keys = keys_from(0, 30);
  for (const Hash128& key : keys) {
    SumSource source({&key, 1}, named.block_bytes);
    PutStatus status{};
    pool.node->put({named, {&key, 1}, nullptr, never_hung()}, source, &status);
    REQUIRE(status == PutStatus::stored);
    REQUIRE(pool.node->flush(never_hung()));
  }
  auto server = Server::create(std::shared_ptr<Node>(std::shared_ptr<void>{}, pool.node.get()), {});
  REQUIRE(server.has_value());
  (*server)->set_directory(std::make_shared<Lending>(kLane));
  Ends ends(Kind::tcp);
  REQUIRE(
      (*server)
          ->add_stream((*server)->add_client(), give(ends.far), StreamKind::peer, {key_of(9), 1})
          .has_value());
  std::vector<std::uint8_t> tiers(1);
  std::size_t on_ssd = 0, lent = 0;
  for (const Hash128& key : keys) {
    REQUIRE(pool.node->look(named, {&key, 1}, tiers.data()).present == 1);
    REQUIRE(send_bytes(ends.near, frame(request(Op::lease_far, named.number, 1), {&key, 1})));
    const PeerAnswer answer = receive_peer_answer(ends.near);
    CHECK(answer.head.failed == 0);
    if (tiers[0] == kTierSsd) CHECK((answer.head.count == 0 && answer.head.miss == 0));
    CHECK((tiers[0] == kTierSsd || answer.head.count == 1 || answer.head.miss != 0));
    on_ssd += tiers[0] == kTierSsd;
    lent += answer.head.count;
  }
  CHECK(on_ssd >= 10);
  CHECK(lent > 0);
  CHECK(lent + on_ssd <= keys.size());
  (*server)->close();
}

}  // namespace
}  // namespace kvpool
