// An shm client as its node sees it: the memory they share, one source per lane and one for the
// client's end.
//
// Promises:  1. when the client is gone, nothing of it is pinned any more at once, and no lane
//               works for it after 100 ms;
//            2. whatever the client writes into what it was given harms its own requests only.
// Thread rule: create() and sources() by one thread; the rest is the sources'.
#pragma once
#include <deque>
#include <memory>
#include <vector>

#include "net/lane_serve.h"
#include "net/server.h"
#include "net/shared_memory.h"
#include "net/source.h"

namespace kvpool {

class ShmAttachment : public std::enable_shared_from_this<ShmAttachment> {
 public:
  // `offer`: with descriptors that are the receiver's.
  static Result<std::shared_ptr<ShmAttachment>> create(std::shared_ptr<Node> node,
                                                       const ServerOptions& options,
                                                       Descriptor socket, ServerBooks& books,
                                                       ShmOffer& offer);
  ~ShmAttachment();
  ShmAttachment(const ShmAttachment&) = delete;
  ShmAttachment& operator=(const ShmAttachment&) = delete;

  // What the client has read by itself. Nothing any more once it has ended.
  ClientTotals totals() const;
  // Once. They keep this alive.
  std::vector<std::shared_ptr<Source>> sources(std::shared_ptr<ClientBooks> client);

 private:
  class Bell;
  class End;

  ShmAttachment(std::shared_ptr<Node> node, const ServerOptions& options, Descriptor socket,
                ServerBooks& books);
  Result<void> make(const ServerOptions& options);
  Result<void> describe(const ServerOptions& options, ShmOffer& offer) const;
  ClientPage& page() const { return *reinterpret_cast<ClientPage*>(control_.base() + kPageOffset); }
  void end();     // no lane works any more
  void let_go();  // what the client pinned

  const std::shared_ptr<Node> node_;
  ServerBooks& books_;
  Descriptor socket_;
  SharedMemory control_, staging_;
  std::vector<Descriptor> bells_;
  std::shared_ptr<ClientBooks> client_;  // from sources() on
  LaneHost host_;
  std::deque<LaneServe> lanes_;
  std::atomic<bool> is_attached_{false};
};

}  // namespace kvpool
