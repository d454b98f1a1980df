// Peers that die, stop or dawdle, in every phase: what they held is back, others are served.
#include <dirent.h>

#include <future>

#include "net/server.h"
#include "net_cases.h"

namespace kvpool {
namespace {

using namespace test;

constexpr std::size_t kBlock = 256 << 10;

ServerOptions impatient() {
  ServerOptions options;
  options.stall_max = 300ms;
  options.request_max = 1500ms;
  return options;
}

std::size_t open_descriptors() {
  DIR* folder = opendir("/proc/self/fd");
  REQUIRE(folder != nullptr);
  std::size_t count = 0;
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

struct Scene {
  Served served;
  Namespace& space;
  std::vector<Hash128> keys = keys_from(0, 64);

  explicit Scene(const ServerOptions& options = {})
      : served(Pool::plain(64 * kMiB), options), space(served.pool.space(1, kBlock)) {}

  Request head(Op op, std::size_t count) const { return request(op, space.number, count); }
  // A put of which so much payload of its second block has been sent and taken.
  Descriptor half_a_put(Kind kind, std::size_t payload) {
    Descriptor stream = served.dial(kind);
    const Bytes whole = put_frame(head(Op::put, 2), std::span(keys).first(2), kBlock);
    REQUIRE(send_bytes(stream, std::span(whole).first(whole.size() - kBlock + payload)));
    wait_until(
        [&] { return served.pool.node->stats().reserved == 1 && served.pool.has(space, keys[0]); });
    return stream;
  }
};

TEST_CASE("net server: a put whose client dies is undone at once") {
  Scene scene;
  auto fastest = std::chrono::steady_clock::duration::max();  // a busy machine only adds to it
  for (const Kind kind : {Kind::unix_socket, Kind::tcp})
    for (const std::size_t payload : {0ul, 1ul, 200'000ul}) {
      Descriptor stream = scene.half_a_put(kind, payload);
      const auto before = std::chrono::steady_clock::now();
      stream = Descriptor();
      wait_until([&] { return scene.served.pool.node->stats().reserved == 0; });
      const auto took = std::chrono::steady_clock::now() - before;
      fastest = std::min(fastest, took);
      scene.served.check_at_rest();
      CHECK(scene.served.pool.node->remove(scene.space, scene.keys) == 1);
    }
  CHECK(fastest < 100ms);
}

TEST_CASE("net server: half a request holds no thread, and half a put holds its own") {
  Scene scene;
  const Bytes put = put_frame(scene.head(Op::put, 64), scene.keys, 8);
  std::vector<Descriptor> halves;
  for (std::size_t i = 0; i < 40; ++i) {
    halves.push_back(scene.served.dial(Kind::unix_socket));
    REQUIRE(send_bytes(halves.back(), std::span(put).first(1 + 23 * i)));
  }
  const auto channel = scene.served.channel(Kind::unix_socket, 1);
  Space there;
  name(there, scene.space);
  CHECK(all_are(test::put(*channel, there, std::span(scene.keys).first(8)), PutStatus::stored));
  CHECK(scene.served.server->stats().threads <= 20);
  for (std::size_t i = 0; i < 20; ++i) {
    halves.push_back(scene.served.dial(Kind::tcp));
    const auto key = keys_from(1000 + i, 1);
    const Bytes half = put_frame(scene.head(Op::put, 1), key, kBlock);
    REQUIRE(send_bytes(halves.back(), std::span(half).first(half.size() / 2)));
  }
  wait_until([&] { return scene.served.pool.node->stats().reserved == 20; });
  CHECK(get(*channel, there, std::span(scene.keys).first(8)) == 8);
  CHECK(scene.served.server->stats().threads >= 21);
  halves.clear();
  channel->close();
  scene.served.check_at_rest();
}

TEST_CASE("net server: who stops sending, or sends too slowly, is closed") {
  Scene scene(impatient());
  const Descriptor stopped = scene.half_a_put(Kind::tcp, 1000);
  CHECK(is_closed_by_peer(stopped));
  CHECK(scene.served.server->stats().last_closed == "client 1 stopped to send bytes");
  scene.served.check_at_rest();
  REQUIRE(scene.served.pool.node->remove(scene.space, scene.keys) == 1);

  const Descriptor dawdling = scene.half_a_put(Kind::unix_socket, 0);
  const std::byte one{};
  const auto began = std::chrono::steady_clock::now();
  while (::send(dawdling.get(), &one, 1, MSG_NOSIGNAL) == 1)  // one byte every 10 ms
    poll(nullptr, 0, 10);
  CHECK(std::chrono::steady_clock::now() - began >= 500ms);
  CHECK(scene.served.server->stats().last_closed == "client 1 did not send all bytes in time");
  CHECK(scene.served.server->stats().closed_late == 2);
  scene.served.check_at_rest();
}

TEST_CASE("net server: who does not take what it asked for is closed, and its blocks are free") {
  Scene scene(impatient());
  scene.served.put(scene.space, scene.keys);
  for (const Kind kind : {Kind::unix_socket, Kind::tcp}) {
    const Descriptor stream = scene.served.dial(kind);
    Bytes asked;
    for (int i = 0; i < 4; ++i) {
      const Bytes once = frame(scene.head(Op::get, 64), scene.keys);
      append_bytes(asked, once);
    }
    REQUIRE(send_bytes(stream, asked));
    wait_until([&] { return scene.served.server->stats().streams == 0; });
    CHECK(scene.served.server->stats().last_closed == "client 1 stopped to take bytes");
    scene.served.check_at_rest();
  }
  CHECK(scene.served.server->stats().closed_late == 2);
}

TEST_CASE("net server: a get whose client dies gives its blocks back") {
  Scene scene;
  scene.served.put(scene.space, scene.keys);
  for (const Kind kind : {Kind::unix_socket, Kind::tcp}) {
    Descriptor stream = scene.served.dial(kind);
    for (int i = 0; i < 4; ++i) {
      const Bytes asked = frame(scene.head(Op::get, 64), scene.keys);
      REQUIRE(send_bytes(stream, asked));
    }
    receive_bytes(stream, 100'000);
    wait_until([&] { return scene.served.pool.node->stats().pinned > 0; });
    stream = Descriptor();
    scene.served.check_at_rest();
  }
}

TEST_CASE("net server: a wait ends with its client, with its node's draining, or in time") {
  Scene scene;
  const auto asks = [&](std::uint32_t ms) {
    Descriptor stream = scene.served.dial(Kind::tcp);
    Request head = scene.head(Op::wait, 2);
    head.deadline_ms = ms;
    REQUIRE(send_bytes(stream, frame(head, std::span(scene.keys).first(2))));
    return stream;
  };
  Descriptor late = asks(30);
  const Answer answer = receive_answer(late);
  CHECK(answer.count == 0);
  CHECK(static_cast<Miss>(answer.miss) == Miss::timed_out);
  late = Descriptor();

  auto fastest = std::chrono::steady_clock::duration::max();
  for (std::uint64_t i = 0; i < 5; ++i) {
    Descriptor dying = asks(600'000);
    wait_until([&] { return scene.served.server->stats().requests == 2 + i; });
    const auto before = std::chrono::steady_clock::now();
    dying = Descriptor();
    wait_until([&] { return scene.served.server->stats().streams == 0; });
    fastest = std::min(fastest, std::chrono::steady_clock::now() - before);
  }
  CHECK(fastest < 100ms);

  const Descriptor drained = asks(600'000);
  wait_until([&] { return scene.served.server->stats().requests == 7; });
  CHECK(scene.served.server->drain(never_hung()));
  CHECK(static_cast<Refusal>(receive_answer(drained).failed) == Refusal::draining);
  CHECK(is_closed_by_peer(drained));
}

TEST_CASE("net server: draining refuses what is new and waits for what is under way") {
  Scene scene;
  const Descriptor idle = scene.served.dial(Kind::unix_socket);
  const Descriptor putting = scene.half_a_put(Kind::unix_socket, 1000);
  CHECK_FALSE(scene.served.server->drain(after(30ms)));
  REQUIRE(send_bytes(idle, frame(scene.head(Op::lookup, 1), std::span(scene.keys).first(1))));
  CHECK(static_cast<Refusal>(receive_answer(idle).failed) == Refusal::draining);
  CHECK(is_closed_by_peer(idle));
  const Descriptor late = scene.served.dial(Kind::tcp);
  const Bytes put = put_frame(scene.head(Op::put, 2), std::span(scene.keys).subspan(4, 2), kBlock);
  REQUIRE(send_bytes(late, put));
  CHECK(static_cast<Refusal>(receive_answer(late).failed) == Refusal::draining);

  auto drained =
      std::async(std::launch::async, [&] { return scene.served.server->drain(never_hung()); });
  const Bytes rest = put_frame(scene.head(Op::put, 2), std::span(scene.keys).first(2), kBlock);
  REQUIRE(send_bytes(putting, std::span(rest).last(kBlock - 1000)));
  CHECK(receive_answer(putting).count == 2);
  CHECK(drained.get());
  scene.served.server->close();
  CHECK(is_closed_by_peer(putting));
  CHECK(scene.served.server->stats().threads == 0);
  Ends ends(Kind::tcp);
  CHECK_FALSE(scene.served.server->add_stream(scene.served.client, give(ends.far)).has_value());
  scene.served.check_at_rest();
}

TEST_CASE("net server: a client that is dropped loses all its streams, whatever they do") {
  Scene scene;
  scene.served.put(scene.space, std::span(scene.keys).subspan(2));
  const Descriptor idle = scene.served.dial(Kind::tcp);
  const Descriptor putting = scene.half_a_put(Kind::tcp, 10);
  const Descriptor waiting = scene.served.dial(Kind::unix_socket);
  REQUIRE(send_bytes(waiting, frame(scene.head(Op::wait, 2), std::span(scene.keys).first(2))));
  const Descriptor getting = scene.served.dial(Kind::unix_socket);
  REQUIRE(
      send_bytes(getting, frame(scene.head(Op::get, 60), std::span(scene.keys).subspan(2, 60))));
  wait_until([&] { return scene.served.pool.node->stats().pinned > 2; });
  const std::uint64_t other = scene.served.server->add_client();
  Ends ends(Kind::tcp);
  REQUIRE(scene.served.server->add_stream(other, give(ends.far)).has_value());
  CHECK(scene.served.server->stats().clients == 2);

  const auto before = std::chrono::steady_clock::now();
  scene.served.server->drop_client(scene.served.client);
  for (const Descriptor* end : {&idle, &putting, &waiting, &getting}) is_closed_by_peer(*end);
  wait_until([&] { return scene.served.server->stats().streams == 1; });
  CHECK(std::chrono::steady_clock::now() - before < 5s);  // no deadline of its own is that short
  scene.served.pool.check_at_rest();
  REQUIRE(
      send_bytes(ends.near, frame(scene.head(Op::lookup, 1), std::span(scene.keys).subspan(2, 1))));
  CHECK(receive_answer(ends.near).count == 1);
  Ends late(Kind::tcp);
  const auto added = scene.served.server->add_stream(scene.served.client, give(late.far));
  REQUIRE_FALSE(added.has_value());
  CHECK(added.error().message == "there is no client of this number (any more)");
  CHECK(is_closed_by_peer(late.near));
  CHECK(scene.served.server->stats().clients == 1);
}

TEST_CASE("net server: so many connections and no more, and no descriptor is lost") {
  const std::size_t before = open_descriptors();
  {
    ServerOptions options;
    options.sources_max = 3;
    Scene scene(options);
    std::vector<Descriptor> streams;
    for (int i = 0; i < 3; ++i) streams.push_back(scene.served.dial(Kind::unix_socket));
    Ends ends(Kind::tcp);
    const auto added = scene.served.server->add_stream(scene.served.client, give(ends.far));
    REQUIRE_FALSE(added.has_value());
    CHECK(added.error().code == Code::no_resource);
    CHECK(is_closed_by_peer(ends.near));
    CHECK_FALSE(scene.served.server->add_stream(scene.served.client, -1).has_value());
    streams.pop_back();
    wait_until([&] { return scene.served.server->stats().streams == 2; });
    streams.push_back(scene.served.dial(Kind::unix_socket));
  }
  CHECK(open_descriptors() == before);
}

// Each of many clients does a few things and half of them vanish in the middle of one.
TEST_CASE("net server: many clients, half of them dying") {
  test::Random random("net server dying clients");
  Scene scene;
  const std::size_t descriptors = open_descriptors();
  const std::uint64_t seed = random.between<std::uint64_t>(0, 1ull << 60);
  std::vector<std::future<void>> clients;
  for (std::uint64_t c = 0; c < 64; ++c)
    clients.push_back(std::async(std::launch::async, [&, c] {
      std::mt19937_64 engine(seed + c);
      for (int round = 0; round < 3; ++round) {
        const Descriptor stream =
            scene.served.dial(engine() % 2 == 0 ? Kind::unix_socket : Kind::tcp);
        const std::span keys = std::span(scene.keys).subspan(engine() % 60, 1 + engine() % 4);
        const Bytes put = put_frame(scene.head(Op::put, keys.size()), keys, kBlock);
        const Bytes get = frame(scene.head(Op::get, keys.size()), keys);
        if (c % 2 == 0) {  // dies
          const Bytes& asked = engine() % 2 == 0 ? put : get;
          send_bytes(stream, std::span(asked).first(engine() % asked.size()));
          if (engine() % 2 == 0) send_bytes(stream, get);
          continue;
        }
        REQUIRE(send_bytes(stream, put));
        CHECK(receive_answer(stream).id == 1);
        receive_bytes(stream, keys.size());
        REQUIRE(send_bytes(stream, get));
        const Bytes got = receive_bytes(stream, keys.size() * (sizeof(Block) + kBlock));
        REQUIRE(got.size() == keys.size() * (sizeof(Block) + kBlock));
        for (std::size_t i = 0; i < keys.size(); ++i)
          CHECK(is_payload(got.data() + i * (sizeof(Block) + kBlock) + sizeof(Block), kBlock,
                           keys[i]));
      }
    }));
  for (auto& client : clients) client.get();
  scene.served.check_at_rest();
  CHECK(open_descriptors() == descriptors);
}

}  // namespace
}  // namespace kvpool
