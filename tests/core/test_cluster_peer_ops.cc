// What only nodes ask each other: lives and sequences of batches, and frames that no node sends.
#include "cluster/directory_shard.h"

#include "cluster_cases.h"

namespace kvpool {
namespace {

using namespace test;

const Hash128 kNode = key_of(501), kOther = key_of(502);
const HolderName kPeer{kNode, 3};  // as whom a stream is dialled

Announcement from(std::uint64_t incarnation, std::uint64_t sequence, const Hash128& node = kNode) {
  return {.node = node, .incarnation = incarnation, .sequence = sequence};
}

TEST_CASE("cluster shard: batches in their order, none twice, none left out") {
  DirectoryShard shard({});
  const std::vector<Hash128> keys = keys_from(0, 10);
  const auto some = [&](std::size_t at) { return std::span(keys).subspan(at, 1); };
  const auto has = [&](std::size_t at) { return located(shard, keys[at]).contains(kNode); };
  CHECK(shard.publish(from(5, 1), some(0), false) == Told::gap);  // nothing is known of it yet
  CHECK(shard.withdraw(from(5, 1), some(0)) == Told::gap);
  CHECK(shard.publish(from(5, 10), some(0), true) == Told::ok);
  CHECK(shard.publish(from(5, 11), some(1), false) == Told::ok);
  CHECK(shard.publish(from(5, 11), some(2), false) == Told::ok);  // a repetition
  CHECK(shard.publish(from(5, 7), some(2), true) == Told::ok);    // so is this
  CHECK((has(0) && has(1) && !has(2)));
  CHECK(shard.withdraw(from(5, 13), some(0)) == Told::gap);
  CHECK(has(0));
  CHECK(shard.withdraw(from(5, 12), some(0)) == Told::ok);
  CHECK(!has(0));
  CHECK(shard.publish(from(5, 40), some(3), true) == Told::ok);  // all before is void
  CHECK((!has(1) && has(3)));
  CHECK(shard.publish(from(5, 41), {}, true) == Told::ok);
  CHECK(!has(3));
  const ShardStats stats = shard.stats();
  CHECK(stats.gaps == 3);
  CHECK(stats.repeated == 2);
  CHECK(stats.members == 1);
}

TEST_CASE("cluster shard: a new life ends the old one") {
  DirectoryShard shard({});
  const std::vector<Hash128> keys = keys_from(0, 4);
  CHECK(shard.publish(from(5, 1), keys, true) == Told::ok);
  CHECK(shard.publish(from(6, 1), keys, false) == Told::gap);
  CHECK(located(shard, keys[0]).size() == 1);
  CHECK(shard.publish(from(6, 1), std::span(keys).first(1), true) == Told::ok);
  CHECK(located(shard, keys[0]).size() == 1);
  CHECK(located(shard, keys[1]).empty());
  CHECK(shard.publish(from(5, 2), keys, false) == Told::stale);
  CHECK(shard.publish(from(5, 900), keys, true) == Told::stale);
  CHECK(shard.withdraw(from(5, 2), keys) == Told::stale);
  CHECK(located(shard, keys[0]).size() == 1);
  Located found;
  shard.locate(keys, found);
  REQUIRE(found.names.size() == 1);
  CHECK(found.names[0] == HolderName{kNode, 6});
}

TEST_CASE("cluster shard: a view tells who is gone") {
  DirectoryShard shard({});
  const std::vector<Hash128> keys = keys_from(0, 4);
  const std::vector<HolderName> both{{kNode, 5}, {kOther, 5}}, newer{{kNode, 6}, {kOther, 5}};
  shard.publish(from(5, 1), keys, true);
  shard.publish(from(5, 1, kOther), keys, true);
  const auto holders = [&] { return located(shard, keys[0]); };
  shard.set_members(
      std::span(both).first(1));  // it knows of the other one later than that one does
  CHECK(holders().size() == 2);
  shard.set_members(both);
  CHECK(holders().size() == 2);
  shard.set_members(newer);
  CHECK(holders() == std::set{kOther});
  CHECK(shard.publish(from(5, 2), keys, false) == Told::gap);
  CHECK(shard.publish(from(6, 1), keys, true) == Told::ok);
  CHECK(holders().size() == 2);
  shard.set_members(std::span(newer).first(1));
  CHECK(holders() == std::set{kNode});
  CHECK(shard.publish(from(5, 2, kOther), keys, false) == Told::gap);
  CHECK(shard.publish(from(5, 3, kOther), keys, true) == Told::ok);
  CHECK(holders().size() == 2);
  while (shard.sweep()) {
  }
  CHECK(shard.stats().directory.holders == 2);
}

TEST_CASE("cluster shard: more members than there are numbers for") {
  DirectoryShard shard({.bytes_max = 1 << 16});
  const Hash128 key = key_of(1);
  for (std::uint64_t i = 0; i < 4095; ++i)
    REQUIRE(shard.publish(from(1, 1, key_of(10'000 + i)), {&key, 1}, true) == Told::ok);
  CHECK(shard.publish(from(1, 1, key_of(1)), {&key, 1}, true) == Told::full);
  CHECK(shard.publish(from(1, 2, key_of(10'000)), {&key, 1}, true) == Told::full);  // not swept
  CHECK(shard.publish(from(1, 3, key_of(10'000)), {&key, 1}, false) == Told::gap);
  while (shard.sweep()) {
  }
  CHECK(shard.publish(from(1, 2, key_of(10'000)), {&key, 1}, true) == Told::ok);
  CHECK(shard.stats().refused_full == 2);
}

TEST_CASE("cluster shard: one that begins anew all the time leaves room for the others") {
  DirectoryShard shard({.bytes_max = 1 << 16});
  const Hash128 key = key_of(1);
  for (std::uint64_t i = 1; i <= 6000; ++i) {
    const Told told = shard.publish(from(1, i), {&key, 1}, true);
    REQUIRE((told == Told::ok || told == Told::full));
  }
  CHECK(located(shard, key).empty());  // at the last it was told to wait
  CHECK(shard.publish(from(1, 1, kOther), {&key, 1}, true) == Told::ok);
  while (shard.sweep()) {
  }
  CHECK(shard.publish(from(1, 7000), {&key, 1}, true) == Told::ok);
  CHECK(located(shard, key).size() == 2);
}

struct Scene : Member {
  std::vector<Hash128> keys = keys_from(0, 6);

  PeerAnswer ask(const Descriptor& stream, const Bytes& frame) {
    REQUIRE(send_bytes(stream, frame));
    return receive_peer_answer(stream);
  }
  Bytes publish(std::uint64_t sequence, std::span<const Hash128> which, bool is_fresh = false) {
    Request head = request(Op::publish, 0, which.size());
    if (is_fresh) head.flags = kFresh;
    return announced(head, from(3, sequence), which);
  }
  void expect_closed(const Bytes& bytes, const std::string& why) {
    const std::uint64_t before = served.server->stats().closed_garbage;
    const Descriptor stream = dial(kPeer);
    send_bytes(stream, bytes);
    CHECK(is_closed_by_peer(stream));
    const ServerStats stats = served.server->stats();
    CHECK(stats.closed_garbage == before + 1);
    CHECK_MESSAGE(stats.last_closed.find(why) != std::string::npos, stats.last_closed);
  }
};

TEST_CASE("cluster frames: publish, withdraw, locate, namespaces by id") {
  Scene scene;
  const Descriptor stream = scene.dial(kPeer);
  const std::span keys(scene.keys);
  CHECK(scene.ask(stream, scene.publish(1, keys)).head.failed == std::uint8_t(Refusal::gap));
  CHECK(scene.ask(stream, scene.publish(1, {}, true)).head.failed == 0);
  const PeerAnswer told = scene.ask(stream, scene.publish(2, keys.first(4)));
  CHECK(told.head.op == Op::publish);
  CHECK(told.head.count == 4);
  const Bytes withdraw = announced(request(Op::withdraw, 0, 1), from(3, 3), keys.subspan(1, 1));
  CHECK(scene.ask(stream, withdraw).head.count == 1);
  CHECK(scene.ask(stream, withdraw).head.count == 1);  // a repetition
  const PeerAnswer found = scene.ask(stream, frame(request(Op::locate, 0, 6), keys));
  CHECK(found.head.count == 3);
  LocatedHead head;
  HolderName name;
  std::array<std::array<std::uint16_t, kHoldersPerKey>, 6> holders;
  REQUIRE(found.body.size() == sizeof head + sizeof name + sizeof holders);
  std::memcpy(&head, found.body.data(), sizeof head);
  std::memcpy(static_cast<void*>(&name), found.body.data() + sizeof head, sizeof name);
  std::memcpy(&holders, found.body.data() + sizeof head + sizeof name, sizeof holders);
  CHECK(head.names == 1);
  CHECK(name == HolderName{kNode, 3});
  for (const std::size_t i : {0, 2, 3}) CHECK((holders[i][0] == 0 && holders[i][1] == kNoHolder));
  for (const std::size_t i : {1, 4, 5}) CHECK(holders[i][0] == kNoHolder);

  const Namespace& space = scene.served.pool.space(1, 512);
  const std::vector<Hash128> ids{key_of(77), space.id};
  const PeerAnswer spaces = scene.ask(stream, frame(request(Op::find_space, 0, 2), ids));
  REQUIRE(spaces.body.size() == 2 * sizeof(FoundSpace));
  CHECK(spaces.head.count == 1);
  std::array<FoundSpace, 2> places;
  std::memcpy(&places, spaces.body.data(), sizeof places);
  CHECK(places[0].block_bytes == 0);
  CHECK((places[1].number == space.number && places[1].block_bytes == 512));
}

TEST_CASE("cluster frames: what a peer asks is for peers, and for members") {
  Scene scene;
  const std::span keys(scene.keys);
  const Descriptor client = scene.dial({}, StreamKind::client);
  const auto refused = [&](const Descriptor& stream, const Bytes& frame) {
    return scene.ask(stream, frame).head.failed == std::uint8_t(Refusal::not_here);
  };
  const Bytes withdraw = announced(request(Op::withdraw, 0, 1), from(3, 2), keys.first(1));
  const Bytes locate = frame(request(Op::locate, 0, 1), keys.first(1));
  const Bytes find = frame(request(Op::find_space, 0, 1), keys.first(1));
  CHECK(refused(client, scene.publish(1, keys, true)));
  CHECK(refused(client, scene.publish(1, {}, true)));
  CHECK(refused(client, withdraw));
  CHECK(refused(client, locate));
  CHECK(refused(client, find));
  CHECK(scene.shard->stats().batches == 0);
  const Descriptor peer = scene.dial(kPeer);
  scene.served.server->set_directory(nullptr);
  CHECK(refused(peer, scene.publish(1, keys, true)));
  CHECK(refused(peer, locate));
  CHECK(!refused(peer, find));
  scene.served.server->set_directory(scene.shard);
  CHECK(!refused(peer, scene.publish(1, keys, true)));
  CHECK(located(*scene.shard, keys[0]).size() == 1);
}

TEST_CASE("cluster frames: what a client asks, with an eye to this node only") {
  Scene scene;
  Namespace& space = scene.served.pool.space(1, 512);
  scene.served.put(space, std::span(scene.keys).first(2));
  for (const StreamKind kind : {StreamKind::client, StreamKind::peer}) {
    const Descriptor stream = scene.dial({}, kind);
    Request head = request(Op::lookup, space.number, 6);
    head.flags = kHereOnly | kIsPart;
    CHECK(scene.ask(stream, frame(head, scene.keys)).head.count == 2);
    head = request(Op::get, space.number, 1);
    head.flags = kHereOnly;
    REQUIRE(send_bytes(stream, frame(head, std::span(scene.keys).first(1))));
    CHECK(receive_bytes(stream, sizeof(Block) + 512).size() == sizeof(Block) + 512);
    CHECK(receive_answer(stream).count == 1);
  }
}

TEST_CASE("cluster frames: a peer tells in the name of its own member and life alone") {
  Scene scene;
  const std::span keys(scene.keys);
  const Descriptor own = scene.dial(kPeer);
  CHECK(scene.ask(own, scene.publish(1, keys.first(1), true)).head.failed == 0);
  const std::vector<HolderName> others{{kOther, 3}, {kNode, 2}, {kNode, 4}, {}};
  for (const HolderName& as : others) {
    const Descriptor stream = scene.dial(as);
    send_bytes(stream, scene.publish(2, keys, true));
    CHECK(is_closed_by_peer(stream));
  }
  const ServerStats stats = scene.served.server->stats();
  CHECK(stats.closed_garbage == others.size());
  CHECK_MESSAGE(stats.last_closed.find("another member") != std::string::npos, stats.last_closed);
  CHECK(scene.shard->stats().batches == 1);
  CHECK(located(*scene.shard, keys[1]).empty());
  CHECK(scene.ask(own, scene.publish(2, keys)).head.failed == 0);
}

TEST_CASE("cluster frames: a peer reads, and changes nothing of this node") {
  Scene scene;
  Namespace& space = scene.served.pool.space(1, 512);
  const std::span some = std::span(scene.keys).first(2);
  scene.served.put(space, some);
  Descriptor stream = scene.dial(kPeer);
  const auto refused = [&](const Bytes& frame) {
    return scene.ask(stream, frame).head.failed == std::uint8_t(Refusal::not_here);
  };
  for (const Op op : {Op::remove, Op::wait, Op::acquire})
    CHECK(refused(frame(request(op, space.number, 2), some)));
  CHECK(scene.ask(stream, frame(request(Op::release, 0, 2), some)).head.count == 0);  // none is its
  const std::span absent = std::span(scene.keys).subspan(2, 1);
  CHECK(refused(put_frame(request(Op::put, space.number, 1), absent, 512)));
  CHECK(scene.ask(stream, frame(request(Op::lookup, space.number, 6), scene.keys)).head.count == 2);
  CHECK(scene.served.pool.node->stats().blocks == 2);
  stream = Descriptor();
  scene.served.check_at_rest();
}

TEST_CASE("cluster frames: a publish without keys asks whether all batches came") {
  Scene scene;
  const Descriptor stream = scene.dial(kPeer);
  const auto refusal = [&](std::uint64_t sequence, std::span<const Hash128> keys, bool is_fresh) {
    const PeerAnswer answer = scene.ask(stream, scene.publish(sequence, keys, is_fresh));
    CHECK(answer.head.count == (answer.head.failed == 0 ? keys.size() : 0));
    return Refusal{answer.head.failed};
  };
  CHECK(refusal(1, {}, false) == Refusal::gap);
  CHECK(refusal(1, {}, true) == Refusal::none);
  CHECK(refusal(2, {}, false) == Refusal::none);
  CHECK(refusal(3, {scene.keys.data(), 2}, false) == Refusal::none);
  CHECK(refusal(5, {}, false) == Refusal::gap);
}

TEST_CASE("cluster frames: a pull is for streams of peers, and has a head of its own") {
  Scene scene;
  const PullHead head{.space = key_of(9), .from = kNode, .number = 4, .block_bytes = 512};
  std::array<Hash128, sizeof(PullHead) / kHashBytes + 2> keys;
  std::memcpy(static_cast<void*>(keys.data()), &head, sizeof head);
  keys[4] = key_of(1);
  keys[5] = key_of(2);
  for (const std::uint16_t flags : {std::uint16_t{0}, kLastCopies}) {
    Request request_head = request(Op::pull, 0, 2);
    request_head.flags = flags;
    const PeerAnswer pulled = scene.ask(scene.dial(kPeer), frame(request_head, keys));
    CHECK(pulled.head.op == Op::pull);
    CHECK(pulled.head.failed == 0);
    CHECK(pulled.head.count == 0);
    PullAnswer answer;
    REQUIRE(pulled.body.size() == sizeof answer);
    std::memcpy(&answer, pulled.body.data(), sizeof answer);
    CHECK(answer.state == Pulling::refused);  // a shard alone fetches nothing
    CHECK(pulled.head.load.is_told == 0);
  }
  const PeerAnswer refused =
      scene.ask(scene.dial({}, StreamKind::client), frame(request(Op::pull, 0, 2), keys));
  CHECK(refused.head.failed == std::uint8_t(Refusal::not_here));
}

TEST_CASE("cluster frames: a field that cannot be") {
  Scene scene;
  for (const Op op : {Op::find_space, Op::publish, Op::withdraw, Op::locate, Op::pull}) {
    const auto with = [&](auto change) {
      Request head = request(op, 0, 1);
      change(head);
      return has_announcement(op) ? announced(head, from(3, 1), {scene.keys.data(), 1})
                                  : frame(head, {scene.keys.data(), 1});
    };
    scene.expect_closed(with([](Request& r) { r.magic ^= 1; }), "not a request");
    scene.expect_closed(with([](Request& r) { r.version = 2; }), "of version 2");
    scene.expect_closed(with([](Request& r) { r.op = Op{14}; }), "unknown kind 14");
    scene.expect_closed(with([](Request& r) { r.op = Op{255}; }), "unknown kind 255");
    for (const int bit : {0, 1, 2, 3, 4, 15})
      if ((op != Op::publish || bit != 3) && (op != Op::pull || bit != 4))
        scene.expect_closed(with([&](Request& r) { r.flags = std::uint16_t(1 << bit); }),
                            "unknown flags");
    scene.expect_closed(with([](Request& r) { r.space = 1; }), "names a namespace");
    if (op != Op::publish) scene.expect_closed(with([](Request& r) { r.count = 0; }), "0 keys");
    scene.expect_closed(with([](Request& r) { r.count = kKeysPerRequest + 1; }), "8193 keys");
    scene.expect_closed(with([](Request& r) { r.count = ~0u; }), "4294967295 keys");
    scene.expect_closed(with([](Request& r) { r.skip = 1; }), "skips too much");
    scene.expect_closed(with([](Request& r) { r.deadline_ms = ~0u; }), "deadline");
  }
  CHECK(scene.shard->stats().batches == 0);
  scene.served.check_at_rest();
}

TEST_CASE("cluster frames: batches that end at any byte") {
  Scene scene;
  const Bytes whole = scene.publish(1, std::span(scene.keys).first(2), true);
  for (std::size_t cut = 0; cut < whole.size(); ++cut) {
    const Descriptor stream = scene.dial(kPeer);
    REQUIRE(send_bytes(stream, std::span(whole).first(cut)));
  }
  wait_until([&] { return scene.served.server->stats().streams == 0; });
  CHECK(scene.shard->stats().batches == 0);
  CHECK(scene.served.server->stats().closed_garbage == 0);
}

TEST_CASE("cluster frames: the largest request and its answer") {
  Scene scene;
  const Descriptor stream = scene.dial(kPeer);
  const std::vector<Hash128> keys = keys_from(0, kKeysPerRequest);
  CHECK(scene.ask(stream, scene.publish(1, keys, true)).head.count == kKeysPerRequest);
  const PeerAnswer found = scene.ask(stream, frame(request(Op::locate, 0, keys.size()), keys));
  CHECK(found.head.count == kKeysPerRequest);
  CHECK(found.body.size() == sizeof(LocatedHead) + sizeof(HolderName) + 8 * keys.size());
}

TEST_CASE("cluster frames: a million keys are published over one stream") {
  Member member({.bytes_max = 64 << 20, .salt = 2});
  const Descriptor stream = member.dial({kNode, 1});
  const std::size_t count = scaled(1'000'000);
  const auto before = std::chrono::steady_clock::now();
  std::vector<Hash128> keys;
  for (std::size_t at = 0, sequence = 1; at < count; at += keys.size(), ++sequence) {
    keys = keys_from(at, std::min<std::size_t>(4096, count - at));
    Request head = request(Op::publish, 0, keys.size());
    if (at == 0) head.flags = kFresh;
    REQUIRE(send_bytes(stream, announced(head, from(1, sequence), keys)));
    REQUIRE(receive_peer_answer(stream).head.count == keys.size());
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - before;
  const DirectoryStats stats = member.shard->stats().directory;
  CHECK(stats.entries == count);
  CHECK(stats.bytes_per_key < 32);
  std::printf("published %zu keys over a stream: %.2f s, %.1f bytes a key\n", count, took.count(),
              stats.bytes_per_key);
}

}  // namespace
}  // namespace kvpool
