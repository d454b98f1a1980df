// A channel against nodes that do not do what they should: each call ends by its deadline, with the
// leading blocks that are right and the reason for the next.
#include <future>

#include "net/stream_channel.h"
#include "net_cases.h"

namespace kvpool {
namespace {

using namespace test;

constexpr std::size_t kBlock = 300'000;

// The other ends of a channel's streams, played by the test.
struct Played {
  std::unique_ptr<StreamChannel> channel;
  std::vector<Descriptor> ends;
  Space space;
  std::vector<Hash128> keys = keys_from(0, 8);

  explicit Played(std::size_t streams, std::chrono::milliseconds timeout = 60s) {
    auto made = StreamChannel::create({.timeout = timeout});
    REQUIRE(made.has_value());
    channel = std::move(*made);
    space.block_bytes = kBlock;
    attach(streams);
  }
  void attach(std::size_t streams) {
    std::vector<int> near;
    ends.clear();
    for (std::size_t i = 0; i < streams; ++i) {
      Ends pair(i % 2 == 0 ? Kind::unix_socket : Kind::tcp);
      near.push_back(give(pair.near));
      ends.push_back(std::move(pair.far));
    }
    REQUIRE(channel->attach(near).has_value());
  }
  // Its head; the keys are taken and forgotten.
  Request take_request(std::size_t stream) {
    Request head{.magic = 0};
    const Bytes got = receive_bytes(ends[stream], sizeof head);
    if (got.size() < sizeof head) return head;
    std::memcpy(&head, got.data(), sizeof head);
    receive_bytes(ends[stream], (head.count + (head.flags & kHasParent)) * kHashBytes);
    return head;
  }
  // All of a get's blocks, from key `first` on, and the answer.
  Bytes delivery(const Request& head, std::size_t first) const {
    Bytes made;
    for (std::size_t i = 0; i < head.count; ++i)
      append_block(made, head, i, keys[first + i], kBlock);
    append(made, Answer{.op = Op::get, .id = head.id, .count = head.count});
    return made;
  }
};

TEST_CASE("net channel: no answer is a miss by the deadline, and then there is no node") {
  Played played(2, 100ms);
  Miss why{};
  const auto before = std::chrono::steady_clock::now();
  CHECK(get(*played.channel, played.space, played.keys, why) == 0);
  CHECK(why == Miss::timed_out);
  CHECK(std::chrono::steady_clock::now() - before >= 100ms);
  CHECK(played.channel->is_broken());
  CHECK(played.channel->wait_broken(never_hung()));
  // Without a node every call answers at once.
  CHECK(get(*played.channel, played.space, played.keys, why) == 0);
  CHECK(why == Miss::disconnected);
  CHECK(played.channel->lookup(played.space, played.keys, nullptr, why) == 0);
  CHECK(why == Miss::disconnected);
  const auto statuses = put(*played.channel, played.space, played.keys);
  CHECK(statuses[0] == PutStatus::disconnected);
  CHECK(all_are(std::span(statuses).subspan(1), PutStatus::chain_broken));
  CHECK(played.channel->acquire(played.space, played.keys, why)->places.empty());
  PutStatus status{};
  CHECK(!played.channel->reserve(
      {played.space, std::span(played.keys).first(1), nullptr, never_hung()}, status));
  CHECK(status == PutStatus::disconnected);
  CHECK(played.channel->remove(played.space, played.keys) == 0);
  CHECK(played.channel->wait(played.space, played.keys, never_hung()) == 0);
}

TEST_CASE("net channel: a put that is not taken ends by its deadline") {
  Played played(1);
  Payloads source(played.keys, kBlock);
  std::vector<PutStatus> statuses(8);
  // A put this large asks first what is there, and is told.
  auto answered = std::async(std::launch::async, [&] {
    const Request head = played.take_request(0);
    CHECK(head.op == Op::lookup);
    Bytes answer;
    append(answer, Answer{.op = Op::lookup, .miss = 1, .id = head.id, .body_bytes = 8});
    answer.resize(answer.size() + 8);
    CHECK(send_bytes(played.ends[0], answer));
  });
  played.channel->put({played.space, played.keys, nullptr, after(200ms)}, source, statuses.data());
  answered.get();
  CHECK(statuses[0] == PutStatus::timed_out);
  CHECK(all_are(std::span(statuses).subspan(1), PutStatus::chain_broken));
  CHECK(played.channel->is_broken());
}

TEST_CASE("net channel: a node that answers or closes before it has taken a put") {
  for (const bool answers : {true, false}) {
    Played played(1);
    auto node = std::async(std::launch::async, [&] {
      const Request asked = played.take_request(0);
      Bytes answer;
      append(answer, Answer{.op = Op::lookup, .miss = 1, .id = asked.id, .body_bytes = 8});
      answer.resize(answer.size() + 8);
      send_bytes(played.ends[0], answer);
      const Request put = played.take_request(0);
      CHECK(put.op == Op::put);
      receive_bytes(played.ends[0], 1000);
      Bytes early;
      append(early, Answer{.op = Op::put, .failed = 2, .id = put.id});
      if (answers)
        send_bytes(played.ends[0], early);
      else
        played.ends[0] = Descriptor();
    });
    // More than the buffers of a socket take.
    std::vector<Hash128> many = keys_from(0, 8);
    CHECK(put(*played.channel, played.space, many)[0] == PutStatus::disconnected);
    node.get();
    CHECK(played.channel->is_broken());
  }
}

TEST_CASE("net channel: a put tells what the node said of each block") {
  Played played(1);
  played.space.block_bytes = 1000;
  const auto told = [&](std::vector<PutStatus> said) {
    auto node = std::async(std::launch::async, [&] {
      const Request head = played.take_request(0);
      CHECK(head.count == said.size());
      receive_bytes(played.ends[0], said.size() * (sizeof(Block) + 1000));
      Bytes answer;
      append(answer, Answer{.op = Op::put, .id = head.id, .body_bytes = head.count});
      for (const PutStatus status : said) answer.push_back(static_cast<std::byte>(status));
      send_bytes(played.ends[0], answer);
    });
    const auto statuses =
        put(*played.channel, played.space, std::span(played.keys).first(said.size()));
    node.get();
    return statuses;
  };
  using enum PutStatus;
  for (const auto& said : {std::vector{stored, not_durable, present, not_durable},
                           std::vector{present, stored, dropped, chain_broken},
                           std::vector{no_memory, chain_broken}, std::vector{not_durable}})
    CHECK(told(said) == said);
  CHECK(told({stored, static_cast<PutStatus>(kPutStatuses)}) ==
        std::vector{disconnected, chain_broken});
  CHECK(played.channel->is_broken());
}

TEST_CASE("net channel: nothing that does not fit is taken for an answer") {
  const std::size_t second = sizeof(Block) + kBlock;
  struct Change {
    std::size_t at;
    std::size_t right;  // blocks that are right all the same
  };
  const std::size_t answer = 8 * second;
  for (const Change change : {Change{0, 0},
                              {4, 0},
                              {8, 0},
                              {16, 0},
                              {20, 0},
                              {24, 0},
                              {39, 0},
                              {48, 0},
                              {63, 0},
                              {64, 0},
                              {sizeof(Block), 0},
                              {sizeof(Block) + kBlock - 1, 0},
                              {second, 1},
                              {second + 100, 1},
                              {5 * second + 71, 5},
                              {6 * second - 1, 5},
                              {answer + 0, 8},
                              {answer + 4, 8},
                              {answer + 5, 8},
                              {answer + 7, 8},
                              {answer + 8, 8},
                              {answer + 16, 8},
                              {answer + 20, 8}}) {
    Played played(1);
    auto node = std::async(std::launch::async, [&] {
      Bytes made = played.delivery(played.take_request(0), 0);
      made[change.at] ^= std::byte{0x10};
      send_bytes(played.ends[0], made);
    });
    Arrivals sink(played.keys, kBlock);
    Miss why{};
    const std::size_t count = played.channel->get(played.space, played.keys, sink, why);
    node.get();
    CAPTURE(change.at);
    CHECK(count == change.right);
    CHECK(sink.are_right(count));
    if (count < 8) CHECK(why == Miss::damaged);
    CHECK(played.channel->is_broken());
  }
}

TEST_CASE("net channel: deliveries with some bytes changed never deliver other bytes") {
  test::Random random("net channel changed bytes");
  constexpr std::size_t kSmall = 700;
  for (std::size_t round = 0; round < scaled(600); ++round) {
    Played played(1, 60s);
    played.space.block_bytes = kSmall;
    const auto keys = keys_from(round, 1 + round % 50);
    const std::size_t at = random.between<std::size_t>(0, (keys.size() + 1) * (kSmall + 72));
    const int kind = random.between(0, 2);
    auto node = std::async(std::launch::async, [&] {
      const Request head = played.take_request(0);
      Bytes made;
      for (std::size_t i = 0; i < head.count; ++i) append_block(made, head, i, keys[i], kSmall);
      append(made, Answer{.op = Op::get, .id = head.id, .count = head.count});
      const Bytes right = made;
      const auto place = made.begin() + static_cast<std::ptrdiff_t>(std::min(at, made.size() - 1));
      if (kind == 0) *place ^= std::byte{1};
      if (kind == 1) made.erase(place);
      if (kind == 2) made.insert(place, std::byte{7});
      send_bytes(played.ends[0], made);
      played.ends[0] = Descriptor();
      return static_cast<std::size_t>(
          std::mismatch(right.begin(), right.end(), made.begin(), made.end()).first -
          right.begin());
    });
    Arrivals sink(keys, kSmall, round % 2 == 0);
    Miss why{};
    const std::size_t count = played.channel->get(played.space, keys, sink, why);
    const std::size_t first_wrong = node.get();
    CAPTURE(first_wrong);
    CHECK(count == std::min(first_wrong / (kSmall + sizeof(Block)), keys.size()));
    CHECK(sink.are_right(count));
    if (count < keys.size()) CHECK(why != Miss::none);
  }
}

TEST_CASE("net channel: an answer of a request that has none, and one that is too long") {
  const auto answered = [](auto change) {
    Played played(1);
    auto node = std::async(std::launch::async, [&] {
      const Request head = played.take_request(0);
      Answer answer{.op = Op::lookup, .id = head.id, .count = 8, .body_bytes = 8};
      change(answer);
      Bytes made;
      append(made, answer);
      made.resize(made.size() + 8);
      send_bytes(played.ends[0], made);
    });
    Miss why{};
    std::uint8_t tiers[8];
    const std::size_t count = played.channel->lookup(played.space, played.keys, tiers, why);
    node.get();
    return count == 8 && !played.channel->is_broken();
  };
  CHECK(answered([](Answer&) {}));
  CHECK_FALSE(answered([](Answer& a) { a.magic = kBlockMagic; }));
  CHECK_FALSE(answered([](Answer& a) { a.version = 0; }));
  CHECK_FALSE(answered([](Answer& a) { a.op = Op::get; }));
  CHECK_FALSE(answered([](Answer& a) { a.miss = kMisses; }));
  CHECK_FALSE(answered([](Answer& a) { a.failed = 1; }));
  CHECK_FALSE(answered([](Answer& a) { ++a.id; }));
  CHECK_FALSE(answered([](Answer& a) { a.count = 9; }));
  CHECK_FALSE(answered([](Answer& a) { a.body_bytes = ~0u; }));
}

TEST_CASE("net channel: of several streams one breaks, and the leading blocks count") {
  for (const std::size_t breaks : {0ul, 1ul, 2ul, 3ul}) {
    Played played(4);
    std::vector<std::future<void>> nodes;
    for (std::size_t i = 0; i < 4; ++i)
      nodes.push_back(std::async(std::launch::async, [&, i] {
        const Request head = played.take_request(i);
        REQUIRE(head.count == 2);
        const Bytes made = played.delivery(head, 2 * i);
        const std::size_t half = made.size() / 2 - 1000;
        send_bytes(played.ends[i], std::span(made).first(i == breaks ? half : made.size()));
        if (i == breaks) played.ends[i] = Descriptor();
      }));
    Miss why{};
    CHECK(get(*played.channel, played.space, played.keys, why) == 2 * breaks);
    CHECK(why == Miss::disconnected);
    for (auto& node : nodes) node.get();
    CHECK(played.channel->live() == 3);
    CHECK(played.channel->wait_broken(never_hung()));
    Ends pair(Kind::tcp);
    REQUIRE(played.channel->add(give(pair.near)).has_value());
    CHECK(played.channel->live() == 4);
    CHECK_FALSE(played.channel->wait_broken(after(1ms)));
  }
}

TEST_CASE("net channel: the end of a stream that nobody uses is noticed, and repaired") {
  Played played(3);
  CHECK_FALSE(played.channel->wait_broken(after(5ms)));
  auto watched =
      std::async(std::launch::async, [&] { return played.channel->wait_broken(never_hung()); });
  played.ends[1] = Descriptor();
  CHECK(watched.get());
  CHECK(played.channel->live() == 2);
  played.ends.clear();
  CHECK(played.channel->wait_broken(never_hung()));
  wait_until(
      [&] { return played.channel->wait_broken(never_hung()) && played.channel->is_broken(); });
  played.attach(2);
  CHECK_FALSE(played.channel->is_broken());
  CHECK_FALSE(played.channel->wait_broken(after(5ms)));
  auto closed =
      std::async(std::launch::async, [&] { return played.channel->wait_broken(never_hung()); });
  played.channel->close();
  CHECK(closed.get());
  CHECK(played.channel->is_closed());
  for (const Descriptor& end : played.ends) CHECK(is_closed_by_peer(end));
  Ends late(Kind::unix_socket);
  REQUIRE(played.channel->add(give(late.near)).has_value());
  CHECK(is_closed_by_peer(late.far));
  CHECK(played.channel->is_broken());
}

TEST_CASE("net channel: calls under way end when their streams are replaced or closed") {
  for (const bool replaces : {true, false}) {
    Played played(1);
    auto call = std::async(std::launch::async, [&] {
      Miss why{};
      CHECK(get(*played.channel, played.space, played.keys, why) == 0);
      return why;
    });
    CHECK(played.take_request(0).op == Op::get);
    if (replaces)
      played.attach(1);
    else
      played.channel->close();
    CHECK(call.get() == Miss::disconnected);
    CHECK(played.channel->live() == (replaces ? 1 : 0));
  }
}

TEST_CASE("net channel: threads wait for a stream, but not past their deadline") {
  Played played(1, 150ms);
  auto first = std::async(std::launch::async, [&] {
    Miss why{};
    get(*played.channel, played.space, played.keys, why);
    return why;
  });
  CHECK(played.take_request(0).op == Op::get);
  Miss why{};
  CHECK(played.channel->lookup(played.space, played.keys, nullptr, why) == 0);
  CHECK((why == Miss::timed_out || why == Miss::disconnected));
  CHECK(first.get() == Miss::timed_out);
}

}  // namespace
}  // namespace kvpool
