// Payload on its way through the ring of a lane, seen from the node.
//
// Promises:  1. what is stored is what was hashed, whatever the client writes meanwhile: every
//               piece goes through a private buffer;
//            2. the client is handed no byte of a block whose bytes may have changed, unless it is
//               larger than the ring: then it is told, by the count, that the block is not whole;
//            3. every wait ends by the request's deadline, and within a slice of the client's end
//               or its giving up.
// Thread rule: the thread that serves the lane; LaneHost::ended from any.
#pragma once
#include <atomic>
#include <cstdint>

#include "net/futex.h"
#include "net/lane.h"
#include "net/source.h"
#include "node/node.h"

namespace kvpool {

// What the lanes of one client share.
struct LaneHost {
  Node& node;
  ServerBooks& books;
  ClientBooks* client = nullptr;  // there before a lane serves
  std::byte* staging = nullptr;
  std::uint64_t staging_bytes = 0;
  std::chrono::microseconds request_max{0};
  std::atomic<bool> ended{false};  // the client is gone, or is being closed
};

// The sides of a lane as they wait for one another.
inline Sleeper node_sleeper(Lane& lane) { return {lane.node_waits, lane.node_wake}; }
inline Sleeper client_sleeper(Lane& lane) { return {lane.client_waits, lane.client_wake}; }

// A request, checked, in memory that the client does not share.
struct LaneRequest {
  std::uint64_t number = 0;
  LaneOp op{};
  Namespace* space = nullptr;
  std::span<const Hash128> keys;
  const Hash128* parent = nullptr;
  std::uint64_t skip = 0;
  Node::Deadline deadline;
  std::byte* ring = nullptr;
  std::uint64_t ring_bytes = 0;
};

class LaneFlow {
 public:
  LaneFlow(LaneHost& host, Lane& lane, const LaneRequest& request)
      : host_(host),
        lane_(lane),
        request_(request),
        block_bytes_(request.space->block_bytes),
        stride_(block_stride(block_bytes_)) {}

  // The client counted bytes that cannot be there.
  bool is_garbage() const { return is_garbage_; }
  std::uint64_t bytes() const { return moved_; }

 protected:
  // Until the client's counter has reached `until`. False: it will not, in time. Before it sleeps
  // it shows `done`, so that the client never waits for what is done already.
  bool wait_for_client(std::uint64_t until, std::uint64_t done);
  void publish(std::uint64_t to);  // our counter
  void rouse() {
    roused_ = ours_;
    if (client_waits_for_count_) client_sleeper(lane_).rouse();
  }
  // From a byte of the stream to the end of its run in the ring.
  std::uint64_t left_in_ring(std::uint64_t at) const {
    return request_.ring_bytes - at % request_.ring_bytes;
  }
  std::byte* in_ring(std::uint64_t at) const { return request_.ring + at % request_.ring_bytes; }

  LaneHost& host_;
  Lane& lane_;
  const LaneRequest& request_;
  const std::uint64_t block_bytes_, stride_;
  std::uint64_t ours_ = 0, roused_ = 0, theirs_ = 0, moved_ = 0;
  std::uint64_t theirs_max_ahead_ = 0;  // of ours, if the client counts right
  bool is_garbage_ = false;
  bool client_waits_for_count_ = true;
};

// put: the client fills the ring.
class LaneSource final : public BlockSource, public LaneFlow {
 public:
  LaneSource(LaneHost& host, Lane& lane, const LaneRequest& request)
      : LaneFlow(host, lane, request) {
    theirs_max_ahead_ = request.ring_bytes;
    // Where the ring has room for all, it waits for the answer only: a wake-up for each piece would
    // cost this thread more than the piece does.
    client_waits_for_count_ = (request.keys.size() - request.skip) * stride_ > request.ring_bytes;
  }
  bool fill(std::size_t index, std::byte* slot, Hash128& sum) override;
  void skip(std::size_t index) override;
  bool is_stream() const override { return true; }
  // A block was wanted that the client thought present.
  bool is_payload_due() const { return is_payload_due_; }

 private:
  bool is_payload_due_ = false;
};

// get: the node fills it.
class LaneSink final : public BlockSink, public LaneFlow {
 public:
  LaneSink(LaneHost& host, Lane& lane, const LaneRequest& request)
      : LaneFlow(host, lane, request) {}
  bool deliver(std::size_t index, const IndexReader& reader, const Found& found) override;
  bool deliver_whole(std::size_t index, std::span<const std::byte> payload) override;

 private:
  template <typename Whole>
  bool send(std::size_t index, const std::byte* payload, const Whole& is_whole);
  bool is_over_ = false;  // late, given up, or a block is half sent that cannot be taken back
};

}  // namespace kvpool
