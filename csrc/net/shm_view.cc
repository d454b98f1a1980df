// Reading in place: pinned by hazard words, without asking; beyond them, by request.
#include <algorithm>
#include <vector>

#include "net/shm_use.h"

namespace kvpool {
namespace {

constexpr std::size_t kBatch = 64;
constexpr int kMovedTries = 3;  // in a row, of a block that leaves or moves whenever it is named

class ShmPins final : public Pins {
 public:
  explicit ShmPins(std::shared_ptr<ShmClient> client) : client_(std::move(client)) {
    base = client_->arena();
    base_bytes = client_->arena_bytes();
  }
  ~ShmPins() override {
    if (client_->is_forked()) {
      (void)leases_.release();  // the parent's
      return;
    }
    client_->hazards().release(words_);
    client_->unpinned(bytes_);
  }
  // Pins leading blocks; `why` it were not all: none = look again.
  std::size_t add(const ShmUse& use, std::span<const Hash128> keys, Miss& why);

  // Those that a lease of the node can show: on the SSD, or more than there are words for. How many
  // it was asked for.
  std::size_t add_leases(const ShmUse& use, std::span<const Hash128> keys, Channel& stream,
                         Miss& why);

  std::vector<Found> found;  // what is pinned by name, for the touches

 private:
  std::size_t find(const ShmUse& use, std::span<const Hash128> keys, Found* leading,
                   Miss& why) const;
  const std::shared_ptr<ShmClient> client_;
  std::vector<ClientHazards::Word> words_;
  std::unique_ptr<Pins> leases_;
  std::uint64_t bytes_ = 0;
};

std::size_t ShmPins::find(const ShmUse& use, std::span<const Hash128> keys, Found* leading,
                          Miss& why) const {
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (i % IndexReader::kGroup == 0 && keys.size() > 1)
      use.reader().prefetch(keys.subspan(i, std::min(IndexReader::kGroup, keys.size() - i)),
                            use.incarnation);
    why = Miss::absent;
    if (!use.find(keys[i], leading[i]) || leading[i].bytes != use.space.block_bytes) return i;
    why = Miss::no_room;  // in DRAM, where alone it could be shown
    if ((leading[i].tier & kTierDram) == 0) return i;
  }
  why = Miss::none;
  return keys.size();
}

std::size_t ShmPins::add(const ShmUse& use, std::span<const Hash128> keys, Miss& why) {
  Found leading[kBatch];
  ClientHazards::Word words[kBatch];
  const std::size_t there = find(use, keys.first(std::min(kBatch, keys.size())), leading, why);
  const std::uint64_t bytes = SlabPool::slot_bytes(use.space.block_bytes);  // as the node counts
  std::size_t may = 0;
  while (may < there && client_->may_pin(bytes)) ++may;
  const std::size_t claimed = client_->hazards().claim(may, words);
  if (claimed < there) why = Miss::pin_limit;

  for (std::size_t i = 0; i < claimed; ++i) client_->hazards().name(words[i], leading[i].offset);
  if (claimed > 0) ClientHazards::settle();
  std::size_t held = 0;
  while (held < claimed && use.reader().still_there(leading[held])) ++held;
  if (held < claimed) why = Miss::moved;

  client_->hazards().release({words + held, claimed - held});
  client_->unpinned((may - held) * bytes);
  words_.insert(words_.end(), words, words + held);
  found.insert(found.end(), leading, leading + held);
  bytes_ += held * bytes;
  for (std::size_t i = 0; i < held; ++i) places.push_back({leading[i].offset, leading[i].bytes});
  return held;
}

std::size_t ShmPins::add_leases(const ShmUse& use, std::span<const Hash128> keys, Channel& stream,
                                Miss& why) {
  const std::uint64_t bytes = SlabPool::slot_bytes(use.space.block_bytes);  // as the node counts
  std::size_t may = 0;
  while (may < keys.size() && client_->may_pin(bytes)) ++may;
  if (may > 0) leases_ = stream.acquire(use.space, keys.first(may), why);
  // They lie in this node's arena; or there is another node by now: then this one's end is seen.
  std::size_t got = 0;
  if (leases_ && client_->look()) why = Miss::disconnected;
  if (leases_ && why != Miss::disconnected)
    for (const Place& place : leases_->places) {
      if (place.offset > base_bytes || place.bytes > base_bytes - place.offset) break;
      places.push_back(place);
      ++got;
    }
  if (got == may && may < keys.size()) why = Miss::pin_limit;
  client_->unpinned((may - got) * bytes);
  bytes_ += got * bytes;
  return may;
}

}  // namespace

std::unique_ptr<Pins> ShmChannel::acquire(const Space& space, std::span<const Hash128> keys,
                                          Miss& why) {
  const ShmUse use = this->use(space, call_deadline());
  why = Miss::disconnected;
  if (!use) return std::make_unique<Pins>();
  auto pins = std::make_unique<ShmPins>(use.client);
  pins->places.reserve(keys.size());
  std::size_t done = 0;
  for (int tries = kMovedTries; done < keys.size() && tries > 0;) {
    const std::size_t more = pins->add(use, keys.subspan(done), why);
    done += more;
    if (why == Miss::moved)
      tries = more > 0 ? kMovedTries : tries - 1;
    else if (why != Miss::none)
      break;
  }
  if (done == keys.size()) why = Miss::none;
  report_touches(*use.client, pins->found);
  std::size_t by_node = 0;
  const bool is_here = why != Miss::absent || use.client->asks_elsewhere();
  if (why != Miss::none && is_here && by_request_)
    by_node = pins->add_leases(use, keys.subspan(done), *by_request_, why);
  // Where the node gave all it was asked for, the one that is missing is behind those.
  const bool is_first = pins->places.size() >= done + by_node;
  count_view(use, {keys.size() - by_node, done, why, is_first});
  return pins;
}

}  // namespace kvpool
