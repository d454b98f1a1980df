// The wire of whoever tells what this node has: over the streams to its peers, or across the room
// to its own shard.
//
// Waits for nobody who is known to be out of reach: the breaker of the peer says so.
// Thread rule: as Wire; hold() and stats() from any thread.
#pragma once
#include <atomic>

#include "cluster/member_view.h"
#include "cluster/peer_book.h"
#include "cluster/wire.h"
#include "net/directory_service.h"

namespace kvpool {

struct WireStats {
  std::uint64_t batches = 0, keys = 0, bytes = 0;  // that other members have answered
  std::uint64_t unreached = 0, refused = 0;        // batches
};

class PeerWire final : public Wire {
 public:
  // All outlive this.
  PeerWire(const MemberView& members, const PeerBook& peers, DirectoryService& own)
      : members_(members), peers_(peers), own_(own) {}

  Sent send(MemberHandle to, const Batch& batch, Deadline deadline) override;
  // While it holds, nothing is sent and nobody is waited for.
  void hold(bool is_held) { held_.store(is_held, std::memory_order_release); }
  WireStats stats() const;

 private:
  Sent tell_own(const Batch& batch);
  Sent tell(Peer& peer, const Batch& batch, Deadline deadline);
  Sent unreached();

  const MemberView& members_;
  const PeerBook& peers_;
  DirectoryService& own_;
  std::atomic<bool> held_{false};
  std::atomic<std::uint64_t> batches_{0}, keys_{0}, bytes_{0}, unreached_{0}, refused_{0};
};

}  // namespace kvpool
