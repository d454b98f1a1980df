#include "cluster/peer_book.h"

#include <algorithm>
#include <mutex>
#include <utility>

namespace kvpool {

void PeerBook::set_members(const MemberView::Snapshot& members) {
  std::vector<Entry> next;
  std::vector<std::shared_ptr<Peer>> fresh;
  const std::unique_lock lock(mutex_);
  if (closed_) return;
  for (const MemberView::Member& member : members.members) {
    if (member.handle == members.self) continue;
    if (next.size() <= member.handle) next.resize(member.handle + 1);
    const bool is_known = member.handle < peers_.size() && peers_[member.handle].peer != nullptr &&
                          peers_[member.handle].peer->id() == member.info.id &&
                          peers_[member.handle].incarnation == member.info.incarnation;
    Entry& entry = next[member.handle];
    if (is_known) {
      entry = peers_[member.handle];
      continue;
    }
    entry = {
        .incarnation = member.info.incarnation,
        .peer = std::make_shared<Peer>(member.handle, member.info.id, options_, wanted_, reads_)};
    fresh.push_back(entry.peer);
  }
  next.swap(peers_);
  for (const Entry& gone : next) {
    const bool stays = gone.peer == nullptr || (gone.peer->member() < peers_.size() &&
                                                peers_[gone.peer->member()].peer == gone.peer);
    if (!stays) gone.peer->close();
  }
  for (const auto& peer : fresh)
    wanted_->want({.member = peer->member(), .id = peer->id(), .count = 1});
}

void PeerBook::set_reads(FarReads reads) {
  const std::unique_lock lock(mutex_);
  if (!closed_) std::swap(reads_, reads);  // what was before ends behind the lock
}

std::shared_ptr<Peer> PeerBook::of(MemberHandle member) const {
  const std::shared_lock lock(mutex_);
  return member < peers_.size() ? peers_[member].peer : nullptr;
}

std::shared_ptr<Peer> PeerBook::of(const Hash128& id) const {
  for (const auto& peer : all())
    if (peer->id() == id) return peer;
  return nullptr;
}

std::vector<std::shared_ptr<Peer>> PeerBook::all() const {
  std::vector<std::shared_ptr<Peer>> peers;
  const std::shared_lock lock(mutex_);
  for (const Entry& entry : peers_)
    if (entry.peer != nullptr) peers.push_back(entry.peer);
  return peers;
}

std::vector<PeerStats> PeerBook::stats() const {
  std::vector<PeerStats> stats;
  for (const auto& peer : all()) stats.push_back(peer->stats());
  return stats;
}

void PeerBook::close() {
  wanted_->close();
  for (const auto& peer : all()) peer->close();
  FarReads over;  // ends behind the lock
  const std::unique_lock lock(mutex_);
  closed_ = true;
  std::swap(reads_, over);
}

}  // namespace kvpool
