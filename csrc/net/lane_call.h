// One request on a lane, seen from the client: ask, let payload pass through the ring, hear the
// answer.
//
// Promises:  1. every wait ends by the deadline, within a slice of the node's end, and when the
//               answer is there;
//            2. the payload of a block is handed on only once the node says that it is whole.
// Thread rule: one thread.
#pragma once
#include <optional>
#include <span>

#include "net/frame.h"
#include "net/futex.h"
#include "net/shm_client.h"

namespace kvpool {

class LaneCall {
 public:
  struct Ask {
    LaneOp op{};
    std::uint32_t space = 0;
    std::span<const Hash128> keys;
    const Hash128* parent = nullptr;
    std::size_t skip = 0;
    std::uint64_t window_offset = 0;
    std::uint64_t ring_bytes = 0;  // after the keys; a multiple of 64
  };
  LaneCall(ShmClient& client, ClientLane& lane, Deadline deadline)
      : client_(client), lane_(lane), shared_(*lane.shared), deadline_(deadline) {}
  ~LaneCall();  // gives an unanswered request up, and the lane back
  LaneCall(const LaneCall&) = delete;
  LaneCall& operator=(const LaneCall&) = delete;

  void ask(const Ask& ask);
  void cancel();
  bool is_answered() const { return lane_.is_answered(); }
  // False: late, or broken.
  bool wait_for_answer();
  bool is_broken() const { return client_.is_broken(); }

  // put: the ring has room up to that byte of the stream. False: answered, late or broken.
  bool wait_for_room(std::uint64_t end);
  // get: that many bytes of the stream are there. The same.
  bool wait_for_payload(std::uint64_t end, std::uint64_t stride);
  std::uint64_t taken() const { return shared_.taken.load(std::memory_order_acquire); }
  // put: so much is there. get: so much is copied out.
  void show(std::uint64_t bytes);
  void rouse();

  std::byte* ring(std::uint64_t at) const { return ring_ + at % ring_bytes_; }
  std::uint64_t left_in_ring(std::uint64_t at) const { return ring_bytes_ - at % ring_bytes_; }
  std::uint64_t ring_bytes() const { return ring_bytes_; }
  std::uint64_t half_ring() const { return half_of_ring(ring_bytes_); }

  // Once answered. None of it is more than a number until it was checked.
  Refusal refusal() const;
  std::size_t done() const;
  Miss miss() const;
  PutStatus status(std::size_t index) const;

 private:
  Sleeper node() const { return {shared_.node_waits, shared_.node_wake}; }
  template <typename Ready>
  bool wait(const Ready& ready);

  ShmClient& client_;
  ClientLane& lane_;
  Lane& shared_;
  const Deadline deadline_;
  std::size_t count_ = 0;
  std::byte* ring_ = nullptr;
  std::uint64_t ring_bytes_ = 0;
  std::uint64_t shown_ = 0, roused_ = 0;
};

}  // namespace kvpool
