// What a node promises, through streams: the bytes that were put or a miss that says why, over any
// kind of socket and any number of them.
#include <future>

#include "core_process.h"
#include "net/stream_channel.h"
#include "net_cases.h"

namespace kvpool {
namespace {

using namespace test;

TEST_CASE("net stream: what was put through one stream comes back through several") {
  for (const Kind kind : {Kind::unix_socket, Kind::tcp})
    for (const std::size_t streams : {1ul, 4ul})
      for (const bool has_places : {true, false}) {
        Served served;
        const auto channel = served.channel(kind, streams);
        std::uint64_t n = 0;
        for (const std::uint64_t bytes : {1ul, 7ul, 4095ul, 4097ul, 65'537ul, 1'460'301ul}) {
          Space space;
          name(space, served.pool.space(bytes, bytes));
          const auto keys = keys_from(n, 9);
          n += 9;
          CHECK(all_are(put(*channel, space, keys, has_places), PutStatus::stored));
          Miss why{};
          CHECK(get(*channel, space, keys, why, has_places) == 9);
          CHECK(why == Miss::none);
          CHECK(served.pool.node->lookup(*served.pool.node->space(space.number), keys, nullptr) ==
                9);
          CHECK(all_are(put(*channel, space, keys, has_places), PutStatus::present));
          std::uint8_t tiers[9];
          CHECK(channel->lookup(space, keys, tiers, why) == 9);
          CHECK(tiers[8] == kTierDram);
          CHECK(channel->remove(space, keys) == 9);
          CHECK(channel->lookup(space, keys, tiers, why) == 0);
          CHECK(why == Miss::absent);
          CHECK(tiers[0] == 0);
        }
        CHECK(channel->live() == streams);
        channel->close();
        served.check_at_rest();
      }
}

TEST_CASE("net stream: a get ends at the first block that is missing, and says why") {
  Served served(Pool::plain(96 * kMiB));
  const auto channel = served.channel(Kind::tcp, 3);
  Namespace& named = served.pool.space(1, 64 * kKiB);
  Space space;
  name(space, named);
  const auto keys = keys_from(0, 300);
  served.put(named, keys);
  Miss why{};
  for (const std::size_t gap : {299ul, 150ul, 100ul, 99ul, 1ul, 0ul}) {
    REQUIRE(channel->remove(space, {&keys[gap], 1}) == 1);
    CHECK(get(*channel, space, keys, why) == gap);
    CHECK(why == Miss::absent);
    CHECK(channel->lookup(space, keys, nullptr, why) == gap);
    CHECK(why == Miss::absent);
  }
  CHECK(channel->live() == 3);
}

TEST_CASE("net stream: calls longer than a request are cut") {
  Served served(Pool::plain(96 * kMiB));
  const auto channel = served.channel(Kind::unix_socket, 2);
  Space space;
  name(space, served.pool.space(1, 64));
  const auto keys = keys_from(0, 2 * kKeysPerRequest + 1000);
  CHECK(all_are(put(*channel, space, keys), PutStatus::stored));
  std::vector<std::uint8_t> tiers(keys.size());
  Miss why{};
  CHECK(channel->lookup(space, keys, tiers.data(), why) == keys.size());
  CHECK(std::count(tiers.begin(), tiers.end(), kTierDram) == std::ssize(keys));
  CHECK(get(*channel, space, keys) == keys.size());
  CHECK(channel->remove(space, keys) == keys.size());
}

TEST_CASE("net stream: payload of blocks that are there does not travel again") {
  Served served;
  const auto channel = served.channel(Kind::tcp, 1);
  Space space;
  name(space, served.pool.space(1, kMiB));
  const auto keys = keys_from(0, 8);
  CHECK(all_are(put(*channel, space, std::span(keys).first(6)), PutStatus::stored));
  const std::uint64_t before = served.server->stats().bytes_in;
  const auto statuses = put(*channel, space, keys);
  CHECK(all_are(std::span(statuses).first(6), PutStatus::present));
  CHECK(all_are(std::span(statuses).subspan(6), PutStatus::stored));
  const std::uint64_t sent = served.server->stats().bytes_in - before;
  CHECK(sent >= 2 * kMiB);
  CHECK(sent < 2 * kMiB + 4 * kKiB);
}

TEST_CASE("net stream: a block that was skipped and is not there is asked for") {
  Served served;
  const Descriptor stream = served.dial(Kind::unix_socket);
  Namespace& space = served.pool.space(1, 4096);
  const auto keys = keys_from(0, 3);
  served.put(space, std::span(keys).first(1));
  Request head = request(Op::put, space.number, 3);
  head.skip = 2;
  REQUIRE(send_bytes(stream, put_frame(head, keys, 4096)));
  const Answer answer = receive_answer(stream);
  CHECK(answer.count == 1);
  REQUIRE(answer.body_bytes == 3);
  const Bytes statuses = receive_bytes(stream, 3);
  CHECK(static_cast<PutStatus>(statuses[0]) == PutStatus::present);
  CHECK(static_cast<PutStatus>(statuses[1]) == PutStatus::payload_due);
  CHECK(static_cast<PutStatus>(statuses[2]) == PutStatus::chain_broken);
  CHECK(served.pool.node->lookup(space, keys, nullptr) == 1);
}

TEST_CASE("net stream: a put that ends early leaves its stream in step") {
  for (const Kind kind : {Kind::unix_socket, Kind::tcp}) {
    Served served(Pool::plain(8 * kMiB));
    const auto channel = served.channel(kind, 1);
    Namespace& named = served.pool.space(1, kMiB);
    Space space;
    name(space, named);
    const auto keys = keys_from(0, 20);
    // A chain that needs more than the pool is: its own blocks may not go to make room.
    const auto statuses = put(*channel, space, keys);
    const auto end = std::find(statuses.begin(), statuses.end(), PutStatus::pool_pinned);
    REQUIRE(end != statuses.end());
    const auto stored = static_cast<std::size_t>(end - statuses.begin());
    CHECK(stored >= 4);
    CHECK(all_are(std::span(statuses).first(stored), PutStatus::stored));
    CHECK(all_are(std::span(statuses).subspan(stored + 1), PutStatus::chain_broken));
    CHECK(get(*channel, space, keys) == stored);

    Payloads broken(keys, kMiB, false);
    broken.fails_from = 2;
    std::vector<PutStatus> failed(5);
    REQUIRE(channel->remove(space, keys) == stored);
    channel->put({space, std::span(keys).first(5), nullptr, never_hung()}, broken, failed.data());
    CHECK(all_are(std::span(failed).first(2), PutStatus::stored));
    CHECK(failed[2] == PutStatus::failed);
    CHECK(all_are(std::span(failed).subspan(3), PutStatus::chain_broken));
    CHECK(get(*channel, space, keys) == 2);
    CHECK(channel->live() == 1);
    channel->close();
    served.check_at_rest();
  }
}

TEST_CASE("net stream: bytes that change on their way are not stored") {
  Served served;
  const Descriptor stream = served.dial(Kind::tcp);
  Namespace& space = served.pool.space(1, 4096);
  const auto keys = keys_from(0, 3);
  const Request head = request(Op::put, space.number, 3);
  Bytes sent = put_frame(head, keys, 4096);
  sent[sizeof(Request) + 3 * kHashBytes + 2 * sizeof(Block) + 4096 + 17] ^= std::byte{4};
  REQUIRE(send_bytes(stream, sent));
  CHECK(receive_answer(stream).count == 1);
  const Bytes statuses = receive_bytes(stream, 3);
  CHECK(static_cast<PutStatus>(statuses[1]) == PutStatus::failed);
  CHECK(is_closed_by_peer(stream));
  CHECK(served.server->stats().last_closed.find("checksum") != std::string::npos);
  CHECK(served.pool.node->lookup(space, keys, nullptr) == 1);
  served.check_at_rest();
}

TEST_CASE("net stream: requests that come together are answered in their order") {
  Served served;
  const Descriptor stream = served.dial(Kind::unix_socket);
  Namespace& space = served.pool.space(1, 512);
  const auto keys = keys_from(0, 40);
  Bytes all;
  for (std::uint64_t i = 0; i < 40; ++i) {
    const Bytes put = put_frame(request(Op::put, space.number, 1, 2 * i), {&keys[i], 1}, 512);
    const Bytes look = frame(request(Op::lookup, space.number, 40, 2 * i + 1), keys);
    all.insert(all.end(), put.begin(), put.end());
    all.insert(all.end(), look.begin(), look.end());
  }
  std::thread sender([&] { CHECK(send_bytes(stream, all)); });
  for (std::uint64_t i = 0; i < 80; ++i) {
    const Answer answer = receive_answer(stream);
    CHECK(answer.id == i);
    CHECK(answer.op == (i % 2 == 0 ? Op::put : Op::lookup));
    CHECK(answer.count == (i % 2 == 0 ? 1 : i / 2 + 1));
    receive_bytes(stream, answer.body_bytes);
  }
  sender.join();
  CHECK(served.server->stats().requests == 80);
}

TEST_CASE("net stream: a namespace of no number, and one that was dropped") {
  Served served;
  const auto channel = served.channel(Kind::tcp, 1);
  Namespace& named = served.pool.space(1, 4096);
  Space space;
  name(space, named);
  const auto keys = keys_from(0, 4);
  REQUIRE(all_are(put(*channel, space, keys), PutStatus::stored));
  REQUIRE(served.pool.node->drop_namespace(named, never_hung()).has_value());
  Miss why{};
  CHECK(get(*channel, space, keys, why) == 0);
  CHECK(why == Miss::absent);
  CHECK(all_are(put(*channel, space, keys), PutStatus::stored));

  space.number = 4711;  // as if the node had begun another life
  CHECK(get(*channel, space, keys, why) == 0);
  CHECK(why == Miss::disconnected);
  CHECK(channel->is_broken());
  served.attach(*channel, Kind::tcp, 1);
  CHECK(put(*channel, space, keys)[0] == PutStatus::disconnected);
  CHECK(channel->is_broken());
  space.number = named.number;
  served.attach(*channel, Kind::tcp, 1);
  CHECK(get(*channel, space, keys) == 4);
}

TEST_CASE("net stream: who waits is woken by the put, and holds no stream of the others") {
  Served served;
  const auto channel = served.channel(Kind::unix_socket, 1);
  Namespace& named = served.pool.space(1, 4096);
  Space space;
  name(space, named);
  const auto keys = keys_from(0, 2);
  Refusal refused{};
  CHECK(channel->wait(space, keys, never_hung(), refused) == 0);
  CHECK(refused == Refusal::not_here);
  Descriptor near = served.dial(Kind::unix_socket);
  REQUIRE(channel->add_wait_connection(give(near)).has_value());
  auto waits = std::async(std::launch::async,
                          [&] { return channel->wait(space, keys, never_hung(), refused); });
  wait_until([&] { return served.server->stats().requests == 1; });
  CHECK(put(*channel, space, std::span(keys).first(1))[0] == PutStatus::stored);
  CHECK(waits.wait_for(20ms) == std::future_status::timeout);
  CHECK(put(*channel, space, keys)[1] == PutStatus::stored);
  CHECK(waits.get() == 2);
  CHECK(refused == Refusal::none);
  const auto others = keys_from(7, 2);
  CHECK(channel->wait(space, others, after(30ms), refused) == 0);
  CHECK(refused == Refusal::none);
  CHECK(channel->wait_connections() == 1);
}

TEST_CASE("net stream: so many wait connections and no more") {
  Served served;
  const auto channel = served.channel(Kind::unix_socket, 1);
  for (std::size_t i = 0; i < StreamChannel::kWaitConnections; ++i) {
    Descriptor near = served.dial(Kind::unix_socket);
    REQUIRE(channel->add_wait_connection(give(near)).has_value());
  }
  Descriptor near = served.dial(Kind::unix_socket);
  const auto added = channel->add_wait_connection(give(near));
  REQUIRE(!added.has_value());
  CHECK(added.error().code == Code::no_resource);
  CHECK(added.error().message == "at most 64 calls of one client can wait at a time");
  wait_until([&] { return served.server->stats().streams == 65; });
}

TEST_CASE("net stream: acquire and reserve give memory of the caller's own") {
  Served served;
  const auto channel = served.channel(Kind::tcp, 2);
  Space space;
  name(space, served.pool.space(1, 300'000));
  const auto keys = keys_from(0, 5);
  for (std::size_t i = 0; i < 4; ++i) {
    PutStatus status{};
    const auto room = channel->reserve(
        {space, {&keys[i], 1}, i > 0 ? &keys[i - 1] : nullptr, never_hung()}, status);
    REQUIRE(room);
    make_payload(room->memory, 300'000, keys[i]);
    CHECK(room->commit(never_hung()) == PutStatus::stored);
  }
  PutStatus status{};
  CHECK(channel->reserve({space, {&keys[2], 1}, nullptr, never_hung()}, status) == nullptr);
  CHECK(status == PutStatus::present);
  Miss why{};
  const auto pins = channel->acquire(space, keys, why);
  CHECK(why == Miss::absent);
  REQUIRE(pins->places.size() == 4);
  REQUIRE(channel->remove(space, keys) == 4);
  for (std::size_t i = 0; i < 4; ++i)
    CHECK(is_payload(pins->base + pins->places[i].offset, pins->places[i].bytes, keys[i]));
  CHECK(channel->acquire(space, keys, why)->places.empty());
  CHECK(why == Miss::absent);
}

TEST_CASE("net stream: a forked child leaves the streams of its parent alone") {
  Served served;
  auto channel = served.channel(Kind::tcp, 2);
  Space space;
  name(space, served.pool.space(1, 4096));
  const auto keys = keys_from(0, 4);
  REQUIRE(all_are(put(*channel, space, keys), PutStatus::stored));
  CHECK(status_of_child([&] {
          if (!channel->is_forked()) return 1;
          channel.reset();
          return 0;
        }) == 0);
  CHECK(get(*channel, space, keys) == 4);
  CHECK(channel->live() == 2);
}

TEST_CASE("net stream: threads of one client share its streams") {
  Served served(Pool::plain(16 * kMiB));
  const auto channel = served.channel(Kind::unix_socket, 3);
  Space space;
  name(space, served.pool.space(1, 40'000));
  std::vector<std::future<void>> threads;
  for (std::uint64_t t = 0; t < 6; ++t)
    threads.push_back(std::async(std::launch::async, [&, t] {
      std::mt19937_64 engine(run_seed() + t);
      for (std::size_t round = 0; round < scaled(240); ++round) {
        const auto keys = keys_from(engine() % 400, 1 + engine() % 40);
        const auto kind = engine() % 8;
        if (kind < 3)
          for (const PutStatus status : put(*channel, space, keys, kind == 0))
            REQUIRE((status <= PutStatus::pool_pinned || status == PutStatus::chain_broken));
        else if (kind == 3)
          channel->remove(space, std::span(keys).first(1));
        else
          get(*channel, space, keys);  // compares
      }
    }));
  for (auto& thread : threads) thread.get();
  CHECK(channel->live() == 3);
  CHECK(served.server->stats().closed_garbage == 0);
  channel->close();
  served.check_at_rest();
}

}  // namespace
}  // namespace kvpool
