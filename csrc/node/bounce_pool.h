// Page-aligned memory for blocks that are read past DRAM: taken for one call, kept for the next,
// since fresh pages cost more than the read.
//
// Promises:  1. a buffer is at a multiple of 4096 and of the size asked for, its contents anything;
//            2. at most kKeptBytes wait for their next use; what is in use is bounded by callers.
// Thread rule: any thread; a Bounce belongs to one at a time and must not outlive its pool.
#pragma once
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace kvpool {

class BouncePool;

class Bounce {
 public:
  Bounce() = default;
  Bounce(BouncePool& pool, std::byte* memory, std::size_t bytes)
      : pool_(&pool), memory_(memory), bytes_(bytes) {}
  Bounce(Bounce&& other) noexcept { swap(other); }
  Bounce& operator=(Bounce&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Bounce();
  std::byte* memory() const { return memory_; }  // nullptr: the machine had none

 private:
  void swap(Bounce& other) noexcept;
  BouncePool* pool_ = nullptr;
  std::byte* memory_ = nullptr;
  std::size_t bytes_ = 0;
};

class BouncePool {
 public:
  BouncePool() = default;
  ~BouncePool();
  BouncePool(const BouncePool&) = delete;
  BouncePool& operator=(const BouncePool&) = delete;

  Bounce take(std::size_t bytes);

 private:
  friend class Bounce;
  static constexpr std::size_t kKeptBytes = 128u << 20;
  struct Kept {
    std::byte* memory;
    std::size_t bytes;
  };
  void give(std::byte* memory, std::size_t bytes);

  std::mutex mutex_;  // guards the two below
  std::vector<Kept> kept_;
  std::size_t kept_bytes_ = 0;
};

}  // namespace kvpool
