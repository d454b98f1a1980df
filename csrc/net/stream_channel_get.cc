// get and acquire over several streams.
#include <poll.h>

#include <algorithm>
#include <deque>
#include <new>

#include "net/stream_channel.h"
#include "net/stream_fetch.h"

namespace kvpool {
namespace {

constexpr std::uint64_t kPartBytes = 256 << 10;  // less is not worth a request of its own
constexpr std::size_t kTurnBytes = 1 << 20;      // from one stream before the next has its turn
constexpr std::size_t kAlign = 4096;

std::size_t parts_worth(std::size_t keys, std::uint64_t block_bytes) {
  const std::uint64_t parts = keys * block_bytes / kPartBytes;
  return std::clamp<std::size_t>(parts, 1, keys);
}

// Until all are over or the deadline has come.
void take_by_turns(std::deque<StreamFetch>& fetches, Deadline deadline) {
  std::vector<pollfd> ready;
  std::vector<StreamFetch*> open;
  for (;;) {
    ready.clear();
    open.clear();
    for (StreamFetch& fetch : fetches) {
      if (fetch.is_over()) continue;
      ready.push_back({.fd = fetch.stream()->descriptor(), .events = POLLIN, .revents = 0});
      open.push_back(&fetch);
    }
    if (open.empty()) return;
    const int ms = poll_ms(deadline);
    if (ms == 0) break;
    poll(ready.data(), ready.size(), ms);
    for (std::size_t i = 0; i < open.size(); ++i)
      if (ready[i].revents != 0) open[i]->step(kTurnBytes);
  }
  for (StreamFetch* fetch : open) fetch->give_up(Miss::timed_out);
}

}  // namespace

std::size_t StreamChannel::get(const Space& space, std::span<const Hash128> keys, BlockSink& sink,
                               Miss& why) {
  const Deadline deadline = by_timeout();
  why = Miss::absent;
  if (space.is_lost()) return 0;
  why = Miss::none;
  std::size_t done = 0;
  while (done < keys.size()) {
    // Enough keys for all streams, were each to take as many as it can.
    const std::size_t count =
        std::min<std::size_t>(keys.size() - done, streams_->live() * kKeysPerRequest);
    const auto some = keys.subspan(done, std::max<std::size_t>(count, 1));
    const std::size_t got = get_some(space, some, sink, done, deadline, why);
    done += got;
    if (why != Miss::none) break;
  }
  return done;
}

// One request on each of the streams it can have. `why` none: go on behind what was delivered.
std::size_t StreamChannel::get_some(const Space& space, std::span<const Hash128> keys,
                                    BlockSink& sink, std::size_t first, Deadline deadline,
                                    Miss& why) {
  bool late = false;
  const auto loan = streams_->borrow(parts_worth(keys.size(), space.block_bytes), deadline, late);
  why = late ? Miss::timed_out : Miss::disconnected;
  if (loan.empty()) return 0;
  const std::uint32_t number = space.number.load(std::memory_order_acquire);
  const std::size_t parts = loan.streams().size();
  keys = keys.first(std::min<std::size_t>(keys.size(), parts * kKeysPerRequest));
  std::deque<StreamFetch> fetches;
  for (std::size_t i = 0, at = 0; i < parts; ++i) {
    const std::size_t count = keys.size() / parts + (i < keys.size() % parts ? 1 : 0);
    fetches.emplace_back(loan.streams()[i], keys.subspan(at, count), first + at, space.block_bytes,
                         sink);
    fetches.back().start(number, deadline);
    at += count;
  }
  take_by_turns(fetches, deadline);
  std::size_t delivered = 0;
  why = Miss::none;
  for (const StreamFetch& fetch : fetches) {
    delivered += fetch.delivered();
    why = fetch.why();
    if (fetch.delivered() < fetch.asked()) break;
    why = Miss::none;
  }
  return delivered;
}

// Blocks of a remote node, in memory of this process.
class StreamChannel::Copies final : public Pins, public BlockSink {
 public:
  Copies(std::size_t blocks, std::uint32_t block_bytes)
      : step_((block_bytes + kAlign - 1) / kAlign * kAlign),
        block_bytes_(block_bytes),
        memory_(static_cast<std::byte*>(
            ::operator new(blocks * step_, std::align_val_t(kAlign), std::nothrow))) {
    base = memory_;
    base_bytes = memory_ == nullptr ? 0 : blocks * step_;
  }
  ~Copies() override { ::operator delete(memory_, std::align_val_t(kAlign)); }

