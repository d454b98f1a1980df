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

// Delivers leading blocks that cannot be read in place; `index`: of the first in the call.
std::size_t get_by_lane(ShmUse& use, std::span<const Hash128> keys, std::size_t index,
                        BlockSink& sink, Miss& why);

}  // namespace kvpool
