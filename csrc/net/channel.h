// How a client reaches a node: a call, shared memory, or a socket. One interface for the bindings.
//
// Promises:  1. what the node promises (node/node.h), through every channel;
//            2. every call ends by its deadline, whatever became of the node: with a miss or an
//               un-stored block and the reason;
//            3. no call is made into Python.
// Thread rule: every method from any thread; the objects that acquire() and reserve() give belong
// to one thread at a time. Not after fork: is_forked() first.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "block/key.h"
#include "node/miss.h"
#include "node/node.h"

namespace kvpool {

using Deadline = Node::Deadline;

// Of a namespace that the node would not open again: nothing of it is there.
inline constexpr std::uint32_t kNoSpace = ~std::uint32_t{0};

// A namespace, as one channel names it.
struct Space {
  Hash128 id;
  std::uint32_t block_bytes = 0;
  // The node's number for it. Another one when the channel has found another life of the node.
  std::atomic<std::uint32_t> number{0};
  Namespace* local = nullptr;  // of a node in this process

  bool is_lost() const { return number.load(std::memory_order_acquire) == kNoSpace; }
};

// Blocks that stay as they are until this is gone, or its channel is: each `bytes` long at
// base + offset. Destroy without a lock of the channel's.
class Pins {
 public:
  struct Place {
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
  };
  virtual ~Pins() = default;
  const std::byte* base = nullptr;
  std::uint64_t base_bytes = 0;
  std::vector<Place> places;
};

// Memory for one block that is to be put. Gone without commit: nothing was put.
class Room {
 public:
  virtual ~Room() = default;
  std::byte* memory = nullptr;  // block_bytes
  // Once. Nobody writes to the memory any more.
  virtual PutStatus commit(Deadline deadline) = 0;
};

// The timeout of a put bounds its wait for another writer. What it takes to get the blocks to a
// node elsewhere it is given in any case: else 0, which stores in this process, never could there.
inline constexpr auto kPutLeast = std::chrono::milliseconds(50);
inline Deadline at_least_a_way(Deadline deadline) {
  return std::max(deadline, std::chrono::steady_clock::now() + kPutLeast);
}

struct PutCall {
  const Space& space;
  std::span<const Hash128> keys;    // in chain order
  const Hash128* parent = nullptr;  // key of the block before the first
  Deadline deadline;
};

class Channel {
 public:
  virtual ~Channel() = default;
  virtual bool is_forked() const = 0;
  virtual bool is_closed() const = 0;
  // lookup() neither waits nor makes a system call.
  virtual bool looks_up_at_once() const { return true; }

  // Leading blocks present; `tiers`: nullptr or one byte per key. `why`: of the first that is not.
  virtual std::size_t lookup(const Space& space, std::span<const Hash128> keys, std::uint8_t* tiers,
                             Miss& why) = 0;
  // Delivers the leading blocks that are whole and returns how many.
  virtual std::size_t get(const Space& space, std::span<const Hash128> keys, BlockSink& sink,
                          Miss& why) = 0;
  // One status per key.
  virtual void put(const PutCall& call, BlockSource& source, PutStatus* statuses) = 0;
  // The leading blocks, in place; fewer, or none, if some are missing. Never nullptr.
  virtual std::unique_ptr<Pins> acquire(const Space& space, std::span<const Hash128> keys,
                                        Miss& why) = 0;
  // `status` = stored: there is room. Else nullptr.
  virtual std::unique_ptr<Room> reserve(const PutCall& call, PutStatus& status) = 0;
  virtual std::size_t remove(const Space& space, std::span<const Hash128> keys) = 0;
  // Until all are present or the deadline; how many leading ones are.
  virtual std::size_t wait(const Space& space, std::span<const Hash128> keys,
                           Deadline deadline) = 0;
};

}  // namespace kvpool
