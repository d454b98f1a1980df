// A node with a server for a test, and connections to it: real sockets, in this process.
#pragma once
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <cstring>

#include <algorithm>
#include <functional>
#include <string>
#include <thread>

#include "net/frame.h"
#include "net/server.h"
#include "net/stream_channel.h"
#include "node_cases.h"

namespace kvpool::test {

using namespace std::chrono_literals;

enum class Kind { unix_socket, tcp };

// Two ends of a connection.
struct Ends {
  Descriptor near, far;

  explicit Ends(Kind kind) {
    int pair[2];
    if (kind == Kind::unix_socket) {
      REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
      near = Descriptor(pair[0]);
      far = Descriptor(pair[1]);
      return;
    }
    const Descriptor listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof address;
    auto* at = reinterpret_cast<sockaddr*>(&address);
    REQUIRE(bind(listener.get(), at, bytes) == 0);
    REQUIRE(listen(listener.get(), 1) == 0);
    REQUIRE(getsockname(listener.get(), at, &bytes) == 0);
    near = Descriptor(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    REQUIRE(connect(near.get(), at, bytes) == 0);
    far = Descriptor(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    REQUIRE(far.is_open());
  }
};

// What it owned, to be owned by whoever takes the number.
inline int give(Descriptor& descriptor) {
  const int number = dup(descriptor.get());
  REQUIRE(number >= 0);
  descriptor = Descriptor();
  return number;
}

// Waits for what another thread brings about; the deadline is for a test that would hang.
inline void wait_until(const std::function<bool()>& is_so) {
  const auto deadline = never_hung();
  while (!is_so()) {
    REQUIRE(std::chrono::steady_clock::now() < deadline);
    std::this_thread::yield();
  }
}

// Payload of keys, made whole beforehand; with true checksums.
class Payloads final : public BlockSource {
 public:
  Payloads(std::span<const Hash128> keys, std::size_t block_bytes, bool has_places = true)
      : block_bytes_(block_bytes), has_places_(has_places) {
    for (const Hash128& key : keys) blocks_.push_back(payload_of(key, block_bytes));
  }
  bool fill(std::size_t index, std::byte* slot, Hash128& sum) override {
    if (index >= fails_from) return false;
    racy_fill(slot, blocks_[index].data(), block_bytes_);
    sum = checksum(blocks_[index].data(), block_bytes_);
    return true;
  }
  const std::byte* place(std::size_t index) const override {
    return has_places_ ? blocks_[index].data() : nullptr;
  }
  std::size_t fails_from = ~std::size_t{0};

 private:
  const std::size_t block_bytes_;
  const bool has_places_;
  std::vector<std::vector<std::byte>> blocks_;
};

// Takes blocks in and compares those that were counted.
class Arrivals final : public BlockSink {
 public:
  Arrivals(std::span<const Hash128> keys, std::size_t block_bytes, bool has_places = true)
      : keys_(keys),
        block_bytes_(block_bytes),
        has_places_(has_places),
        memory_(keys.size() * block_bytes) {}
  bool deliver(std::size_t, const IndexReader&, const Found&) override { return false; }
  bool deliver_whole(std::size_t index, std::span<const std::byte> payload) override {
    std::memcpy(memory_.data() + index * block_bytes_, payload.data(), payload.size());
    return payload.size() == block_bytes_;
  }
  std::byte* place(std::size_t index) override {
    return has_places_ ? memory_.data() + index * block_bytes_ : nullptr;
  }
  bool are_right(std::size_t count) const {
    for (std::size_t i = 0; i < count; ++i)
      if (!is_payload(memory_.data() + i * block_bytes_, block_bytes_, keys_[i])) return false;
    return true;
  }

 private:
  const std::span<const Hash128> keys_;
  const std::size_t block_bytes_;
  const bool has_places_;
  std::vector<std::byte> memory_;
};

struct Served {
  Pool pool;
  std::unique_ptr<Server> server;
  std::uint64_t client = 0;

  explicit Served(const NodeOptions& options = Pool::plain(64 * kMiB),
                  const ServerOptions& server_options = {})
      : pool(options) {
    // The pool keeps the node; the server is gone before it.
    auto made = Server::create(std::shared_ptr<Node>(std::shared_ptr<void>{}, pool.node.get()),
                               server_options);
    REQUIRE(made.has_value());
    server = std::move(*made);
    client = server->add_client();
  }

  // The client's end of a new stream.
  Descriptor dial(Kind kind) {
    Ends ends(kind);
    const auto added = server->add_stream(client, give(ends.far));
    REQUIRE(added.has_value());
    return std::move(ends.near);
  }
  std::unique_ptr<StreamChannel> channel(Kind kind, std::size_t streams,
                                         std::chrono::milliseconds timeout = 60s) {
    auto made = StreamChannel::create({.timeout = timeout});
    REQUIRE(made.has_value());
    attach(**made, kind, streams);
    return std::move(*made);
  }
  void attach(StreamChannel& to, Kind kind, std::size_t streams) {
    std::vector<int> dialled;
    for (std::size_t i = 0; i < streams; ++i) {
      Descriptor near = dial(kind);
      dialled.push_back(give(near));
    }
    REQUIRE(to.attach(dialled).has_value());
  }
  void put(Namespace& to, std::span<const Hash128> keys) {
    Payloads source(keys, to.block_bytes);
    std::vector<PutStatus> statuses(keys.size());
    pool.node->put({to, keys, nullptr, never_hung()}, source, statuses.data());
    for (const PutStatus status : statuses) REQUIRE(status <= PutStatus::present);
  }
  // No connection is served any more, and none has left anything behind.
  void check_at_rest() {
    wait_until([&] { return server->stats().streams == 0; });
    CHECK(server->stats().leases == 0);
    pool.check_at_rest();
  }
};

inline void name(Space& space, const Namespace& of) {
  space.id = of.id;
  space.block_bytes = of.block_bytes;
  space.number.store(of.number);
}

inline std::vector<PutStatus> put(Channel& channel, const Space& space,
                                  std::span<const Hash128> keys, bool has_places = true,
                                  const Hash128* parent = nullptr) {
  Payloads source(keys, space.block_bytes, has_places);
  std::vector<PutStatus> statuses(keys.size(), PutStatus::failed);
  channel.put({space, keys, parent, never_hung()}, source, statuses.data());
  return statuses;
}

// Leading blocks delivered; every one of them is compared.
inline std::size_t get(Channel& channel, const Space& space, std::span<const Hash128> keys,
                       Miss& why, bool has_places = true) {
  Arrivals sink(keys, space.block_bytes, has_places);
  const std::size_t count = channel.get(space, keys, sink, why);
  REQUIRE(sink.are_right(count));
  return count;
}
inline std::size_t get(Channel& channel, const Space& space, std::span<const Hash128> keys) {
  Miss why{};
  return get(channel, space, keys, why);
}

inline bool all_are(std::span<const PutStatus> statuses, PutStatus wanted) {
  return std::all_of(statuses.begin(), statuses.end(), [&](PutStatus s) { return s == wanted; });
}

// Frames by hand.
using Bytes = std::vector<std::byte>;

// By hand: g++ 12 takes a vector's insert() of a few bytes for an overflow.
inline void append_bytes(Bytes& to, std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  const std::size_t at = to.size();
  to.resize(at + bytes.size());
  std::memcpy(to.data() + at, bytes.data(), bytes.size());
}

template <typename T>
void append(Bytes& to, const T& value) {
  append_bytes(to, std::as_bytes(std::span(&value, 1)));
}

inline Request request(Op op, std::uint32_t space, std::size_t count, std::uint64_t id = 1) {
  return {.op = op,
          .id = id,
          .space = space,
          .count = static_cast<std::uint32_t>(count),
          .deadline_ms = 60'000};
}

inline Bytes frame(const Request& head, std::span<const Hash128> keys) {
  Bytes made;
  append(made, head);
  for (const Hash128& key : keys) append(made, key);
  return made;
}

inline Block block_head(const Request& head, std::size_t index, const Hash128& key,
                        std::span<const std::byte> payload) {
  const Hash128 sum = checksum(payload.data(), payload.size());
  Block block{.id = head.id,
              .index = static_cast<std::uint32_t>(index),
              .bytes = static_cast<std::uint32_t>(payload.size()),
              .key_low = key.low,
              .key_high = key.high,
              .sum_low = sum.low,
              .sum_high = sum.high};
  block.check = check_of(block);
  return block;
}

inline void append_block(Bytes& to, const Request& head, std::size_t index, const Hash128& key,
                         std::size_t block_bytes) {
  const Bytes payload = payload_of(key, block_bytes);
  append(to, block_head(head, index, key, payload));
  append_bytes(to, payload);
}

inline Bytes put_frame(const Request& head, std::span<const Hash128> keys,
                       std::size_t block_bytes) {
  Bytes made = frame(head, keys);
  for (std::size_t i = head.skip; i < keys.size(); ++i)
    append_block(made, head, i, keys[i], block_bytes);
  return made;
}

// False: the other side is gone.
inline bool send_bytes(const Descriptor& to, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(to.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent < 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(sent));
  }
  return true;
}

// Up to `bytes`, fewer if the other side has closed.
inline Bytes receive_bytes(const Descriptor& from, std::size_t bytes) {
  Bytes got(bytes);
  std::size_t done = 0;
  while (done < bytes) {
    pollfd ready{.fd = from.get(), .events = POLLIN, .revents = 0};
    REQUIRE(poll(&ready, 1, 60'000) == 1);
    const ssize_t more = recv(from.get(), got.data() + done, bytes - done, 0);
    if (more <= 0) break;
    done += static_cast<std::size_t>(more);
  }
  got.resize(done);
  return got;
}

// magic 0: the other side has closed instead.
inline Answer receive_answer(const Descriptor& from) {
  Answer answer{.magic = 0};
  const Bytes got = receive_bytes(from, sizeof answer);
  if (got.size() == sizeof answer) std::memcpy(&answer, got.data(), sizeof answer);
  return answer;
}

inline bool is_closed_by_peer(const Descriptor& end) {
  std::byte rest[4096];
  for (;;) {
    pollfd ready{.fd = end.get(), .events = POLLIN, .revents = 0};
    REQUIRE(poll(&ready, 1, 60'000) == 1);
    if (recv(end.get(), rest, sizeof rest, 0) <= 0) return true;
  }
}

}  // namespace kvpool::test
