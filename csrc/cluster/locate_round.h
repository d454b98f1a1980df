// One round of questions to the owners of some directory keys, all at once: who holds them?
//
// What has not been answered by the deadline is not known; the rest is. The calling thread polls.
// An answer is a hint: holders may have lost the block since.
#pragma once
#include <array>
#include <memory>
#include <span>
#include <vector>

#include "cluster/peer_book.h"

namespace kvpool {

class DirectoryService;

inline constexpr std::size_t kHoldersMax = 4;

// Of one key; kNoMember from the first free place on.
using Holders = std::array<MemberHandle, kHoldersMax>;
inline constexpr Holders kNoHolders{kNoMember, kNoMember, kNoMember, kNoMember};

struct Located {
  Holders holders = kNoHolders;
  bool is_known = false;  // its owner has answered
};

class LocateRound {
 public:
  // `own`: this node's shard, asked in place; nullptr: it has none.
  LocateRound(const MemberView::Snapshot& members, const PeerBook& peers, DirectoryService* own)
      : members_(members), peers_(peers), own_(own) {}

  // One per key. Miss::none: every owner has answered; else why one has not.
  Miss run(std::span<const DirectoryKey> keys, Deadline deadline, std::span<Located> answers);

 private:
  struct Question;
  void ask_own(std::span<const DirectoryKey> keys, std::span<const std::uint32_t> which,
               std::span<Located> answers);
  MemberHandle handle_of(const Hash128& id) const;

  const MemberView::Snapshot& members_;
  const PeerBook& peers_;
  DirectoryService* const own_;
};

}  // namespace kvpool
