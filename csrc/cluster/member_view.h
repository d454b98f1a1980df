// Who the members of the cluster are, as this node was told last: immutable snapshots, swapped
// whole.
//
// Promises:  1. a member keeps its handle for as long as this process lives, gone and back again or
//               not; only when kHandlesMax have been given does one that is gone lose its own;
//            2. a snapshot never changes.
// Thread rule: every method from any thread.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "block/key.h"
#include "cluster/directory_key.h"
#include "cluster/owner_table.h"
#include "cluster/wire.h"

namespace kvpool {

inline constexpr MemberHandle kNoMember = static_cast<MemberHandle>(~0u);

enum class MemberState : std::uint8_t {
  up,
  draining,  // it leaves: still a holder, owner of nothing
};

struct MemberInfo {
  Hash128 id;
  std::uint64_t incarnation = 0;
  std::uint32_t weight = 1;
  std::vector<std::string> addresses;
  MemberState state = MemberState::up;
  bool is_self = false;
};

class MemberView {
 public:
  struct Member {
    MemberHandle handle = kNoMember;
    MemberInfo info;
  };
  struct Snapshot {
    std::uint64_t version = 0;    // counts set()
    std::vector<Member> members;  // by id
    OwnerView owners;             // of those that are up
    MemberHandle self = kNoMember;
    std::vector<std::uint32_t> at;  // by handle: place in `members`, or more than there are

    // nullptr: not a member (now).
    const Member* by_id(const Hash128& id) const;
    const Member* by_handle(MemberHandle handle) const;
    // kNoMember: there is nobody.
    MemberHandle owner_of(const DirectoryKey& key) const;
  };

  MemberView();
  // Refused, and everything as before: too many, one id twice, a weight of 0, more than one self.
  Result<void> set(std::vector<MemberInfo> members);
  std::shared_ptr<const Snapshot> now() const;

 private:
  struct IdHash {
    std::size_t operator()(const Hash128& id) const { return id.low ^ id.high; }
  };
  using Handles = std::unordered_map<Hash128, MemberHandle, IdHash>;
  static constexpr std::size_t kHandlesMax = 4 * kMembersMax;
  MemberHandle handle_of(const Hash128& id, const std::vector<MemberInfo>& members);

  std::mutex setting_;  // one set() at a time; guards the two below
  Handles handles_;
  std::vector<Hash128> ids_;  // by handle
  mutable std::mutex mutex_;  // guards now_
  std::shared_ptr<const Snapshot> now_;
};

}  // namespace kvpool
