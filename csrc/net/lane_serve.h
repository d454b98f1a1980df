// One lane as the node serves it: takes a request, checks it, carries it out, answers.
//
// Every word of a request and all keys are copied once into private memory and checked there, so
// the client may scribble over them as it likes. Nonsense ends the whole client, with a reason.
// Thread rule: serve() by one thread at a time; interrupt() from any.
#pragma once
#include <optional>

#include "net/frame.h"
#include "net/lane_flow.h"

namespace kvpool {

class LaneServe {
 public:
  LaneServe(LaneHost& host, Lane& lane) : host_(host), lane_(lane) {}

  // Serves until nothing is asked. After a request that came soon after the one before, it looks
  // for the next for a while before it says so: who asks often rings no bell.
  enum class Served : std::uint8_t { quiet, ended, garbage };
  Served serve();
  const char* why_garbage() const { return why_; }
  // With LaneHost::ended set: what serve() waits for is over.
  void interrupt() { node_sleeper(lane_).wake_up(); }

 private:
  using Keys = Hash128[kKeysPerLane + 1];

  bool is_asked() const { return lane_.asked.load(std::memory_order_acquire) != answered_; }
  bool carry_out();
  bool read(LaneRequest& request, Hash128* keys);
  bool read_window(LaneRequest& request, bool has_parent, Hash128* keys);
  bool put(const LaneRequest& request);
  bool get(const LaneRequest& request);
  static Reach reach_of(const LaneRequest& request);
  void answer(std::uint64_t number, Refusal refused);
  bool garbage(const char* why) {
    why_ = why;
    return false;
  }

  LaneHost& host_;
  Lane& lane_;
  std::uint64_t answered_ = 0;
  Node::Deadline answered_at_{};
  bool is_busy_ = false;  // the last request came soon after the one before
  const char* why_ = "";
};

}  // namespace kvpool
