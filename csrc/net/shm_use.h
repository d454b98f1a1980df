// What the parts of an shm channel share; for its own files only.
#pragma once
#include "net/shm_channel.h"

namespace kvpool {

// One call's use of an attachment. The number and the incarnation are of that attachment's node.
struct ShmUse {
  std::shared_ptr<ShmClient> client;
  const Space& space;
  Deadline deadline;
  std::uint32_t number = 0;
  std::uint32_t incarnation = 0;  // 0: there is no such namespace

  explicit operator bool() const { return client != nullptr; }
  const IndexReader& reader() const { return client->reader(); }
  bool find(const Hash128& key, Found& found) const {
    return incarnation != 0 && reader().find(key, incarnation, found);
  }
};

// What the node is told of a call that was carried out here (node/client_page.h). `asked`: blocks,
// without those that a request asked the node for, which it counts itself; so is `loaded`.
// `is_first`: the first block that is missing is among them, and not one of a request's.
struct Share {
  std::size_t asked = 0, loaded = 0;
  Miss why = Miss::none;
  bool is_first = true;
};
void count_lookup(const ShmUse& use, std::size_t asked, const Looked& looked);
void count_get(const ShmUse& use, const Share& share);
void count_view(const ShmUse& use, const Share& share);

// Tail first, as Node does: of a chain used at one moment the head then counts as the latest use.
void report_touches(ShmClient& client, std::span<const Found> found);

// A block held in place by a hazard word while it is copied.
class HazardPin {
 public:
  explicit HazardPin(ShmClient& client) : client_(client) {
    has_word_ = client.hazards().claim(1, &word_) == 1;
  }
  ~HazardPin() {
    if (has_word_) client_.hazards().release({&word_, 1});
  }
  HazardPin(const HazardPin&) = delete;
  HazardPin& operator=(const HazardPin&) = delete;
  // True: it stays as it was found.
  bool hold(const Found& found) {
    if (!has_word_) return false;
    client_.hazards().name(word_, found.offset);
    ClientHazards::settle();
    return client_.reader().still_there(found);
  }

 private:
  ShmClient& client_;
  ClientHazards::Word word_ = 0;
  bool has_word_ = false;
};

struct LaneGot {
  std::size_t delivered = 0;
  std::size_t asked = 0;  // of the node: it counts them, whatever becomes of its answer
  Miss why = Miss::none;  // of the first that was not delivered
};
// Delivers leading blocks that cannot be read in place; `index`: of the first in the call.
LaneGot get_by_lane(ShmUse& use, std::span<const Hash128> keys, std::size_t index, BlockSink& sink);

}  // namespace kvpool
