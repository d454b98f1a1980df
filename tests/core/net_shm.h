// A node with its server, and clients that are attached to it by shared memory.
#pragma once
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "net/server.h"
#include "net/shm_channel.h"
#include "node_cases.h"

namespace kvpool::test {

// What a client needs to attach; its descriptors are open until it did, or this is gone.
struct ShmTicket {
  std::uint64_t client = 0;
  ShmOffer offer;
  int socket = -1;

  Result<std::shared_ptr<ShmClient>> attach() {
    auto made = ShmClient::create(offer, socket);
    offer.descriptors.clear();
    socket = -1;
    return made;
  }
  void close_all() {
    for (const int number : offer.descriptors) ::close(number);
    if (socket >= 0) ::close(socket);
    offer.descriptors.clear();
    socket = -1;
  }
};

struct ShmHost {
  std::shared_ptr<Node> node;
  std::unique_ptr<Server> server;

  static ServerOptions small() {
    ServerOptions options;
    options.lanes = 2;
    options.staging_bytes = 4 * kMiB;
    return options;
  }
  explicit ShmHost(const NodeOptions& node_options, const ServerOptions& options = small()) {
    auto opened = Node::open(node_options, std::make_shared<SystemClock>());
    KVP_CHECK(opened.has_value());
    node = std::move(*opened);
    auto made = Server::create(node, options);
    KVP_CHECK(made.has_value());
    server = std::move(*made);
  }
  ~ShmHost() {
    server->close();
    node->close({});
  }
  Namespace& space(std::uint64_t n, std::uint64_t block_bytes) const {
    auto opened = node->open_namespace(key_of(~n), block_bytes);
    KVP_CHECK(opened.has_value());
    return **opened;
  }
  ShmTicket ticket() const {
    int ends[2];
    KVP_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    ShmTicket ticket;
    ticket.client = server->add_client();
    auto offer = server->make_shm(ticket.client, ends[0]);
    KVP_CHECK(offer.has_value());
    ticket.offer = std::move(*offer);
    ticket.socket = ends[1];
    server->start_shm(ticket.client);
    return ticket;
  }
  std::shared_ptr<ShmClient> client() const {
    auto made = ticket().attach();
    KVP_CHECK(made.has_value());
    return *made;
  }
  std::unique_ptr<ShmChannel> channel(ShmChannelOptions options = {}) const {
    auto made = std::make_unique<ShmChannel>(nullptr, options);
    made->attach(client());
    return made;
  }
  // Nobody holds anything. False: not within the time.
  bool comes_to_rest(std::chrono::milliseconds time) const {
    const auto until = after(time);
    for (;;) {
      const NodeStats stats = node->stats();
      if (stats.reserved == 0 && stats.pinned == 0 && stats.zombies == 0 && stats.held_slots == 0)
        return true;
      if (std::chrono::steady_clock::now() >= until) return false;
      std::this_thread::yield();
    }
  }
};

// As a channel names a namespace of the node beside it.
struct NamedSpace : Space {
  explicit NamedSpace(const Namespace& space) {
    id = space.id;
    block_bytes = space.block_bytes;
    number = space.number;
  }
};

// Payload that lies somewhere as a whole, as a caller's buffer does.
class PlacedSource final : public BlockSource {
 public:
  PlacedSource(std::span<const Hash128> keys, std::size_t block_bytes, std::uint64_t version = 0)
      : block_bytes_(block_bytes), bytes_(keys.size() * block_bytes) {
    for (std::size_t i = 0; i < keys.size(); ++i)
      make_payload(bytes_.data() + i * block_bytes, block_bytes, keys[i], version);
  }
  bool fill(std::size_t, std::byte*, Hash128&) override { return false; }
  const std::byte* place(std::size_t index) const override {
    return bytes_.data() + index * block_bytes_;
  }

 private:
  std::size_t block_bytes_;
  std::vector<std::byte> bytes_;
};

inline std::vector<PutStatus> put_through(Channel& channel, const Space& space,
                                          std::span<const Hash128> keys, BlockSource& source,
                                          const Hash128* parent = nullptr,
                                          Deadline deadline = never_hung()) {
  std::vector<PutStatus> statuses(keys.size(), PutStatus::failed);
  channel.put({space, keys, parent, deadline}, source, statuses.data());
  return statuses;
}
inline std::vector<PutStatus> put_through(Channel& channel, const Space& space,
                                          std::span<const Hash128> keys,
                                          std::uint64_t version = 0) {
  PlacedSource source(keys, space.block_bytes, version);
  return put_through(channel, space, keys, source);
}
inline bool all_are(std::span<const PutStatus> statuses, PutStatus wanted) {
  return std::all_of(statuses.begin(), statuses.end(), [&](PutStatus s) { return s == wanted; });
}
// Leading blocks that came, each with the bytes of its key; `wrong` counts those without.
inline std::size_t get_through(Channel& channel, const Space& space, std::span<const Hash128> keys,
                               std::size_t& wrong, Miss& why, std::uint64_t version = 0) {
  KeySink sink(keys, space.block_bytes, version);
  const std::size_t count = channel.get(space, keys, sink, why);
  wrong += sink.wrong;
  return count;
}

}  // namespace kvpool::test
