// How a batch of what a node has, or has no more, gets to the member that keeps the entries.
//
// Thread rule: one thread at a time calls send().
#pragma once
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "cluster/directory_key.h"
#include "cluster/owner_table.h"
#include "net/frame.h"

namespace kvpool {

// A member as this process numbers it: the same for as long as the process lives, whatever
// incarnations the member has and however often it comes back.
using MemberHandle = std::uint16_t;

// Who owns which slots, as one view of the members has it.
struct OwnerView {
  std::shared_ptr<const OwnerTable> table;
  // By voter of the table: as whom it is reached, and which life of it this is. One that began
  // another life has forgotten what it was told.
  std::vector<MemberHandle> handles;
  std::vector<std::uint64_t> incarnations;
  std::optional<MemberHandle> self;  // this node, if it is a member
};

struct Batch {
  Announcement from;
  bool is_withdraw = false;
  bool is_fresh = false;               // a publish, perhaps of no keys: kFresh
  std::span<const DirectoryKey> keys;  // at most kKeysPerBatch
};
inline constexpr std::size_t kKeysPerBatch = 4096;

enum class Sent : std::uint8_t {
  ok,
  retry,  // no answer, or not now: the same batch is sent again, after a pause
  busy,   // nothing was sent, since others use all that leads there: as soon as may be
  gap,    // Refusal::gap, ::not_here: all is to be told anew
  gone,   // there is no such member any more, or it knows of a later life of this node
};

class Wire {
 public:
  using Deadline = std::chrono::steady_clock::time_point;
  virtual ~Wire() = default;
  // Returns by the deadline. A member that is known to be out of reach costs no time: retry.
  virtual Sent send(MemberHandle to, const Batch& batch, Deadline deadline) = 0;
  // To as many members, all at once where the wire can: one that hangs takes no time from others.
  struct Parcel {
    MemberHandle to;
    Batch batch;
    Sent sent = Sent::retry;  // what became of it
  };
  virtual void send_all(std::span<Parcel> parcels, Deadline deadline) {
    for (Parcel& each : parcels) each.sent = send(each.to, each.batch, deadline);
  }
};

}  // namespace kvpool
