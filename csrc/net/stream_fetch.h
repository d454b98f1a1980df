// The second half of a get on one stream: what comes goes straight to where the sink wants it, is
// hashed while it is in cache, and counts only when the checksum agrees.
//
// Never waits, so that one thread can take from several streams by turns. One thread at a time.
#pragma once
#include <array>
#include <vector>

#include "net/stream_client.h"

namespace kvpool {

class StreamFetch {
 public:
  // Keys `first`.. of a call; `keys` are this stream's. All outlive this.
  StreamFetch(std::shared_ptr<StreamClient> stream, std::span<const Hash128> keys,
              std::size_t first, std::uint32_t block_bytes, BlockSink& sink);

  void start(std::uint32_t space, Deadline deadline);
  // Takes what there is, up to about `bytes_max`. False: there was nothing.
  bool step(std::size_t bytes_max);
  // Ends the stream, for `why`, if the answer has not come whole.
  void give_up(Miss why);

  bool is_over() const { return is_over_; }
  std::size_t delivered() const { return delivered_; }
  std::size_t asked() const { return keys_.size(); }
  Miss why() const { return why_; }
  const std::shared_ptr<StreamClient>& stream() const { return stream_; }

 private:
  enum class Took : std::uint8_t { nothing, some, end };
  // A Block, or the Answer, which is shorter.
  using Head = std::array<std::byte, sizeof(Block)>;
  static constexpr std::size_t kAhead = 32;  // blocks in one step

  std::size_t plan(std::span<iovec> pieces);
  std::byte* place_of(std::size_t block);
  Head& head_of(std::size_t block) { return heads_[block % kAhead]; }
  Took take(std::size_t& got);
  void use(std::size_t got);
  std::size_t use_head(std::size_t got);
  std::size_t use_payload(std::size_t got);
  void begin_payload();
  void end_payload();
  void take_answer();
  bool fits(const Block& block) const;

  const std::shared_ptr<StreamClient> stream_;
  const std::span<const Hash128> keys_;
  const std::size_t first_;
  const std::uint32_t block_bytes_;
  BlockSink& sink_;
  std::uint64_t id_ = 0;
  std::size_t delivered_ = 0;
  Miss why_ = Miss::none;
  bool is_over_ = false;

  // Block `delivered_` is the one that comes; those ahead of it have a place already.
  std::array<Head, kAhead> heads_;
  std::array<std::byte*, kAhead> places_;
  std::size_t placed_ = 0;  // blocks that have one
  bool in_payload_ = false;
  std::size_t head_bytes_ = 0;
  std::uint64_t payload_bytes_ = 0;
  Hash128 sum_;  // as the node told it
  ChecksumStream hash_;
  std::vector<std::byte> own_;  // for a sink without a place: of all that are ahead
  std::size_t own_blocks_ = 0;
};

}  // namespace kvpool
