// Members to which more streams are wanted, for whoever dials.
//
// Each member stands here once at most, so it is bounded by their number.
// Thread rule: every method from any thread.
#pragma once
#include <condition_variable>
#include <mutex>
#include <vector>

#include "cluster/member_view.h"
#include "net/channel.h"

namespace kvpool {

struct WantedStream {
  MemberHandle member = kNoMember;
  Hash128 id;
  std::size_t count = 0;
  Deadline not_before{};  // the last attempts have failed
};

class WantedStreams {
 public:
  void want(const WantedStream& wanted);
  // Takes all that are due; sleeps until one is, the deadline has come or close() was called.
  std::vector<WantedStream> wait(Deadline deadline);
  void close();

 private:
  std::mutex mutex_;  // guards all below
  std::condition_variable came_;
  std::vector<WantedStream> wanted_;
  bool closed_ = false;
};

}  // namespace kvpool
