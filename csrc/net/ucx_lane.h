// One-sided reads between two nodes: the reader's network card fetches from the holder's arena and
// the holder's processor does nothing. For hosts with RDMA; docs/ucx.md.
//
//   holder: UcxLane::open -> address() --in the handshake--> reader: connect()
//   holder: leases places (Op::lease_far)      --a stream--> reader: UcxPeer::begin() or read()
//
// Promises:  1. a block is `whole` only if its bytes have the checksum that was asked for. A slot
//               that was given to another block meanwhile has other bytes, so a lease that was lost
//               costs a block, never wrong bytes;
//            2. nothing is asked for outside the arena that the peer has told of;
//            3. a read ends by its deadline, whatever the peer does, and at once if it is gone.
// Relies on: the peer's address from a peer that has proved who it is (net/ucx_address.h).
// Thread rule: open() and the lane's destructor by its owner, connect() and read() from any thread.
// A UcxPeer may outlive its lane: it is broken then. Destroy the lane before the arena.
// Open it after any fork: in a child of fork() nothing of it works, and destroying it does nothing.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "block/key.h"
#include "memory/arena.h"
#include "net/ucx_options.h"

namespace kvpool {

class UcxBatch;
class UcxContext;
class UcxEndpoint;
class UcxMemory;
class UcxWorker;
struct UcxAddressHead;
struct UcxCounters;

inline constexpr std::size_t kUcxPlacesMax = 8192;  // of one read

// One block of a peer: where it lies in its arena, what it has to be, where it is to go.
struct UcxPlace {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  Hash128 sum;  // XXH3-128
  std::byte* into = nullptr;
};

enum class UcxOutcome : std::uint8_t {
  whole,
  damaged,  // it came, and is not what was asked for: the lease was lost, or worse
  failed,   // it did not come, or was not asked for
};

struct UcxTotals {
  std::uint64_t whole = 0, damaged = 0, failed = 0, bytes = 0, late = 0, errors = 0;
};

// Reads that are under way. One thread at a time; may outlive the peer and the lane.
class UcxReading {
 public:
  using Time = std::chrono::steady_clock::time_point;
  // Nothing is under way where `batch` is nullptr.
  UcxReading(std::shared_ptr<UcxBatch> batch, std::shared_ptr<UcxCounters> counters,
             std::vector<bool> is_asked);
  ~UcxReading();
  UcxReading(const UcxReading&) = delete;
  UcxReading& operator=(const UcxReading&) = delete;

  // True: the bytes of that place are there, whatever they are. False: they do not come, or not
  // until then; then they may still land where they were to go, as long as the keeper is held.
  bool wait(std::size_t place, Time until);
  // Counts what the caller found when it compared them.
  void judge(UcxOutcome outcome, std::uint64_t bytes);

 private:
  const std::shared_ptr<UcxBatch> batch_;
  const std::shared_ptr<UcxCounters> counters_;
  const std::vector<bool> is_asked_;
  std::size_t judged_ = 0;
};

class UcxPeer {
 public:
  using Time = std::chrono::steady_clock::time_point;

  UcxPeer(std::shared_ptr<UcxWorker> worker, std::shared_ptr<UcxEndpoint> endpoint,
          std::shared_ptr<UcxCounters> counters, const UcxAddressHead& head);
  ~UcxPeer();
  UcxPeer(const UcxPeer&) = delete;
  UcxPeer& operator=(const UcxPeer&) = delete;

  // Begins to read. `sum` is not looked at: the caller compares what it waited for. `keeper`: as
  // below.
  std::unique_ptr<UcxReading> begin(std::span<const UcxPlace> places,
                                    std::shared_ptr<const void> keeper, Time deadline);
  // One outcome per place, in their order. `keeper` owns what the places go into and is held until
  // no byte can land there any more: as a rule that is before this returns; where a device does not
  // end what it was at, the caller is not kept, and its memory is.
  // A deadline that comes breaks the peer, for all that read from it.
  std::vector<UcxOutcome> read(std::span<const UcxPlace> places, std::shared_ptr<const void> keeper,
                               Time deadline);
  // Nothing can be read any more: connect again.
  bool is_broken() const;
  std::uint64_t arena_bytes() const { return arena_bytes_; }
  std::uint64_t lane() const { return lane_; }  // number of the lane that it leads to

 private:
  bool is_inside(const UcxPlace& place) const;

  const std::shared_ptr<UcxWorker> worker_;
  const std::shared_ptr<UcxEndpoint> endpoint_;
  const std::shared_ptr<UcxCounters> counters_;
  const std::uint64_t lane_, arena_bytes_, arena_base_, chunk_bytes_;
};

class UcxLane {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // Code::refused, with the reason, where UCX or what it needs is not there; Code::bad_argument for
  // an arena that is not sealed or options that cannot be.
  static Result<std::unique_ptr<UcxLane>> open(const Arena& arena, const UcxOptions& options);
  ~UcxLane();
  UcxLane(const UcxLane&) = delete;
  UcxLane& operator=(const UcxLane&) = delete;

  std::uint64_t number() const { return number_; }  // drawn at random, never 0
  // What peers connect() with: at most kUcxAddressBytesMax bytes.
  std::span<const std::byte> address() const { return address_; }
  // Code::refused for an address that is damaged, of another version, or of a UCX of another kind.
  // It does not wait for the peer: one that is not there is found by the first read.
  Result<std::unique_ptr<UcxPeer>> connect(std::span<const std::byte> address, Time deadline);

  UcxTotals totals() const;
  const std::string& library() const { return library_; }  // path and version

 private:
  UcxLane();
  void describe(const Arena& arena);

  // In this order: the worker goes first, then the memory, the context last.
  std::unique_ptr<UcxContext> context_;
  std::unique_ptr<UcxMemory> memory_;
  std::shared_ptr<UcxWorker> worker_;
  std::shared_ptr<UcxCounters> counters_;
  std::uint64_t number_ = 0;
  std::vector<std::byte> address_;
  std::string library_;
};

}  // namespace kvpool
