// The node's side of one stream: takes requests in their order, answers each before the next.
//
// A request's head and keys are gathered across turns, so a peer that sends half of them holds
// memory of at most one request, not a thread. Payload is moved within the turn, between socket and
// slot, by the patience of the request (net/socket_io.h).
// Promises:  1. every field is checked before it is used; what does not fit closes the stream, with
//               the reason in ServerBooks;
//            2. a block is committed only if its bytes are those the sender's checksum was made of;
//            3. closed, whatever the reason: nothing of it is pinned or reserved, and what it has
//               leased as a peer is given back.
// Thread rule: a Source (net/source.h).
#pragma once
#include <memory>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include "net/directory_service.h"
#include "net/frame.h"
#include "net/server.h"
#include "net/socket_io.h"
#include "net/source.h"

namespace kvpool {

class StreamServe final : public Source {
 public:
  struct Host {
    Node& node;
    const ServerOptions& options;
    ServerBooks& books;
    std::shared_ptr<ClientBooks> client;
    const DirectoryDoor& directory;
    Leases& far;  // of all peers
    StreamKind kind;
    HolderName peer;  // of a peer: in whose name alone it may tell
  };
  StreamServe(Descriptor socket, bool is_unix, Host host);
  ~StreamServe() override;

  int descriptor() const override { return socket_.get(); }
  Outcome on_ready(std::uint32_t events) override;
  void interrupt() override;
  void on_closed() override;

 private:
  struct Call {
    Request head;
    Namespace* space = nullptr;  // nullptr: there is none of that number
    std::span<const Hash128> keys;
    const Hash128* parent = nullptr;
    bool is_here_only = false;  // lookup, get: no other node is asked
    Announcement from;          // publish, withdraw
    PullHead pull;              // pull
    Patience patience;
  };
  class CopySender;
  class Delivery;
  class PayloadReceiver;
  struct Reply {
    std::size_t count = 0;
    Miss why = Miss::none;
    Refusal refusal = Refusal::none;
    std::span<const std::byte> body{};
    MemberLoad load{};
  };

  // All that answer bool: false = this stream is to be closed.
  bool serve_gathered();
  bool check(const Request& head);
  bool serve(const Request& head, const std::byte* keys);
  bool dispatch(const Call& call);
  Refusal refusal_of(const Call& call) const;
  static Reach reach_of(const Call& call);
  bool lookup(const Call& call);
  bool get(const Call& call);
  bool put(const Call& call);
  bool wait(const Call& call);
  bool acquire(const Call& call);
  bool release(const Call& call);

  // Of peers; stream_serve_peer.cc.
  bool serve_peer(const Call& call);
  bool find_spaces(const Call& call);
  bool tell(const Call& call, DirectoryService& directory);
  bool locate(const Call& call, DirectoryService& directory);
  bool pull(const Call& call, DirectoryService& directory);
  // stream_serve_far.cc
  bool lease_far(const Call& call);
  std::vector<FarPlace> lend(const Call& call, Miss& why);
  bool take_back(const Call& call);
  void take_all_back();

  static Answer answer_head(const Call& call, const Reply& reply);
  bool answer(const Call& call, const Reply& reply);
  bool send(std::span<iovec> pieces, const Patience& patience);
  bool ended(Io how, const char* doing);
  void count_in(std::uint64_t bytes) {
    host_.books.bytes_in.fetch_add(bytes, std::memory_order_relaxed);
    host_.client->bytes_in.fetch_add(bytes, std::memory_order_relaxed);
  }
  bool garbage(const std::string& what);

  // The bytes that were read and not used yet.
  std::size_t gathered() const { return end_ - begin_; }
  ssize_t gather();
  void forget_room();
  std::size_t take_gathered(std::byte* to, std::uint64_t bytes);
  std::size_t skip_gathered(std::uint64_t bytes);

  const Descriptor socket_;
  const bool is_unix_;
  const Host host_;
  std::vector<std::byte> buffer_;
  std::size_t begin_ = 0, end_ = 0;
  std::size_t wanted_ = sizeof(Request);  // bytes of the request that is being gathered
  std::vector<Hash128> keys_;
  std::unordered_set<std::uint64_t> lent_;  // numbers of leases; of a peer
};

}  // namespace kvpool
