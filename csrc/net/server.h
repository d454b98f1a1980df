// The connections of a node: sockets that speak frames, and lanes of shared memory. Threads without
// Python; the handshake was made by whoever hands a connection over.
//
// Every source (a stream, a bell of a lane, the socket of an shm client) is armed for one event;
// the thread that takes the event handles it itself, then arms the source again, so nothing is
// handed over between threads and one source keeps one thread at most. When no thread is left to
// take events one more is started, up to one per source.
//
// Promises:  1. nothing that a connection sends or leaves out keeps another from being served: the
//               worst is that it is closed, with a reason;
//            2. when a connection or client is gone, its leases, pins, reservations and memory are,
//               within 100 ms;
//            3. drain() and close() end by their deadline.
// Thread rule: every method from any thread; they take the server's lock shortly.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "net/channel.h"
#include "net/frame.h"
#include "net/lease_ages.h"

namespace kvpool {

struct ServerOptions {
  std::uint32_t sources_max = 2048;
  std::uint32_t lanes = 4;  // of each shm client
  std::uint64_t staging_bytes = 64ull << 20;
  std::uint64_t pin_bytes = 0;  // that one client may pin; 0 = a quarter of the pool
  // A request of a stream may hold a thread for so long; Op::wait for what it asks.
  std::chrono::milliseconds request_max{30'000};
  // A peer that takes or sends no byte for so long, in the middle of a payload, is closed.
  std::chrono::milliseconds stall_max{5'000};
  // What peers lease to read by themselves ends after so long at the latest.
  std::chrono::milliseconds far_lease_max{10'000};
  // Of payload, over all connections of this server together (net/rate_limit.h); 0 = no limit. What
  // is over it is answered at once with PutStatus::limited or Miss::limited; nobody waits. What shm
  // clients read in place passes no server and cannot be limited.
  std::uint64_t put_bytes_per_s = 0, get_bytes_per_s = 0;
};

struct ServerStats {
  std::uint64_t clients = 0, streams = 0, shm_clients = 0, threads = 0, leases = 0;
  std::uint64_t requests = 0, closed_garbage = 0, closed_late = 0, bytes_in = 0, bytes_out = 0;
  // Of peers: now, all that ever were in bytes, and those that ended because they took too long.
  std::uint64_t far_leases = 0, far_lent_bytes = 0, far_expired = 0;
  std::string last_closed;  // why the last connection was closed that broke the protocol
};

struct ClientStats {
  std::uint64_t number = 0;
  std::uint64_t requests = 0, bytes_in = 0, bytes_out = 0;  // through its streams and lanes
  std::uint64_t leases = 0, leased_bytes = 0;
  bool has_shm = false;
  ClientTotals reads;  // through all channels
};

// What the other side of an shm attachment needs; the descriptors are the receiver's to close.
struct ShmOffer {
  std::vector<int> descriptors;  // arena and index (read-only), control, staging, one bell per lane
  std::uint32_t lanes = 0;
  std::uint64_t staging_bytes = 0, arena_bytes = 0, index_bytes = 0, pin_bytes = 0;
};

class DirectoryService;

// Who is at the other end: what it may ask follows from that.
enum class StreamKind : std::uint8_t { client, peer };

class Server {
 public:
  static Result<std::unique_ptr<Server>> create(std::shared_ptr<Node> node,
                                                const ServerOptions& options);
  ~Server();  // close()
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  std::uint64_t add_client();
  void drop_client(std::uint64_t client);  // closes all its connections
  // Both take the descriptor over, also when they fail. It speaks frames / is watched for its end.
  // `peer`: which member, in which life, is at the other end; it may tell in no other name, and
  // without one it may only ask.
  Result<void> add_stream(std::uint64_t client, int descriptor,
                          StreamKind kind = StreamKind::client, const HolderName& peer = {});
  Result<ShmOffer> make_shm(std::uint64_t client, int descriptor);
  // After the offer was sent.
  void start_shm(std::uint64_t client);

  // What peers are answered from; nullptr: they are refused. Requests under way keep the one that
  // they began with.
  void set_directory(std::shared_ptr<DirectoryService> directory);

  ServerStats stats() const;
  // Ends leases of peers that are too old by then; to be called about once a second.
  void expire_far_leases(Deadline now);
  // Those that there are now, by number. Takes about a microsecond for each.
  std::vector<ClientStats> clients() const;
  // How many leases are younger than 1, 10, 60, 600 s, and older.
  LeaseAges::Counts lease_ages() const;
  void set_rates(std::uint64_t put_bytes_per_s, std::uint64_t get_bytes_per_s);
  // Connections and lanes now, of all clients and of one.
  std::size_t sources() const;
  std::size_t sources_of(std::uint64_t client) const;
  // Requests under way are ended, new ones refused. False: some were not done by the deadline.
  bool drain(Deadline deadline);
  void close();

 private:
  struct Impl;
  explicit Server(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvpool
