// What a server asks of its node's part in the cluster, on behalf of peers (cluster/): above all of
// its part of the directory. The server has checked the form of what came; what it means is for
// whoever implements this.
//
// Thread rule: every method from any thread, several at a time; none of them waits.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "block/key.h"
#include "net/frame.h"

namespace kvpool {

// What became of a batch.
enum class Told : std::uint8_t {
  ok,     // carried out now, or before: it is a repetition
  gap,    // batches are missing before it: everything is to be told anew, beginning with kFresh
  stale,  // of a life of its sender that is over
  full,   // no place for one more member just now
};

struct Located {
  std::vector<HolderName> names;  // each at most once
  // Per key, in any order: indexes into names, kNoHolder behind the last.
  std::vector<std::array<std::uint16_t, kHoldersPerKey>> holders;
};

class DirectoryService {
 public:
  virtual ~DirectoryService() = default;
  // `is_fresh`: whatever was known of this sender is forgotten first; then `keys` may be none.
  virtual Told publish(const Announcement& from, std::span<const Hash128> keys, bool is_fresh) = 0;
  virtual Told withdraw(const Announcement& from, std::span<const Hash128> keys) = 0;
  virtual void locate(std::span<const Hash128> keys, Located& found) = 0;
  // Somebody would like these blocks to be here as well. Fetches nothing itself.
  virtual PullAnswer pull(const PullHead&, std::span<const Hash128>, bool /*are_last*/) {
    return {.state = Pulling::refused};
  }
  virtual MemberLoad load() const { return {}; }
  // Number of the arena that peers may read by themselves (net/ucx_lane.h); 0: none.
  virtual std::uint64_t lane() const { return 0; }
};

// Where a server finds it; empty until its node is a member.
class DirectoryDoor {
 public:
  void set(std::shared_ptr<DirectoryService> directory) {
    const std::lock_guard lock(mutex_);
    directory_.swap(directory);  // the one before ends with the argument, behind the lock
  }
  std::shared_ptr<DirectoryService> get() const {
    const std::lock_guard lock(mutex_);
    return directory_;
  }

 private:
  mutable std::mutex mutex_;  // guards directory_
  std::shared_ptr<DirectoryService> directory_;
};

}  // namespace kvpool
