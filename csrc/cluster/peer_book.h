// The peers of this node, by member. One that is a member no more is closed.
//
// Thread rule: every method from any thread.
#pragma once
#include <memory>
#include <shared_mutex>
#include <vector>

#include "cluster/peer.h"
#include "cluster/wanted_streams.h"

namespace kvpool {

class PeerBook {
 public:
  explicit PeerBook(const PeerOptions& options = {})
      : options_(options), wanted_(std::make_shared<WantedStreams>()) {}
  ~PeerBook() { close(); }
  PeerBook(const PeerBook&) = delete;
  PeerBook& operator=(const PeerBook&) = delete;

  // For peers that are made from then on: blocks may be read out of their arenas.
  void set_reads(FarReads reads);
  // A peer for every other member; those of another incarnation begin anew. Wants a first stream
  // for each that is new.
  void set_members(const MemberView::Snapshot& members);
  // nullptr: no member (any more), or this node itself.
  std::shared_ptr<Peer> of(MemberHandle member) const;
  std::shared_ptr<Peer> of(const Hash128& id) const;
  std::vector<std::shared_ptr<Peer>> all() const;
  WantedStreams& wanted() { return *wanted_; }
  std::vector<PeerStats> stats() const;
  void close();

 private:
  struct Entry {
    std::uint64_t incarnation = 0;
    std::shared_ptr<Peer> peer;
  };
  const PeerOptions options_;
  const std::shared_ptr<WantedStreams> wanted_;
  mutable std::shared_mutex mutex_;  // guards all below
  std::vector<Entry> peers_;         // by handle
  FarReads reads_;
  bool closed_ = false;
};

}  // namespace kvpool
