// Leases over a stream, and blocks that lie on the SSD.
#include "net/reactor.h"
#include "net/stream_serve.h"
#include "net_cases.h"
#include "node_ssd_cases.h"

namespace kvpool {
namespace {

using namespace test;

constexpr std::size_t kBlock = 4096;

// Streams of one client that has mapped the arena, without all that such a client is.
struct Leasing {
  Pool pool{Pool::plain(16 * kMiB)};
  Namespace& space = pool.space(1, kBlock);
  std::vector<Hash128> keys = keys_from(0, 100);
  ServerOptions options;
  ServerBooks books;
  Leases far{*pool.node, books.far_leases};
  std::shared_ptr<ClientBooks> client = std::make_shared<ClientBooks>(1, *pool.node, books);
  const DirectoryDoor nowhere;
  std::unique_ptr<Reactor> reactor;

  explicit Leasing(std::uint64_t pin_bytes) {
    options.pin_bytes = pin_bytes;
    client->begin_shm();
    auto made = Reactor::create(100);
    REQUIRE(made.has_value());
    reactor = std::move(*made);
    fill();
  }
  void fill() {
    Payloads source(keys, kBlock);
    std::vector<PutStatus> statuses(keys.size());
    pool.node->put({space, keys, nullptr, never_hung()}, source, statuses.data());
    REQUIRE(all_are(statuses, PutStatus::stored));
  }
  Descriptor dial(Kind kind) {
    Ends ends(kind);
    bool is_unix = false;
    REQUIRE(prepare_stream(ends.far.get(), is_unix).has_value());
    CHECK(is_unix == (kind == Kind::unix_socket));
    REQUIRE(reactor
                ->add(1, {std::make_shared<StreamServe>(
                             std::move(ends.far), is_unix,
                             StreamServe::Host{*pool.node, options, books, client, nowhere, far,
                                               StreamKind::client, HolderName{}})})
                .has_value());
    return std::move(ends.near);
  }
  Answer ask(const Descriptor& stream, Op op, std::span<const Hash128> of) {
    REQUIRE(send_bytes(stream, frame(request(op, space.number, of.size()), of)));
    return receive_answer(stream);
  }
  std::vector<LeasePlace> places(const Descriptor& stream, const Answer& answer) {
    std::vector<LeasePlace> told(answer.count);
    REQUIRE(answer.body_bytes == answer.count * sizeof(LeasePlace));
    const Bytes body = receive_bytes(stream, answer.body_bytes);
    std::memcpy(told.data(), body.data(), body.size());
    return told;
  }
};

TEST_CASE("net lease: a leased block stays what it is, until it is released") {
  Leasing leasing(kMiB);
  const Descriptor stream = leasing.dial(Kind::unix_socket);
  const auto told =
      leasing.places(stream, leasing.ask(stream, Op::acquire, std::span(leasing.keys).first(5)));
  REQUIRE(told.size() == 5);
  CHECK(leasing.pool.node->remove(leasing.space, leasing.keys) == 100);
  for (std::size_t i = 0; i < 5; ++i)
    CHECK(is_payload(leasing.pool.node->arena() + told[i].offset, told[i].bytes, leasing.keys[i]));
  CHECK(leasing.books.leases == 5);
  const Hash128 numbers[] = {{told[1].lease, 0}, {told[3].lease, 9}, {told[1].lease, 0}, {4711, 0}};
  CHECK(leasing.ask(stream, Op::release, numbers).count == 2);  // twice is once, unknown is nothing
  CHECK(leasing.ask(stream, Op::release, numbers).count == 0);
  CHECK(leasing.books.leases == 3);
  CHECK(leasing.pool.node->stats().zombies == 3);
}

TEST_CASE("net lease: leases outlive the stream that asked, and end with their client") {
  Leasing leasing(kMiB);
  Descriptor one = leasing.dial(Kind::unix_socket), other = leasing.dial(Kind::unix_socket);
  const auto first =
      leasing.places(one, leasing.ask(one, Op::acquire, std::span(leasing.keys).first(7)));
  leasing.places(other, leasing.ask(other, Op::acquire, std::span(leasing.keys).first(3)));
  one = Descriptor();
  const Hash128 theirs{first[6].lease, 0};
  CHECK(leasing.ask(other, Op::release, {&theirs, 1}).count == 1);
  CHECK(leasing.books.leases == 9);
  CHECK(leasing.pool.node->stats().pinned == 9);
  CHECK(leasing.client->leases.bytes() == 9 * kBlock);

  SUBCASE("with its attachment") {
    leasing.client->end_shm();
    CHECK(leasing.books.leases == 0);
    CHECK(static_cast<Refusal>(leasing.ask(other, Op::acquire, leasing.keys).failed) ==
          Refusal::not_here);
  }
  SUBCASE("with all that is its") {
    leasing.client.reset();
    leasing.reactor->drop(1);
  }
  wait_until([&] { return leasing.books.leases == 0; });
  leasing.pool.check_at_rest();
}

TEST_CASE("net lease: a channel leases in place, and tells when it is over") {
  Leasing leasing(20 * kBlock);
  auto channel = StreamChannel::create({.timeout = 60s, .leases_in_place = true});
  REQUIRE(channel.has_value());
  const auto attach = [&] {
    Descriptor near[] = {leasing.dial(Kind::unix_socket), leasing.dial(Kind::unix_socket)};
    const int numbers[] = {give(near[0]), give(near[1])};
    REQUIRE((*channel)->attach(numbers).has_value());
  };
  attach();
  Space space;
  name(space, leasing.space);
  Miss why{};
  auto pins = (*channel)->acquire(space, std::span(leasing.keys).first(20), why);
  CHECK(why == Miss::none);
  REQUIRE(pins->places.size() == 20);
  CHECK(pins->base == nullptr);
  CHECK(leasing.pool.node->remove(leasing.space, leasing.keys) == 100);
  for (std::size_t i = 0; i < 20; ++i)
    CHECK(is_payload(leasing.pool.node->arena() + pins->places[i].offset, pins->places[i].bytes,
                     leasing.keys[i]));
  CHECK((*channel)->acquire(space, leasing.keys, why)->places.empty());
  CHECK(why == Miss::pin_limit);
  pins.reset();
  CHECK(leasing.books.leases == 0);
  CHECK((*channel)->acquire(space, leasing.keys, why)->places.empty());
  CHECK(why == Miss::absent);

  // Numbers of one life mean nothing in the next.
  leasing.fill();
  pins = (*channel)->acquire(space, std::span(leasing.keys).first(3), why);
  CHECK(leasing.books.leases == 3);
  attach();
  pins.reset();
  CHECK(leasing.books.leases == 3);
  leasing.client->end_shm();
  (*channel)->close();
}

TEST_CASE("net lease: one client may pin so much, over all its streams") {
  Leasing leasing(10 * kBlock);
  const Descriptor one = leasing.dial(Kind::unix_socket), other = leasing.dial(Kind::unix_socket);
  Answer answer = leasing.ask(one, Op::acquire, std::span(leasing.keys).first(8));
  CHECK(answer.miss == 0);
  const auto told = leasing.places(one, answer);
  answer = leasing.ask(other, Op::acquire, std::span(leasing.keys).subspan(8, 8));
  CHECK(static_cast<Miss>(answer.miss) == Miss::pin_limit);
  CHECK(leasing.places(other, answer).size() == 2);
  answer = leasing.ask(one, Op::acquire, leasing.keys);
  CHECK(static_cast<Miss>(answer.miss) == Miss::pin_limit);
  CHECK(answer.count == 0);
  const Hash128 freed{told[0].lease, 0};
  CHECK(leasing.ask(one, Op::release, {&freed, 1}).count == 1);
  CHECK(leasing.places(other, leasing.ask(other, Op::acquire, leasing.keys)).size() == 1);
  // What is not there costs nothing.
  REQUIRE(leasing.ask(one, Op::release, {&freed, 1}).count == 0);
  const auto absent = keys_from(5000, 4);
  CHECK(leasing.ask(one, Op::acquire, absent).count == 0);
  CHECK(leasing.client->leases.count() == 10);
}

TEST_CASE("net lease: not over tcp") {
  Leasing leasing(kMiB);
  const Descriptor stream = leasing.dial(Kind::tcp);
  CHECK(static_cast<Refusal>(leasing.ask(stream, Op::acquire, leasing.keys).failed) ==
        Refusal::not_here);
}

TEST_CASE("net stream: blocks come from the SSD, also where DRAM has no room for them") {
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
  const std::uint64_t client = (*server)->add_client();
  auto channel = StreamChannel::create({.timeout = 60s});
  REQUIRE(channel.has_value());
  std::vector<int> near;
  for (int i = 0; i < 2; ++i) {
    Ends ends(Kind::tcp);
    REQUIRE((*server)->add_stream(client, give(ends.far)).has_value());
    near.push_back(give(ends.near));
  }
  REQUIRE((*channel)->attach(near).has_value());
  Space space;
  name(space, named);
  std::vector<std::uint8_t> tiers(keys.size());
  Miss why{};
  REQUIRE((*channel)->lookup(space, keys, tiers.data(), why) == keys.size());
  CHECK(std::count(tiers.begin(), tiers.end(), kTierSsd) >= 10);
  CHECK(get(**channel, space, keys) == keys.size());

  // All of DRAM is pinned: what is on the SSD alone goes past it.
  std::vector<Lease> leases;
  for (const Hash128& key : keys) {
    Lease lease;
    std::uint8_t tier = 0;
    if (pool.node->lookup(named, {&key, 1}, &tier) == 1 && tier == kTierDram &&
        pool.node->acquire(named, {&key, 1}, &lease) == 1)
      leases.push_back(lease);
  }
  CHECK(get(**channel, space, keys) == keys.size());
  CHECK(get(**channel, space, keys) == keys.size());
  pool.node->release(leases);
  (*channel)->close();
}

}  // namespace
}  // namespace kvpool