  bool deliver(std::size_t, const IndexReader&, const Found&) override { return false; }
  bool deliver_whole(std::size_t, std::span<const std::byte>) override { return false; }
  std::byte* place(std::size_t index) override { return memory_ + index * step_; }
  void keep(std::size_t blocks) {
    for (std::size_t i = 0; i < blocks; ++i) places.push_back({i * step_, block_bytes_});
  }

 private:
  const std::uint64_t step_, block_bytes_;
  std::byte* const memory_;
};

// Leases of the node, told to it when they are over. Those of another life ended with that.
class StreamChannel::InPlace final : public Pins {
 public:
  InPlace(const std::shared_ptr<StreamPool>& pool, std::chrono::milliseconds timeout)
      : pool_(pool), life_(pool->life()), timeout_(timeout) {}
  ~InPlace() override {
    const auto pool = pool_.lock();
    const Deadline deadline = std::chrono::steady_clock::now() + timeout_;
    for (std::size_t done = 0; pool && done < numbers_.size(); done += kKeysPerRequest) {
      const auto loan = pool->borrow_of(life_, deadline);
      if (loan.empty()) return;
      loan.one().request(
          {.op = Op::release, .keys = request_of(numbers_, done), .deadline = deadline}, {});
    }
  }
  std::uint64_t life() const { return life_; }
  void add(const LeasePlace& leased) {
    numbers_.push_back({leased.lease, 0});
    places.push_back({leased.offset, leased.bytes});
  }

 private:
  const std::weak_ptr<StreamPool> pool_;
  const std::uint64_t life_;
  const std::chrono::milliseconds timeout_;
  std::vector<Hash128> numbers_;
};

std::unique_ptr<Pins> StreamChannel::acquire_in_place(const Space& space,
                                                      std::span<const Hash128> keys, Miss& why) {
  const Deadline deadline = by_timeout();
  auto pins = std::make_unique<InPlace>(streams_, options_.timeout);
  why = Miss::none;
  for (std::size_t done = 0; done < keys.size();) {
    const auto loan = streams_->borrow_of(pins->life(), deadline);
    why = Miss::disconnected;
    if (loan.empty()) break;
    const auto part = request_of(keys, done);
    std::vector<LeasePlace> leased(part.size());
    const auto reply = loan.one().request({.op = Op::acquire,
                                           .space = space.number.load(std::memory_order_acquire),
                                           .keys = part,
                                           .deadline = deadline},
                                          std::as_writable_bytes(std::span(leased)));
    why = reply.is_good() ? reply.why : reply.trouble();
    if (!reply.is_good() || reply.body_bytes != reply.count * sizeof(LeasePlace)) break;
    for (std::size_t i = 0; i < reply.count; ++i) pins->add(leased[i]);
    done += reply.count;
    if (reply.count < part.size()) break;
  }
  return pins;
}

std::unique_ptr<Pins> StreamChannel::acquire(const Space& space, std::span<const Hash128> keys,
                                             Miss& why) {
  if (options_.leases_in_place) return acquire_in_place(space, keys, why);
  const std::size_t there = look({space, keys, true}, nullptr, why);
  const Miss behind = why;
  auto copies = std::make_unique<Copies>(there, space.block_bytes);
  if (there == 0) return copies;
  if (copies->base == nullptr) {
    why = Miss::no_room;
    return copies;
  }
  copies->keep(get(space, keys.first(there), *copies, why));
  if (why == Miss::none) why = behind;
  return copies;
}

}  // namespace kvpool
