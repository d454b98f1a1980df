// put: payload goes from the socket into its slot, is hashed there (nobody else can change it), and
// is committed if the sender's checksum agrees. All payload that was announced is taken off the
// stream, wanted or not, so that the next request begins where it should.
#include <algorithm>
#include <array>

#include "block/checksum.h"
#include "net/admitted_put.h"
#include "net/stream_serve.h"

namespace kvpool {
namespace {

constexpr std::size_t kHashedAtOnce = 256 << 10;  // bytes still in cache from being received

}  // namespace

class StreamServe::PayloadReceiver final : public BlockSource {
 public:
  PayloadReceiver(StreamServe& stream, const Call& call)
      : stream_(stream), call_(call), next_(call.head.skip) {}

  bool fill(std::size_t index, std::byte* slot, Hash128& sum) override {
    if (index < call_.head.skip) {
      due_ = index;
      return false;
    }
    Hash128 sent;
    if (!forget_until(index) || !next_head(sent) || head_.bytes == 0) return false;
    const std::uint32_t bytes = head_.bytes;  // what is there of the next head overwrites this one
    if (!receive(slot, bytes, sum)) return false;
    if (sum == sent) return true;
    is_damaged_ = true;
    return false;
  }

  // Takes what is left off the stream. False: the stream is broken.
  bool finish() { return forget_until(call_.head.count); }

  bool is_open() const { return is_open_; }
  bool is_damaged() const { return is_damaged_; }
  // A block that was thought present and is not; kKeysPerRequest: none.
  std::size_t due() const { return due_; }

 private:
  bool forget_until(std::size_t index) {
    while (is_open_ && next_ < index) {
      Hash128 sent;
      if (next_head(sent)) forget(head_.bytes);
    }
    return is_open_;
  }

  // The head of block `next_`, which is then counted as taken.
  bool next_head(Hash128& sent) {
    if (!is_open_ || !receive_head()) return false;
    const Hash128& key = call_.keys[next_];
    // Of an unknown namespace the size is not known either; it is thrown away whatever it is.
    const bool fits =
        head_.bytes == 0 || (call_.space == nullptr ? head_.bytes <= kBlockBytesMax
                                                    : head_.bytes == call_.space->block_bytes);
    if (head_.magic != kBlockMagic || head_.version != kFrameVersion ||
        head_.check != check_of(head_) || head_.id != call_.head.id || head_.index != next_ ||
        Hash128{head_.key_low, head_.key_high} != key || !fits)
      return is_open_ = stream_.garbage("a block that does not fit its request");
    ++next_;
    sent = {head_.sum_low, head_.sum_high};
    return true;
  }

  bool receive_head() {
    auto* at = reinterpret_cast<std::byte*>(&head_);
    head_bytes_ += stream_.take_gathered(at + head_bytes_, sizeof head_ - head_bytes_);
    while (head_bytes_ < sizeof head_) {
      const iovec rest{at + head_bytes_, sizeof head_ - head_bytes_};
      std::size_t got = 0;
      if (!receive_pieces({&rest, 1}, got)) return false;
      head_bytes_ += got;
    }
    head_bytes_ = 0;
    return true;
  }

  // With the last bytes of a payload comes what is there of the next head.
  bool receive(std::byte* to, std::uint64_t bytes, Hash128& sum) {
    ChecksumStream hash;
    std::uint64_t done = stream_.take_gathered(to, bytes);
    hash.update(to, done);
    while (done < bytes) {
      const std::size_t part = std::min<std::uint64_t>(bytes - done, kHashedAtOnce);
      const bool is_last = part == bytes - done && next_ < call_.head.count;
      const std::array<iovec, 2> pieces{iovec{to + done, part},
                                        iovec{&head_, is_last ? sizeof head_ : 0}};
      std::size_t got = 0;
      if (!receive_pieces(std::span(pieces).first(is_last ? 2 : 1), got)) return false;
      const std::size_t payload = std::min(got, part);
      hash.update(to + done, payload);
      done += payload;
      head_bytes_ = got - payload;
    }
    sum = hash.digest();
    return true;
  }

  bool forget(std::uint64_t bytes) {
    bytes -= stream_.skip_gathered(bytes);
    stream_.count_in(bytes);
    const Io how = receive_nothing(stream_.socket_.get(), bytes, call_.patience);
    return is_open_ = stream_.ended(how, "send");
  }

  bool receive_pieces(std::span<const iovec> pieces, std::size_t& got) {
    is_open_ =
        stream_.ended(receive_some(stream_.socket_.get(), pieces, call_.patience, got), "send");
    if (is_open_) stream_.count_in(got);
    return is_open_;
  }

  StreamServe& stream_;
  const Call& call_;
  std::size_t next_;  // whose head comes next
  Block head_;
  std::size_t head_bytes_ = 0;  // of head_ that are there already
  std::size_t due_ = kKeysPerRequest;
  bool is_open_ = true, is_damaged_ = false;
};

bool StreamServe::put(const Call& call) {
  PayloadReceiver receiver(*this, call);
  const Refusal refusal = refusal_of(call);
  if (refusal != Refusal::none)
    return receiver.finish() && answer(call, {.refusal = refusal}) && refusal != Refusal::draining;
  std::vector<PutStatus> statuses(call.keys.size(), PutStatus::failed);
  const auto given_up = [this] { return is_peer_gone(socket_.get()); };
  put_admitted(host_.node, host_.books.puts,
               {*call.space, call.keys, call.parent, call.patience.deadline, given_up, true},
               call.head.skip, receiver, statuses);
  if (receiver.due() < statuses.size()) statuses[receiver.due()] = PutStatus::payload_due;
  call.space->traffic->count_put(statuses);
  if (!receiver.finish()) return false;
  const auto stored = std::find_if(statuses.begin(), statuses.end(),
                                   [](PutStatus s) { return s > PutStatus::present; });
  const bool sent = answer(call, {.count = static_cast<std::size_t>(stored - statuses.begin()),
                                  .body = std::as_bytes(std::span(statuses))});
  // Whatever changed these bytes may have changed the next ones too.
  if (receiver.is_damaged()) return garbage("a payload that is not what its checksum says");
  return sent;
}

}  // namespace kvpool
