#include "net/stream_fetch.h"

#include <sys/socket.h>

#include <algorithm>
#include <cstring>

namespace kvpool {
namespace {

constexpr std::size_t kHashedAtOnce = 256 << 10;  // bytes still in cache from being received

}  // namespace

StreamFetch::StreamFetch(std::shared_ptr<StreamClient> stream, std::span<const Hash128> keys,
                         std::size_t first, std::uint32_t block_bytes, BlockSink& sink)
    : stream_(std::move(stream)),
      keys_(keys),
      first_(first),
      block_bytes_(block_bytes),
      sink_(sink) {}

void StreamFetch::start(std::uint32_t space, Deadline deadline) {
  id_ = stream_->start_get({.op = Op::get, .space = space, .keys = keys_, .deadline = deadline});
  if (id_ == 0) give_up(Miss::disconnected);
}

void StreamFetch::give_up(Miss why) {
  if (is_over_) return;
  stream_->abandon();
  is_over_ = true;
  why_ = why;
}

bool StreamFetch::step(std::size_t bytes_max) {
  bool took = false;
  for (std::size_t taken = 0; !is_over_ && taken < bytes_max;) {
    std::size_t got = 0;
    const Took how = take(got);
    if (how == Took::nothing) break;
    took = true;
    if (how == Took::end) {
      give_up(Miss::disconnected);
      break;
    }
    taken += got;
    use(got);
  }
  return took;
}

// Where the bytes go that come next: to the end of what is under way, and whole blocks ahead as far
// as they are hashed at once. Should they turn out to be no blocks, places hold garbage, which they
// may, and nothing is counted.
std::size_t StreamFetch::plan(std::span<iovec> pieces) {
  std::size_t count = 0;
  std::uint64_t left = kHashedAtOnce;
  std::size_t block = delivered_;
  if (in_payload_) {
    const std::uint64_t part = std::min(left, block_bytes_ - payload_bytes_);
    pieces[count++] = {place_of(block) + payload_bytes_, part};
    left -= part;
    if (payload_bytes_ + part < block_bytes_) return count;
    ++block;
  }
  const std::size_t skip = in_payload_ ? 0 : head_bytes_;
  pieces[count++] = {head_of(block).data() + skip, sizeof(Head) - skip};
  while (block < keys_.size() && left >= block_bytes_ && block + 1 - delivered_ < kAhead) {
    pieces[count++] = {place_of(block), block_bytes_};
    left -= block_bytes_;
    ++block;
    pieces[count++] = {head_of(block).data(), sizeof(Head)};
  }
  return count;
}

std::byte* StreamFetch::place_of(std::size_t block) {
  std::byte*& place = places_[block % kAhead];
  if (block < placed_) return place;
  placed_ = block + 1;
  place = sink_.place(first_ + block);
  if (place != nullptr) return place;
  if (own_.empty()) {
    own_blocks_ = std::min(kHashedAtOnce / block_bytes_ + 1, kAhead);
    own_.resize(own_blocks_ * block_bytes_);
  }
  return place = own_.data() + block % own_blocks_ * block_bytes_;
}

StreamFetch::Took StreamFetch::take(std::size_t& got) {
  std::array<iovec, 2 * kAhead + 1> pieces;
  msghdr message{};
  message.msg_iov = pieces.data();
  message.msg_iovlen = plan(pieces);
  for (;;) {
    const ssize_t received = recvmsg(stream_->descriptor(), &message, MSG_DONTWAIT);
    got = received > 0 ? static_cast<std::size_t>(received) : 0;
    if (received > 0) return Took::some;
    if (received == 0) return Took::end;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return Took::nothing;
    if (errno != EINTR) return Took::end;
  }
}

void StreamFetch::use(std::size_t got) {
  while (got > 0 && !is_over_) got -= in_payload_ ? use_payload(got) : use_head(got);
}

std::size_t StreamFetch::use_payload(std::size_t got) {
  const std::size_t part = std::min<std::uint64_t>(got, block_bytes_ - payload_bytes_);
  hash_.update(place_of(delivered_) + payload_bytes_, part);
  payload_bytes_ += part;
  if (payload_bytes_ == block_bytes_) end_payload();
  return part;
}

std::size_t StreamFetch::use_head(std::size_t got) {
  const std::size_t part = std::min(got, sizeof(Head) - head_bytes_);
  head_bytes_ += part;
  std::uint32_t magic = 0;
  if (head_bytes_ < sizeof(Answer)) return part;
  std::memcpy(&magic, head_of(delivered_).data(), sizeof magic);
  if (magic == kAnswerMagic)
    take_answer();
  else if (magic != kBlockMagic)
    give_up(Miss::damaged);
  else if (head_bytes_ == sizeof(Block))
    begin_payload();
  return part;
}

bool StreamFetch::fits(const Block& block) const {
  return block.version == kFrameVersion && block.check == check_of(block) && block.id == id_ &&
         block.index == delivered_ && delivered_ < keys_.size() && block.bytes == block_bytes_ &&
         Hash128{block.key_low, block.key_high} == keys_[delivered_];
}

void StreamFetch::begin_payload() {
  Block block;
  std::memcpy(&block, head_of(delivered_).data(), sizeof block);
  if (!fits(block)) return give_up(Miss::damaged);
  sum_ = {block.sum_low, block.sum_high};
  hash_.reset();
  in_payload_ = true;
  payload_bytes_ = 0;
}

void StreamFetch::end_payload() {
  if (hash_.digest() != sum_) return give_up(Miss::damaged);
  const std::byte* place = place_of(delivered_);
  const bool is_own = !own_.empty() && place >= own_.data() && place < own_.data() + own_.size();
  if (is_own && !sink_.deliver_whole(first_ + delivered_, {place, block_bytes_}))
    return give_up(Miss::moved);
  if (!is_own) sink_.arrived(first_ + delivered_, sum_);
  in_payload_ = false;
  head_bytes_ = 0;
  ++delivered_;
}

void StreamFetch::take_answer() {
  Answer answer;
  std::memcpy(&answer, head_of(delivered_).data(), sizeof answer);
  const bool fits = answer.version == kFrameVersion && answer.op == Op::get && answer.id == id_ &&
                    answer.count == delivered_ && answer.miss < kMisses && answer.body_bytes == 0 &&
                    head_bytes_ == sizeof answer;
  const bool is_short = delivered_ < keys_.size();
  if (!fits) return give_up(Miss::damaged);
  if (answer.failed != 0) return give_up(Miss::disconnected);
  is_over_ = true;
  why_ = static_cast<Miss>(answer.miss);
  if (is_short && why_ == Miss::none) why_ = Miss::absent;
}

}  // namespace kvpool
