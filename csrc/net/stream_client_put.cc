// The sending half of a put: each block is hashed while it is near, then sent from where it lies.
//
// Its owner may change a block between the two; then the node refuses it, as it must. While it
// sends it also looks for an answer: a node that has closed or gone reads no more, and who only
// writes to it would not learn that before its deadline.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>

#include "block/checksum.h"
#include "net/stream_client.h"

namespace kvpool {
namespace {

constexpr std::size_t kBatchBlocks = 64;
constexpr std::uint64_t kBatchBytes = 1 << 20;  // so that what was hashed is still in cache
constexpr std::size_t kScratchKept = 8 << 20;

}  // namespace

class StreamClient::Sender {
 public:
  Sender(StreamClient& stream, const Ask& ask, const Request& head, std::uint32_t block_bytes)
      : stream_(stream), ask_(ask), head_(head), block_bytes_(block_bytes) {}

  // The request itself, which leaves with the first batch.
  void add_request() {
    add_piece(&head_, sizeof head_);
    if (ask_.parent != nullptr) add_piece(ask_.parent, sizeof *ask_.parent);
    add_piece(ask_.keys.data(), ask_.keys.size_bytes());
  }

  // `first`: what the source calls block 0 of this request.
  Io send_blocks(BlockSource& source, std::size_t first) {
    for (std::size_t i = ask_.skip; i < ask_.keys.size(); ++i) {
      if (blocks_in_ == kBatchBlocks || (blocks_in_ > 0 && bytes_in_ + block_bytes_ > kBatchBytes))
        if (const Io how = flush(); how != Io::done) return how;
      add_block(i, source, first);
    }
    return flush();
  }

 private:
  void add_piece(const void* from, std::size_t bytes) {
    pieces_[pieces_in_++] = {const_cast<void*>(from), bytes};
  }

  void add_block(std::size_t index, BlockSource& source, std::size_t first) {
    Hash128 sum;
    // The first that cannot be produced ends the chain: those behind it are not asked for.
    const std::byte* payload = has_failed_ ? nullptr : payload_of(source, first + index, sum);
    has_failed_ = payload == nullptr;
    Block& block = blocks_[blocks_in_++];
    block = {.id = head_.id,
             .index = static_cast<std::uint32_t>(index),
             .bytes = has_failed_ ? 0 : block_bytes_,
             .key_low = ask_.keys[index].low,
             .key_high = ask_.keys[index].high,
             .sum_low = sum.low,
             .sum_high = sum.high};
    block.check = check_of(block);
    add_piece(&block, sizeof block);
    if (has_failed_) return;
    add_piece(payload, block_bytes_);
    bytes_in_ += block_bytes_;
  }

  const std::byte* payload_of(BlockSource& source, std::size_t index, Hash128& sum) {
    if (const std::byte* place = source.place(index); place != nullptr) {
      sum = checksum(place, block_bytes_);
      return place;
    }
    const std::size_t batch =
        std::clamp<std::size_t>(kBatchBytes / block_bytes_, 1, kBatchBlocks) * block_bytes_;
    if (stream_.scratch_.size() < batch) stream_.scratch_.resize(batch);
    std::byte* into = stream_.scratch_.data() + bytes_in_;
    return source.fill(index, into, sum) ? into : nullptr;
  }

  Io flush() {
    std::span<iovec> left = std::span(pieces_).first(pieces_in_);
    pieces_in_ = blocks_in_ = 0;
    bytes_in_ = 0;
    while (!left.empty()) {
      msghdr message{};
      message.msg_iov = left.data();
      message.msg_iovlen = left.size();
      const ssize_t sent = sendmsg(stream_.socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent >= 0) left = past(left, static_cast<std::size_t>(sent));
      if (left.empty() || (sent < 0 && errno == EINTR)) continue;
      if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK) return Io::closed;
      if (const Io how = wait_to_send(); how != Io::done) return how;
    }
    return Io::done;
  }

  // An answer before the end is the node's last word: closed.
  Io wait_to_send() {
    pollfd socket{
        .fd = stream_.socket_.get(), .events = POLLOUT | POLLIN | POLLRDHUP, .revents = 0};
    const int ms = poll_ms(ask_.deadline);
    if (ms == 0) return Io::late;
    if (poll(&socket, 1, ms) < 0 && errno != EINTR) return Io::closed;
    return (socket.revents & ~POLLOUT) != 0 ? Io::closed : Io::done;
  }

  StreamClient& stream_;
  const Ask& ask_;
  const Request& head_;
  const std::uint32_t block_bytes_;
  std::size_t pieces_in_ = 0, blocks_in_ = 0;
  std::uint64_t bytes_in_ = 0;  // of payload
  bool has_failed_ = false;
  std::array<Block, kBatchBlocks> blocks_;
  std::array<iovec, 2 * kBatchBlocks + 3> pieces_;
};

StreamClient::Reply StreamClient::put(const Ask& ask, std::uint32_t block_bytes,
                                      BlockSource& source, std::size_t first, PutStatus* statuses) {
  if (is_late(ask.deadline)) return {.how = Io::late};
  const Request head = head_of(ask);
  Sender sender(*this, ask, head, block_bytes);
  sender.add_request();
  const Io how = sender.send_blocks(source, first);
  if (scratch_.size() > kScratchKept) std::vector<std::byte>().swap(scratch_);
  if (how != Io::done) return end(how);
  const std::span body(reinterpret_cast<std::byte*>(statuses), ask.keys.size());
  Reply reply = take_answer(head, body, until(ask.deadline));
  if (!reply.is_good()) return reply;
  const bool known = std::all_of(statuses, statuses + ask.keys.size(), [](PutStatus status) {
    return static_cast<std::uint8_t>(status) < kPutStatuses;
  });
  if (reply.body_bytes != ask.keys.size() || !known) return end(Io::closed);
  return reply;
}

}  // namespace kvpool
