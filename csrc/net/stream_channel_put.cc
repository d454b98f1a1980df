// put and reserve over one stream.
#include <algorithm>
#include <new>

#include "net/stream_channel.h"

namespace kvpool {
namespace {

// Of one request: what is sent in vain when the node refuses its first block.
constexpr std::uint64_t kPutBytes = 32 << 20;
// From so much payload on it is worth asking first what is there.
constexpr std::uint64_t kAskedFirst = 256 << 10;
constexpr std::size_t kAlign = 4096;

std::size_t blocks_of_request(const Space& space, std::size_t left) {
  const std::uint64_t fit =
      std::clamp<std::uint64_t>(kPutBytes / space.block_bytes, 1, kKeysPerRequest);
  return std::min<std::size_t>(left, fit);
}

}  // namespace

void StreamChannel::put(const PutCall& asked, BlockSource& source, PutStatus* statuses) {
  PutCall call = asked;
  call.deadline = at_least_a_way(asked.deadline);
  std::size_t done = 0;
  while (done < call.keys.size()) {
    const std::size_t count = blocks_of_request(call.space, call.keys.size() - done);
    const std::size_t there = put_some(call, done, count, source, statuses + done);
    done += there;
    if (there < count) break;
  }
  for (std::size_t i = done + 1; i < call.keys.size(); ++i) statuses[i] = PutStatus::chain_broken;
}

// One request, and again from where the node lacks what it had a moment ago. Answers how many
// leading blocks are there; the status of the next one is told too.
std::size_t StreamChannel::put_some(const PutCall& call, std::size_t first, std::size_t count,
                                    BlockSource& source, PutStatus* statuses) {
  bool late = false;
  statuses[0] = PutStatus::dropped;
  if (call.space.is_lost()) return 0;
  const auto loan = streams_->borrow(1, call.deadline, late);
  statuses[0] = late ? PutStatus::timed_out : PutStatus::disconnected;
  if (loan.empty()) return 0;
  const std::uint32_t number = call.space.number.load(std::memory_order_acquire);
  bool may_skip = count * std::uint64_t{call.space.block_bytes} > kAskedFirst;
  std::vector<std::byte> tiers(count);
  for (std::size_t done = 0;;) {
    const std::size_t at = first + done;
    StreamClient::Ask ask{.op = Op::lookup,
                          .space = number,
                          .keys = call.keys.subspan(at, count - done),
                          .deadline = call.deadline,
                          .is_part = true};
    StreamClient::Reply reply{.how = Io::done};
    if (may_skip) reply = loan.one().request(ask, tiers);
    if (reply.is_good()) {
      ask.op = Op::put;
      ask.is_part = false;
      ask.parent = at > 0 ? &call.keys[at - 1] : call.parent;
      ask.skip = static_cast<std::uint32_t>(reply.count);
      reply = loan.one().put(ask, call.space.block_bytes, source, at, statuses + done);
    }
    if (!reply.is_good()) {
      statuses[done] =
          reply.trouble() == Miss::timed_out ? PutStatus::timed_out : PutStatus::disconnected;
      return done;
    }
    while (done < count && is_there(statuses[done])) ++done;
    if (done == count || statuses[done] != PutStatus::payload_due) return done;
    may_skip = false;  // it left in between: everything from here on is sent
  }
}

// Memory of this process that becomes a put.
class StreamChannel::OwnRoom final : public Room, public BlockSource {
 public:
  OwnRoom(StreamChannel& channel, const PutCall& call)
      : channel_(channel),
        space_(call.space),
        key_(call.keys[0]),
        has_parent_(call.parent != nullptr) {
    if (has_parent_) parent_ = *call.parent;
    memory = static_cast<std::byte*>(
        ::operator new(space_.block_bytes, std::align_val_t(kAlign), std::nothrow));
  }
  ~OwnRoom() override { ::operator delete(memory, std::align_val_t(kAlign)); }

  PutStatus commit(Deadline deadline) override {
    PutStatus status = PutStatus::failed;
    channel_.put({space_, {&key_, 1}, has_parent_ ? &parent_ : nullptr, deadline}, *this, &status);
    return status;
  }
  bool fill(std::size_t, std::byte*, Hash128&) override { return false; }  // there is a place
  const std::byte* place(std::size_t) const override { return memory; }

 private:
  StreamChannel& channel_;
  const Space& space_;
  const Hash128 key_;
  Hash128 parent_;
  const bool has_parent_;
};

std::unique_ptr<Room> StreamChannel::reserve(const PutCall& call, PutStatus& status) {
  Miss why{};
  if (look({call.space, call.keys.first(1), true}, nullptr, why) == 1) {
    status = PutStatus::present;
    return nullptr;
  }
  if (why == Miss::disconnected || why == Miss::timed_out) {
    status = why == Miss::timed_out ? PutStatus::timed_out : PutStatus::disconnected;
    return nullptr;
  }
  auto room = std::make_unique<OwnRoom>(*this, call);
  status = room->memory == nullptr ? PutStatus::no_memory : PutStatus::stored;
  if (room->memory == nullptr) return nullptr;
  return room;
}

}  // namespace kvpool
