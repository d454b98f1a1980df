// Which member keeps which slots of the directory: weighted rendezvous hashing, once a view.
//
// Promises:  1. the same voters give the same table, whatever the machine or the compiler: scores
//               are integers (fingerprint() is compared between members);
//            2. a member that comes or goes moves only the slots that it gains or loses;
//            3. each has slots in proportion to its weight, up to the noise of 65,536 draws.
// A table never changes: any thread may read it. build() takes about 0.5 ms for each member.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "block/key.h"
#include "cluster/directory_key.h"

namespace kvpool {

inline constexpr std::uint32_t kMembersMax = 4095;  // a holder is 12 bits of an entry, 0 is nobody
inline constexpr std::uint32_t kWeightMax = 256;

struct Voter {
  Hash128 id;                // of the node
  std::uint32_t weight = 1;  // 0: keeps no slots; at most kWeightMax
};

class OwnerTable {
 public:
  static constexpr std::uint16_t kNobody = 0xffff;

  OwnerTable() = default;  // of nobody
  // At most kMembersMax, each id once.
  static OwnerTable build(std::span<const Voter> voters);

  // Index into voters(), or kNobody where nobody has a weight.
  std::uint16_t owner(std::uint32_t slot) const {
    return owners_.empty() ? kNobody : owners_[slot];
  }
  std::uint16_t owner_of(const DirectoryKey& key) const { return owner(slot_of(key)); }
  const std::vector<Voter>& voters() const { return voters_; }  // by id
  std::uint16_t index_of(const Hash128& id) const;              // kNobody: it is none of them
  SlotSet slots_of(std::uint16_t voter) const;
  std::uint64_t fingerprint() const { return fingerprint_; }

 private:
  std::vector<Voter> voters_;
  std::vector<std::uint16_t> owners_;
  std::uint64_t fingerprint_ = 0;
};

// Slots whose owner is another member in `now` than in `before`, or somebody where nobody was.
SlotSet moved(const OwnerTable& before, const OwnerTable& now);

}  // namespace kvpool
