// A piece of keys that is read out of its holder's arena:
//
//   begin(): lease the blocks over a stream -> the lane begins to read them, into staging
//   end():   wait for each -> copy it to its place, hashing -> arrived -> give the leases back
//
// Between the two nothing is waited for, so that one thread has several under way.
//
// Promises:  1. what arrived() is said of has the checksum that the holder told with the lease;
//            2. nothing lands in a place of the sink but by the calling thread.
// One thread.
#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cluster/far_way.h"
#include "cluster/peer.h"
#include "net/stream_client.h"

namespace kvpool {

class FarRead {
 public:
  struct From {
    std::shared_ptr<Peer> peer;
    std::uint32_t space = 0;  // the member's number
    std::shared_ptr<StreamClient> stream;
    std::shared_ptr<UcxPeer> arena;
  };
  // Keys `first`.. of a call. `keys` and `sink` outlive this.
  FarRead(From from, std::span<const Hash128> keys, std::size_t first, std::uint32_t block_bytes,
          BlockSink& sink);
  ~FarRead();  // not over: its leases end with its stream
  FarRead(const FarRead&) = delete;
  FarRead& operator=(const FarRead&) = delete;

  // `until`: of the reads. Whatever fails shows at the end().
  void begin(Deadline lease_by, Deadline until);
  void end(Deadline deadline);

  const std::shared_ptr<StreamClient>& stream() const { return from_.stream; }
  // After end(): the leading keys that were delivered.
  std::size_t delivered() const { return delivered_; }
  // How many leading ones were leased. Those behind: `why`, where none says that they are to be had
  // over a stream.
  std::size_t leased() const { return places_.size(); }
  Miss why() const { return why_; }
  // Why the stream has ended; none: it lives.
  Miss trouble() const { return trouble_; }
  // The reads failed: what was leased and not delivered is to be had over a stream, or by others.
  bool has_failed() const { return has_failed_; }
  bool has_no_memory() const { return has_no_memory_; }
  std::chrono::steady_clock::duration latency() const { return latency_; }

 private:
  bool lease(Deadline deadline);
  bool fits(const FarHead& head) const;
  bool take(std::size_t index, const std::byte* read);
  void give_back(Deadline deadline);
  void fail(const std::string& trouble);
  std::uint64_t step() const;

  const From from_;
  const std::span<const Hash128> keys_;
  const std::size_t first_;
  const std::uint32_t block_bytes_;
  BlockSink& sink_;
  std::vector<FarPlace> places_;
  std::shared_ptr<std::byte> memory_;
  std::unique_ptr<UcxReading> reading_;
  Deadline until_{};
  std::size_t delivered_ = 0;
  Miss why_ = Miss::none, trouble_ = Miss::none;
  bool is_over_ = false, has_failed_ = false, has_no_memory_ = false;
  std::string failure_;
  std::chrono::steady_clock::duration latency_{};
};

}  // namespace kvpool
