// An shm attachment as its client sees it: the node's index and arena to read, control and staging
// memory to write, lanes to ask.
//
// Promises:  1. no address, size or count from the node is used unchecked;
//            2. once it is broken, every wait of it ends within a slice;
//            3. what is mapped stays readable until the last user lets go, the node gone or not.
// Thread rule: any thread. Not after fork: is_forked() first. In a child the last shared_ptr lets
//              the object be: its locks may be held by threads that are not there, and the
//              addresses of its maps, which a child does not have, may be somebody else's by now.
#pragma once
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/fork_guard.h"
#include "net/channel.h"
#include "net/client_hazards.h"
#include "net/lane.h"
#include "net/server.h"
#include "net/shared_memory.h"
#include "net/staging.h"

namespace kvpool {

// A lane as its client uses it: by one thread at a time.
struct ClientLane {
  Lane* shared = nullptr;
  Descriptor bell;
  StagingRun window;  // of ordinary requests, for good
  // Of the request under way, if it has its own; a producer may have it for longer.
  std::shared_ptr<StagingRun> used;
  std::uint64_t number = 0;  // of the newest request

  bool is_answered() const { return shared->answered.load(std::memory_order_acquire) == number; }
};

class ShmClient {
 public:
  // Takes the descriptors of the offer and the socket over, also on failure.
  static Result<std::shared_ptr<ShmClient>> create(const ShmOffer& offer, int socket);
  ShmClient(const ShmClient&) = delete;
  ShmClient& operator=(const ShmClient&) = delete;

  const IndexReader& reader() const { return *reader_; }
  // Now, of the namespace of that number; 0: there is none.
  std::uint32_t incarnation(std::uint32_t number) const {
    if (number >= kNamespacesMax) return 0;
    return static_cast<std::uint32_t>(view_.incarnation(number).load(std::memory_order_acquire));
  }
  // Whether what is not on this node may be had by asking it.
  bool asks_elsewhere() const {
    return view_.header().asks_elsewhere.load(std::memory_order_acquire) != 0;
  }
  const std::byte* arena() const { return view_.arena; }
  std::uint64_t arena_bytes() const { return arena_.bytes(); }
  ClientPage& page() { return *page_; }
  ClientHazards& hazards() { return *hazards_; }
  StagingRoom& room() { return *room_; }
  std::byte* staging() const { return staging_.base(); }

  // Bytes that views pin; false: more than this client may.
  bool may_pin(std::uint64_t bytes);
  void unpinned(std::uint64_t bytes) { pinned_.fetch_sub(bytes, std::memory_order_relaxed); }

  bool is_forked() const { return fork_guard_.is_child(); }
  bool is_broken() const { return broken_.load(std::memory_order_acquire); }
  // As if the node were gone: what is under way ends.
  void break_off();
  // Looks whether the node is gone. A system call.
  bool look();
  // Sleeps until it is gone or the deadline has come; true: gone.
  bool wait_until_broken(Deadline deadline);

  // nullptr: none came free in time, or broken. A lane whose request was never answered is not
  // free until it is.
  ClientLane* take_lane(Deadline deadline);
  void give_lane(ClientLane* lane);
  // Lanes that were lost and have been answered since are free again, and their staging memory.
  void find_lanes();

 private:
  explicit ShmClient(Descriptor socket) : socket_(std::move(socket)) {}
  void find_lanes(const std::unique_lock<std::mutex>& lock);
  Result<void> map(const ShmOffer& offer, std::vector<Descriptor> files);
  Result<void> check_index() const;
  Result<void> check_control(const ShmOffer& offer) const;
  Result<void> make_lanes(const ShmOffer& offer, std::vector<Descriptor>& files);

  ForkGuard fork_guard_;
  Descriptor socket_;
  SharedMemory arena_, index_, control_, staging_;
  IndexView view_;
  std::optional<IndexReader> reader_;
  ClientPage* page_ = nullptr;
  std::optional<ClientHazards> hazards_;
  std::optional<StagingRoom> room_;
  std::uint64_t pin_bytes_ = 0;
  std::atomic<std::uint64_t> pinned_{0};
  std::atomic<bool> broken_{false};

  std::mutex mutex_;  // guards the lists below
  std::condition_variable lane_free_;
  std::vector<ClientLane> lanes_;
  std::vector<ClientLane*> free_, lost_;
};

}  // namespace kvpool
