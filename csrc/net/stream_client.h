// A client's side of one stream: one request and its answer at a time.
//
// Promises:  1. every call ends by its deadline;
//            2. an answer that does not fit its request, or did not come in time, ends the stream:
//               what would follow on it belongs to nobody.
// Thread rule: one thread at a time, but is_live() and abandon(), which are for any.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <span>
#include <vector>

#include "net/channel.h"
#include "net/frame.h"
#include "net/socket_io.h"

namespace kvpool {

class StreamClient {
 public:
  // Takes the descriptor over, also on failure.
  static Result<std::shared_ptr<StreamClient>> create(int descriptor);

  struct Ask {
    Op op{};
    std::uint32_t space = 0;  // the node's number
    std::span<const Hash128> keys;
    const Hash128* parent = nullptr;
    std::uint32_t skip = 0;
    Deadline deadline;
    bool is_part = false;                // kIsPart
    const Announcement* from = nullptr;  // publish, withdraw
    bool is_fresh = false;               // kFresh
    const PullHead* pull = nullptr;      // pull
    bool are_last = false;               // kLastCopies
  };
  struct Reply {
    // Not done: all below says nothing, and the stream is ended, unless it was late to begin with.
    Io how = Io::closed;
    Refusal refusal = Refusal::none;
    Miss why = Miss::none;
    std::size_t count = 0;
    std::size_t body_bytes = 0;
    MemberLoad load{};

    bool is_good() const { return how == Io::done && refusal == Refusal::none; }
    // Why there is no answer to work with.
    Miss trouble() const {
      return how == Io::late || how == Io::stalled ? Miss::timed_out : Miss::disconnected;
    }
  };
  // For all but get and put. `body` takes what comes with the answer. Op::wait may take `grace`
  // longer than it asks the node for.
  Reply request(const Ask& ask, std::span<std::byte> body,
                std::chrono::milliseconds grace = std::chrono::milliseconds(0));

  // One request's worth of blocks, from `ask.skip` on with payload. `statuses`: one per key; told
  // only by a good reply.
  Reply put(const Ask& ask, std::uint32_t block_bytes, BlockSource& source, std::size_t first,
            PutStatus* statuses);

  // First half of a get (net/stream_fetch.h has the other): its number, or 0.
  std::uint64_t start_get(const Ask& ask);

  int descriptor() const { return socket_.get(); }
  bool is_live() const { return live_.load(std::memory_order_acquire); }
  // No more requests; whoever waits for an answer gets Io::closed at once.
  void abandon();

 private:
  class Sender;
  // Nothing was sent, so the stream is as good as before.
  static bool is_late(Deadline deadline) { return std::chrono::steady_clock::now() >= deadline; }
  explicit StreamClient(Descriptor socket) : socket_(std::move(socket)) {}

  Request head_of(const Ask& ask);
  Io send_request(const Ask& ask, Request& head);
  Reply take_answer(const Request& head, std::span<std::byte> body, const Patience& patience);
  Io take(std::span<std::byte> to, const Patience& patience);
  Reply end(Io how);

  const Descriptor socket_;
  std::atomic<bool> live_{true};
  std::uint64_t next_id_ = 1;
  std::vector<std::byte> scratch_;  // payload of sources that have no place for it
};

// What one request asks of a longer call.
inline std::span<const Hash128> request_of(std::span<const Hash128> keys, std::size_t done) {
  return keys.subspan(done, std::min<std::size_t>(keys.size() - done, kKeysPerRequest));
}

// No byte for as long as the deadline allows: a client does not tell slow from stopped.
inline Patience until(Deadline deadline) { return {deadline, std::chrono::hours(24)}; }

}  // namespace kvpool
