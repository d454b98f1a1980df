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

// With the last bytes of a payload comes what is there of the next head.
StreamFetch::Took StreamFetch::take(std::size_t& got) {
  std::array<iovec, 2> pieces;
  std::size_t count = 0;
  std::size_t part = 0;
  if (payload_ != nullptr) {
    part = std::min<std::uint64_t>(kHashedAtOnce, block_bytes_ - payload_bytes_);
    pieces[count++] = {payload_ + payload_bytes_, part};
  }
  if (payload_ == nullptr || payload_bytes_ + part == block_bytes_)
    pieces[count++] = {head_.data() + head_bytes_, head_.size() - head_bytes_};
  msghdr message{};
  message.msg_iov = pieces.data();
  message.msg_iovlen = count;
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
  if (payload_ != nullptr) {
    const std::size_t part = std::min<std::uint64_t>(got, block_bytes_ - payload_bytes_);
    hash_.update(payload_ + payload_bytes_, part);
    payload_bytes_ += part;
    got -= part;
    if (payload_bytes_ == block_bytes_) end_payload();
  }
  if (is_over_) return;
  head_bytes_ += got;
  std::uint32_t magic = 0;
  if (head_bytes_ < sizeof(Answer)) return;
  std::memcpy(&magic, head_.data(), sizeof magic);
  if (magic == kAnswerMagic)
    take_answer();
  else if (magic != kBlockMagic)
    give_up(Miss::damaged);
  else if (head_bytes_ == sizeof(Block))
    begin_payload();
}

bool StreamFetch::fits(const Block& block) const {
  return block.version == kFrameVersion && block.check == check_of(block) && block.id == id_ &&
         block.index == delivered_ && delivered_ < keys_.size() && block.bytes == block_bytes_ &&
         Hash128{block.key_low, block.key_high} == keys_[delivered_];
}

void StreamFetch::begin_payload() {
  Block block;
  std::memcpy(&block, head_.data(), sizeof block);
  if (!fits(block)) return give_up(Miss::damaged);
  head_bytes_ = 0;
  sum_ = {block.sum_low, block.sum_high};
  hash_.reset();
  payload_bytes_ = 0;
  payload_ = sink_.place(first_ + delivered_);
  if (payload_ != nullptr) return;
  own_.resize(block_bytes_);
  payload_ = own_.data();
}

void StreamFetch::end_payload() {
  if (hash_.digest() != sum_) return give_up(Miss::damaged);
  if (payload_ == own_.data() && !sink_.deliver_whole(first_ + delivered_, own_))
    return give_up(Miss::moved);
  payload_ = nullptr;
  ++delivered_;
}

void StreamFetch::take_answer() {
  Answer answer;
  std::memcpy(&answer, head_.data(), sizeof answer);
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
