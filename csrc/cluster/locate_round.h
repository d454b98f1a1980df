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
#include "net/directory_service.h"

namespace kvpool {

// Of one key; kNoMember from the first free place on.
using Holders = std::array<MemberHandle, kHoldersPerKey>;
inline constexpr Holders kNoHolders{kNoMember, kNoMember, kNoMember, kNoMember};

struct Whereabouts {
  Holders holders = kNoHolders;
  bool is_known = false;  // its owner has answered
};

class LocateRound {
 public:
  // `own`: this node's shard, asked in place; nullptr: it has none.
  LocateRound(const MemberView::Snapshot& members, const PeerBook& peers, DirectoryService* own)
      : members_(members), peers_(peers), own_(own) {}

  // One per key. Miss::none: every owner has answered; else why one has not.
  Miss run(std::span<const DirectoryKey> keys, Deadline deadline, std::span<Whereabouts> answers);

 private:
  struct Question;
  using Questions = std::vector<std::unique_ptr<Question>>;
  Questions questions_for(std::span<const DirectoryKey> keys, Miss& why) const;
  static void ask(Question& question, Deadline deadline, Miss& why);
  static void ask_busy(const Questions& questions, Deadline deadline, Miss& why);
  void hear(const Questions& questions, Deadline deadline, std::span<Whereabouts> answers,
            Miss& why);
  void end(Question& question, bool is_whole, std::span<Whereabouts> answers, Miss& why) const;
  bool use(const Question& question, std::span<Whereabouts> answers) const;
  void ask_own(const Question& question, std::span<Whereabouts> answers);
  MemberHandle holder_of(const HolderName& name) const;

  const MemberView::Snapshot& members_;
  const PeerBook& peers_;
  DirectoryService* const own_;
};

}  // namespace kvpool
