// get: lease a window of blocks -> send them from where they lie -> release. Blocks that lie on the
// SSD alone, or on other nodes, go by the node's own choice, DRAM or not, through private memory.
#include <algorithm>
#include <array>

#include "block/checksum.h"
#include "net/stream_serve.h"

namespace kvpool {
namespace {

constexpr std::uint64_t kWindowBytes = 16 << 20;
constexpr std::size_t kWindowBlocks = 64;

}  // namespace

// The answer to one get while it goes out. The Answer travels with the last window.
class StreamServe::Delivery {
 public:
  Delivery(StreamServe& stream, const Call& call) : stream_(stream), call_(call) {}

  bool run() {
    while (is_open_ && done_ < call_.keys.size() && send_window()) {
    }
    if (is_answered_) return is_open_;
    if (!is_open_) loaded_.why = Miss::disconnected;
    count();
    if (!is_open_) return false;
    // Whoever sent a peer here is to know better.
    if (stream_.host_.kind == StreamKind::peer && loaded_.why == Miss::absent)
      stream_.host_.node.deny(*call_.space, call_.keys[done_]);
    return stream_.answer(call_, {.count = done_, .why = loaded_.why});
  }

  // False: nothing more can be sent.
  bool send_block(const std::byte* payload, const Lease& lease, const Loaded& from) {
    add(payload, lease);
    flush(from);
    done_ += is_open_;
    return is_open_;
  }
  bool is_open() const { return is_open_; }
  const Call& call() const { return call_; }

 private:
  // False: nothing of it could be sent.
  bool send_window() {
    const std::size_t before = done_;
    const auto window = call_.keys.subspan(done_, window_blocks());
    std::array<std::uint8_t, kWindowBlocks> tiers{};
    const std::size_t found = stream_.host_.node.look(*call_.space, window, tiers.data()).present;
    if (!admit(found)) {
      loaded_.why = Miss::limited;
      return false;
    }
    const auto in_dram = static_cast<std::size_t>(
        std::find(tiers.begin(), tiers.begin() + found, kTierSsd) - tiers.begin());
    if (in_dram > 0) send_leased(window.first(std::min(in_dram, found)));
    // On the SSD alone; or a lease was not to be had, as in a pool where all else is pinned.
    if (is_open_ && done_ == before) send_copies(window);
    return done_ > before;
  }

  // What other nodes have is paid for when it is known how much came.
  bool admit(std::size_t found) {
    RateLimit& gets = stream_.host_.books.gets;
    if (found == 0) return call_.is_here_only || gets.has_room();
    return gets.admit(found * std::uint64_t{call_.space->block_bytes});
  }

  std::size_t window_blocks() const {
    const std::size_t fit = kWindowBytes / call_.space->block_bytes;
    return std::min(call_.keys.size() - done_, std::clamp<std::size_t>(fit, 1, kWindowBlocks));
  }

  void add(const std::byte* payload, const Lease& lease) {
    Block& block = blocks_[added_];
    const Hash128& key = call_.keys[done_ + added_];
    block = {.id = call_.head.id,
             .index = static_cast<std::uint32_t>(done_ + added_),
             .bytes = call_.space->block_bytes,
             .key_low = key.low,
             .key_high = key.high,
             .generation = lease.generation,
             .sum_low = lease.sum.low,
             .sum_high = lease.sum.high};
    block.check = check_of(block);
    pieces_[2 * added_] = {&block, sizeof block};
    pieces_[2 * added_ + 1] = {const_cast<std::byte*>(payload), call_.space->block_bytes};
    ++added_;
  }

  // `from`: where the blocks came from that go out. Whoever has the answer finds the get counted.
  void flush(const Loaded& from) {
    const Loaded before = loaded_;
    loaded_ = {loaded_.dram + from.dram, loaded_.ssd + from.ssd, loaded_.remote + from.remote,
               from.why};
    std::size_t pieces = 2 * added_;
    if (done_ + added_ == call_.keys.size()) {
      answer_ = answer_head(call_, {.count = call_.keys.size()});
      pieces_[pieces++] = {&answer_, sizeof answer_};
      is_answered_ = true;
      count();
    }
    added_ = 0;
    is_open_ = stream_.send(std::span(pieces_).first(pieces), call_.patience);
    if (!is_open_) loaded_ = before;
  }

  void count() {
    call_.space->traffic->count_get(call_.keys.size(), loaded_);
    stream_.host_.client->count_get(loaded_, call_.space->block_bytes);
  }

  void send_leased(std::span<const Hash128> keys) {
    std::array<Lease, kWindowBlocks> leases;
    Loaded loaded;
    const std::size_t leased =
        stream_.host_.node.acquire_part(*call_.space, keys, leases.data(), loaded, Reach::here());
    if (leased == 0) return;
    const std::byte* arena = stream_.host_.node.arena();
    for (std::size_t i = 0; i < leased; ++i) add(arena + leases[i].offset, leases[i]);
    flush(loaded);
    stream_.host_.node.release(std::span(leases).first(leased));
    done_ += leased;
  }

  void send_copies(std::span<const Hash128> keys);

  StreamServe& stream_;
  const Call& call_;
  std::size_t done_ = 0, added_ = 0;  // blocks that were sent; that wait in pieces_
  Loaded loaded_;                     // of all that went out
  bool is_open_ = true, is_answered_ = false;
  Answer answer_;
  std::array<Block, kWindowBlocks> blocks_;
  std::array<iovec, 2 * kWindowBlocks + 1> pieces_;
};

// A sink whose blocks are sent one by one.
class StreamServe::CopySender final : public BlockSink {
 public:
  explicit CopySender(Delivery& delivery) : delivery_(delivery) {}

  bool deliver(std::size_t, const IndexReader& reader, const Found& found) override {
    if (!delivery_.is_open() || found.bytes != delivery_.call().space->block_bytes) return false;
    copy_.resize(found.bytes);
    const Hash128 sum =
        copy_with_checksum(copy_.data(), reader.payload(found), found.bytes, Stores::cached);
    if (!reader.still_there(found)) return false;
    return delivery_.send_block(copy_.data(), {.generation = found.generation, .sum = sum},
                                {.dram = 1});
  }
  bool deliver_whole(std::size_t, std::span<const std::byte> payload) override {
    return delivery_.is_open() &&
           delivery_.send_block(payload.data(), {.sum = checksum(payload.data(), payload.size())},
                                from == kTierRemote ? Loaded{.remote = 1} : Loaded{.ssd = 1});
  }

 private:
  Delivery& delivery_;
  std::vector<std::byte> copy_;
};

void StreamServe::Delivery::send_copies(std::span<const Hash128> keys) {
  CopySender sink(*this);
  Loaded loaded;
  stream_.host_.node.get_part(*call_.space, keys, sink, loaded, reach_of(call_));
  stream_.host_.books.gets.charge(loaded.remote * std::uint64_t{call_.space->block_bytes});
  loaded_.why = loaded.why;
}

bool StreamServe::get(const Call& call) { return Delivery(*this, call).run(); }

}  // namespace kvpool
