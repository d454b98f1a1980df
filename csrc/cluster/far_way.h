// The way to one member's arena, for one-sided reads (net/ucx_lane.h): connected when it is first
// wanted; once it broke it is left alone for a while, and blocks come over streams meanwhile.
//
//   no address, no lane -> never | unused -> connected -> broken: a pause of .25 s, doubled at each
//   failure up to 30 s -> connected ...
//
// Promises:  1. while it is left alone, asking costs no system call;
//            2. one caller connects at a time, the others use streams.
// Thread rule: every method from any thread; no lock is held while anything waits.
#pragma once
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "cluster/staging.h"
#include "net/ucx_lane.h"

namespace kvpool {

// What a node has for reads from all other members.
struct FarReads {
  std::shared_ptr<UcxLane> lane;
  std::shared_ptr<Staging> staging;  // where they land
};

enum class FarState : std::uint8_t {
  none,    // one of the two has no lane
  unused,  // nothing was read yet
  open,
  broken,  // it is left alone
};

struct FarWayStats {
  FarState state = FarState::none;
  std::uint64_t blocks = 0, bytes = 0;  // that were read
  std::uint64_t failures = 0;           // each of them broke it
  std::uint64_t blocks_given_up = 0;    // asked for once more, over streams
  std::string trouble;                  // of the last failure
};

class FarWay {
 public:
  using Time = std::chrono::steady_clock::time_point;
  static constexpr std::chrono::milliseconds kPauseMin{250}, kPauseMax{30'000};

  explicit FarWay(FarReads reads) : reads_(std::move(reads)) {}

  // As the member said when it answered a hello. Another than before: what there was is dropped.
  void set_address(std::span<const std::byte> address);
  // nullptr: blocks are to come over streams. Connects if it is time to.
  std::shared_ptr<UcxPeer> get(Time deadline);
  std::shared_ptr<Staging> staging() const;
  void read(std::uint64_t blocks, std::uint64_t bytes);
  // Reads through `peer` failed, for `trouble`; so many blocks are to be asked for once more.
  void failed(const std::shared_ptr<UcxPeer>& peer, std::uint64_t blocks,
              const std::string& trouble);
  void close();
  FarWayStats stats() const;

 private:
  void note(const std::string& trouble);

  mutable std::mutex mutex_;  // guards all below
  FarReads reads_;
  std::vector<std::byte> address_;
  std::shared_ptr<UcxPeer> peer_;  // nullptr: not connected
  bool is_connecting_ = false;
  std::chrono::milliseconds pause_{0};
  Time not_before_{};
  FarWayStats counts_;
};

}  // namespace kvpool
