// This node's part of the directory, as other members and the node itself tell it and ask it.
//
// Each member tells in batches that it numbers. Promises:
//   1. a batch of a life that is over, or that came before, changes nothing;
//   2. where batches are missing nothing is taken on trust: the sender is asked to tell all anew,
//      which begins with kFresh and makes what it told before void, at once;
//   3. so what is kept of a member is what it told, but for what was evicted, crowded or kept by
//      nobody because the table is full.
// Thread rule: any thread. Batches of one member are carried out one at a time, those of different
// members beside each other.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "cluster/directory.h"
#include "cluster/owner_table.h"
#include "net/directory_service.h"

namespace kvpool {

struct ShardStats {
  DirectoryStats directory;
  std::uint64_t members = 0;
  std::uint64_t published = 0, withdrawn = 0, located = 0;  // keys
  std::uint64_t batches = 0, repeated = 0, gaps = 0, stale = 0, refused_full = 0;
};

class DirectoryShard final : public DirectoryService {
 public:
  explicit DirectoryShard(const DirectoryOptions& options);

  Told publish(const Announcement& from, std::span<const Hash128> keys, bool is_fresh) override;
  Told withdraw(const Announcement& from, std::span<const Hash128> keys) override;
  void locate(std::span<const Hash128> keys, Located& found) override;

  // A view of the members: who left, or began another life, holds nothing. Who is not in the view
  // but has told something is perhaps ahead of it, and stays until the next one.
  void set_members(std::span<const HolderName> members);
  // Of slots that this node does not own any more.
  void forget_slots(const SlotSet& slots) { directory_.forget_slots(slots); }
  // Background work, to be called now and then. False: nothing is left to do.
  bool sweep() { return directory_.sweep(kPartsPerSweep); }
  ShardStats stats() const;

 private:
  static constexpr std::size_t kPartsPerSweep = 16;
  struct Member {
    std::mutex mutex;  // held while a batch of it is carried out; guards the fields below
    std::uint64_t incarnation = 0;
    std::uint64_t sequence = 0;
    Holder holder;                // number 0: none
    bool is_gone = false;         // and out of members_, by now
    bool has_met_a_view = false;  // guarded by mutex_, below
  };
  using MemberPtr = std::shared_ptr<Member>;
  struct IdHash {
    std::size_t operator()(const Hash128& id) const { return id.low; }
  };

  Told tell(const Announcement& from, std::span<const Hash128> keys, bool is_fresh,
            bool is_withdraw);
  Told admit(Member& member, const Announcement& from, bool is_fresh, bool& is_new);
  Told begin_anew(Member& member, const Announcement& from);
  MemberPtr member_of(const Announcement& from, bool may_make);
  void end_life(Member& member);

  Directory directory_;
  // Guards the fields below. Whoever holds a member's may take this one, not the other way round.
  mutable std::mutex mutex_;
  std::unordered_map<Hash128, MemberPtr, IdHash> members_;
  std::vector<HolderName> names_;  // by number of the holder
  std::atomic<std::uint64_t> published_{0}, withdrawn_{0}, located_{0}, batches_{0}, repeated_{0},
      gaps_{0}, stale_{0}, refused_full_{0};
};

}  // namespace kvpool
