// The wire of whoever tells what this node has: over the streams to its peers, or across the room
// to its own shard.
//
// Waits for nobody who is known to be out of reach: the breaker of the peer says so. What goes to
// several members at once is waited for at once.
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
  void send_all(std::span<Parcel> parcels, Deadline deadline) override;
  // While it holds, nothing is sent and nobody is waited for.
  void hold(bool is_held) { held_.store(is_held, std::memory_order_release); }
  WireStats stats() const;

 private:
  struct Letter;
  using Letters = std::vector<std::unique_ptr<Letter>>;
  Sent tell_own(const Batch& batch);
  void begin(Letters& letters, Parcel& parcel, Deadline deadline);
  void begin_busy(Letters& letters, Deadline deadline);
  void end(Letter& letter, bool is_over);
  Sent answered(Refusal refusal, const Batch& batch);
  Sent unreached();

  const MemberView& members_;
  const PeerBook& peers_;
  DirectoryService& own_;
  std::atomic<bool> held_{false};
  std::atomic<std::uint64_t> batches_{0}, keys_{0}, bytes_{0}, unreached_{0}, refused_{0};
};

}  // namespace kvpool
