// Frames that no client of ours sends: the stream is closed with a reason, nothing else happens.
#include <cstddef>

#include "net/server.h"
#include "net_cases.h"

namespace kvpool {
namespace {

using namespace test;

constexpr std::size_t kBlock = 512;

struct Victim {
  Served served;
  Namespace& space;
  std::vector<Hash128> keys = keys_from(0, 4);

  explicit Victim(const ServerOptions& options = {})
      : served(Pool::plain(16 * kMiB), options), space(served.pool.space(1, kBlock)) {
    served.put(space, std::span(keys).first(2));
  }
  Request head(Op op, std::size_t count) const { return request(op, space.number, count); }

  // Sends and sees the stream closed, for a reason that says `why`.
  void expect_closed(std::span<const std::byte> bytes, const std::string& why) {
    const std::uint64_t before = served.server->stats().closed_garbage;
    const Descriptor stream = served.dial(Kind::unix_socket);
    send_bytes(stream, bytes);  // may be closed before all is sent
    CHECK(is_closed_by_peer(stream));
    const ServerStats stats = served.server->stats();
    CHECK(stats.closed_garbage == before + 1);
    CHECK_MESSAGE(stats.last_closed.find(why) != std::string::npos, stats.last_closed);
  }
  // Others are served as before, and nobody holds anything.
  void check_unharmed() {
    {
      const auto channel = served.channel(Kind::unix_socket, 1);
      Space there;
      name(there, space);
      CHECK(get(*channel, there, std::span(keys).first(2)) == 2);
    }
    served.check_at_rest();
  }
};

TEST_CASE("net server: a request with a field that cannot be") {
  Victim victim;
  const auto with = [&](auto change) {
    Request head = victim.head(Op::lookup, 1);
    change(head);
    return frame(head, {victim.keys.data(), 1});
  };
  victim.expect_closed(with([](Request& r) { r.magic ^= 1; }), "not a request");
  victim.expect_closed(with([](Request& r) { r.version = 9; }), "of version 9");
  victim.expect_closed(with([](Request& r) { r.op = Op{0}; }), "unknown kind 0");
  victim.expect_closed(with([](Request& r) { r.op = Op{14}; }), "unknown kind 14");
  victim.expect_closed(with([](Request& r) { r.flags = 16; }), "unknown flags");
  victim.expect_closed(with([](Request& r) { r.flags = kHasParent; }), "unknown flags");
  victim.expect_closed(with([](Request& r) { r.count = 0; }), "0 keys");
  victim.expect_closed(with([](Request& r) { r.count = kKeysPerRequest + 1; }), "8193 keys");
  victim.expect_closed(with([](Request& r) { r.count = ~0u; }), "4294967295 keys");
  victim.expect_closed(with([](Request& r) { r.skip = 1; }), "skips too much");
  victim.expect_closed(with([](Request& r) { r.deadline_ms = ~0u; }), "deadline");
  Request put = victim.head(Op::put, 2);
  put.skip = 3;
  victim.expect_closed(frame(put, {victim.keys.data(), 2}), "skips too much");
  put = victim.head(Op::put, 2);
  put.flags = kIsPart;
  victim.expect_closed(frame(put, {victim.keys.data(), 2}), "unknown flags");
  victim.check_unharmed();
}

TEST_CASE("net server: a block of a put with a field that cannot be") {
  Victim victim;
  const auto with = [&](auto change, bool signs = true) {
    const Request head = victim.head(Op::put, 2);
    const std::span keys = std::span(victim.keys).subspan(2);
    Bytes made = frame(head, keys);
    append_block(made, head, 0, keys[0], kBlock);
    const Bytes payload = payload_of(keys[1], kBlock);
    Block block = block_head(head, 1, keys[1], payload);
    change(block);
    if (signs) block.check = check_of(block);
    append(made, block);
    made.insert(made.end(), payload.begin(), payload.end());
    return made;
  };
  const std::string why = "a block that does not fit";
  victim.expect_closed(with([](Block& b) { b.magic ^= 1; }), why);
  victim.expect_closed(with([](Block& b) { b.version = 2; }), why);
  victim.expect_closed(with([](Block& b) { b.id = 7; }), why);
  victim.expect_closed(with([](Block& b) { b.index = 0; }), why);
  victim.expect_closed(with([](Block& b) { b.index = 2; }), why);
  victim.expect_closed(with([](Block& b) { b.bytes = kBlock - 1; }), why);
  victim.expect_closed(with([](Block& b) { b.bytes = ~0u; }), why);
  victim.expect_closed(with([](Block& b) { b.key_low ^= 1; }), why);
  victim.expect_closed(with([](Block& b) { b.key_high ^= 1; }), why);
  victim.expect_closed(with([](Block& b) { b.check ^= 1; }, false), why);
  victim.expect_closed(with([](Block& b) { b.generation = 5; }, false), why);
  victim.check_unharmed();
  CHECK(victim.served.pool.node->lookup(victim.space, victim.keys, nullptr) == 3);
}

TEST_CASE("net server: frames that end at any byte, with nothing said or a reset") {
  Victim victim;
  Request put = victim.head(Op::put, 2);
  put.flags = kHasParent;
  Bytes whole;
  append(whole, put);
  for (const std::size_t i : {1, 2, 3}) append(whole, victim.keys[i]);
  append_block(whole, put, 0, victim.keys[2], kBlock);
  append_block(whole, put, 1, victim.keys[3], kBlock);
  for (std::size_t cut = 0; cut < whole.size(); cut += kUnderTsan ? 7 : 1) {
    const Descriptor stream = victim.served.dial(cut % 2 == 0 ? Kind::unix_socket : Kind::tcp);
    REQUIRE(send_bytes(stream, std::span(whole).first(cut)));
    if (cut % 3 == 0) continue;
    const linger reset{.l_onoff = 1, .l_linger = 0};
    setsockopt(stream.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
  }
  victim.check_unharmed();
  CHECK(victim.served.server->stats().closed_garbage == 0);
  CHECK(!victim.served.pool.has(victim.space, victim.keys[3]));
}

TEST_CASE("net server: frames out of order") {
  Victim victim;
  const Request put = victim.head(Op::put, 1);
  Bytes block_first, answer_first, twice = put_frame(put, {&victim.keys[2], 1}, kBlock);
  append_block(block_first, put, 0, victim.keys[2], kBlock);
  append(answer_first, Answer{.op = Op::get});
  append_block(twice, put, 0, victim.keys[2], kBlock);  // one more than announced
  victim.expect_closed(block_first, "not a request");
  victim.expect_closed(answer_first, "not a request");
  victim.expect_closed(twice, "not a request");
  Bytes request_in_payload = frame(victim.head(Op::put, 2), std::span(victim.keys).subspan(2));
  append(request_in_payload, put);
  request_in_payload.resize(request_in_payload.size() + sizeof(Block));
  victim.expect_closed(request_in_payload, "a block that does not fit");
  victim.check_unharmed();
}

TEST_CASE("net server: the same frames again change nothing") {
  Victim victim;
  const Descriptor stream = victim.served.dial(Kind::unix_socket);
  const Bytes put = put_frame(victim.head(Op::put, 4), victim.keys, kBlock);
  for (int i = 0; i < 3; ++i) {
    REQUIRE(send_bytes(stream, put));
    CHECK(receive_answer(stream).count == 4);
    for (const std::byte status : receive_bytes(stream, 4))
      CHECK(static_cast<PutStatus>(status) <= PutStatus::present);
  }
  CHECK(victim.served.pool.node->stats().blocks == 4);
}

TEST_CASE("net server: leases are for those who have mapped the arena") {
  Victim victim;
  for (const Kind kind : {Kind::unix_socket, Kind::tcp})
    for (const Op op : {Op::acquire, Op::release}) {
      const Descriptor stream = victim.served.dial(kind);
      REQUIRE(send_bytes(stream, frame(victim.head(op, 2), std::span(victim.keys).first(2))));
      const Answer answer = receive_answer(stream);
      CHECK(static_cast<Refusal>(answer.failed) == Refusal::not_here);
      CHECK(answer.count == 0);
    }
  victim.check_unharmed();
}

// One conversation of each kind, of which the next two tests change bytes.
Bytes conversation(const Victim& victim, test::Random& random) {
  Bytes made;
  for (int i = 0; i < 4; ++i) {
    const auto op = static_cast<Op>(random.between(1, 7));
    Request head = victim.head(op, 1 + random.between(0, 3));
    head.deadline_ms = 1;  // of a wait
    head.id = static_cast<std::uint64_t>(i);
    const std::span keys = std::span(victim.keys).first(head.count);
    const Bytes next = op == Op::put ? put_frame(head, keys, kBlock) : frame(head, keys);
    made.insert(made.end(), next.begin(), next.end());
  }
  return made;
}

// What a stream is answered is not looked at, but taken, so that it never stands still.
void talk(Victim& victim, std::span<const std::byte> bytes) {
  const Descriptor stream = victim.served.dial(Kind::unix_socket);
  send_bytes(stream, bytes);
  shutdown(stream.get(), SHUT_WR);
  CHECK(is_closed_by_peer(stream));
}

TEST_CASE("net server: conversations with some bytes changed") {
  test::Random random("net server changed bytes");
  Victim victim;
  for (std::size_t round = 0; round < scaled(3000); ++round) {
    Bytes bytes = conversation(victim, random);
    for (int changes = random.between(1, 4); changes > 0; --changes) {
      const std::size_t at = random.between<std::size_t>(0, bytes.size() - 1);
      switch (random.between(0, 3)) {
        case 0:
          bytes[at] ^= static_cast<std::byte>(1 << random.between(0, 7));
          break;
        case 1:
          bytes[at] = static_cast<std::byte>(random.between(0, 255));
          break;
        case 2:  // a part is missing
          bytes.erase(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                      bytes.begin() + static_cast<std::ptrdiff_t>(std::min(
                                          bytes.size(), at + random.between<std::size_t>(1, 99))));
          break;
        default:  // a part comes twice
          const Bytes part(
              bytes.begin() + static_cast<std::ptrdiff_t>(at),
              bytes.begin() + static_cast<std::ptrdiff_t>(
                                  std::min(bytes.size(), at + random.between<std::size_t>(1, 99))));
          bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at), part.begin(), part.end());
      }
      if (bytes.empty()) break;
    }
    talk(victim, bytes);
  }
  MESSAGE(victim.served.server->stats().closed_garbage, " closed for garbage");
  CHECK(victim.served.server->stats().closed_garbage > 0);
  victim.served.put(victim.space, std::span(victim.keys).first(2));  // some rounds remove
  victim.check_unharmed();
}

TEST_CASE("net server: noise") {
  test::Random random("net server noise");
  Victim victim;
  for (std::size_t round = 0; round < scaled(1000); ++round) {
    const auto noise = random.bytes(random.between<std::size_t>(1, 5000));
    Bytes bytes(noise.size());
    std::memcpy(bytes.data(), noise.data(), noise.size());
    // Half of them look like a request at first.
    if (round % 2 == 0) {
      const Bytes good = conversation(victim, random);
      std::copy_n(good.begin(), std::min<std::size_t>(bytes.size(), 12), bytes.begin());
    }
    talk(victim, bytes);
  }
  victim.served.put(victim.space, std::span(victim.keys).first(2));
  victim.check_unharmed();
}

}  // namespace
}  // namespace kvpool
