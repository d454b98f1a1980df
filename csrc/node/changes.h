// Which blocks came to this node, and which left it, for whoever tells others: the directory of a
// cluster.
//
// A block comes when it becomes readable in any tier and goes when it is in none. What the node had
// before somebody listened is no change: a walk over it tells (node/resident_walk.h).
// Promises:  1. changes of one key come in their order;
//            2. memory is bounded: what does not fit is not noted, and is_lost() says so. Then, and
//               when a namespace was dropped, only a walk tells what is here.
// Thread rule: the node's lock.
#pragma once
#include <cstddef>
#include <utility>
#include <vector>

#include "node/namespaces.h"

namespace kvpool {

struct Change {
  const Namespace* space = nullptr;  // as long-lived as the node
  Hash128 key;
  bool came = false;
};

class Changes {
 public:
  explicit Changes(std::size_t changes_max) : max_(changes_max) { noted_.reserve(changes_max); }

  void note(const Namespace& space, const Hash128& key, bool came) {
    if (noted_.size() < max_)
      noted_.push_back({&space, key, came});
    else
      is_lost_ = true;
  }
  // Said again, for somebody who thinks otherwise. Only where there is plenty of room, so that who
  // asks for it often makes nothing else get lost.
  void repeat_gone(const Namespace& space, const Hash128& key) {
    if (noted_.size() <= max_ / kRepeatsShare) noted_.push_back({&space, key, false});
  }
  // More changed at once than is worth naming one by one.
  void lose() { is_lost_ = true; }

  // Into `taken`, whose memory is used for what comes next. False: some were lost.
  bool take(std::vector<Change>& taken) {
    taken.clear();
    taken.reserve(max_);  // no memory is asked for while blocks are noted
    noted_.swap(taken);
    return !std::exchange(is_lost_, false);
  }

 private:
  static constexpr std::size_t kRepeatsShare = 64;
  const std::size_t max_;
  std::vector<Change> noted_;
  bool is_lost_ = false;
};

}  // namespace kvpool
