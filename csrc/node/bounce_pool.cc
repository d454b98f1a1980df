#include "node/bounce_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace kvpool {

Bounce::~Bounce() {
  if (memory_ != nullptr) pool_->give(memory_, bytes_);
}

void Bounce::swap(Bounce& other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(memory_, other.memory_);
  std::swap(bytes_, other.bytes_);
}

BouncePool::~BouncePool() {
  for (const Kept& kept : kept_) ::munmap(kept.memory, kept.bytes);
}

Bounce BouncePool::take(std::size_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    const auto fits = [&](const Kept& kept) { return kept.bytes == bytes; };
    if (const auto it = std::ranges::find_if(kept_, fits); it != kept_.end()) {
      std::byte* memory = it->memory;
      *it = kept_.back();
      kept_.pop_back();
      kept_bytes_ -= bytes;
      return Bounce(*this, memory, bytes);
    }
  }
  void* fresh = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (fresh == MAP_FAILED) return {};
  return Bounce(*this, static_cast<std::byte*>(fresh), bytes);
}

void BouncePool::give(std::byte* memory, std::size_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    // The latest size is the likeliest to be asked for again: older ones make way.
    while (!kept_.empty() && kept_bytes_ + bytes > kKeptBytes) {
      KVP_CHECK(::munmap(kept_.front().memory, kept_.front().bytes) == 0);
      kept_bytes_ -= kept_.front().bytes;
      kept_.erase(kept_.begin());
    }
    if (kept_bytes_ + bytes <= kKeptBytes) {
      kept_.push_back({memory, bytes});
      kept_bytes_ += bytes;
      return;
    }
  }
  ::munmap(memory, bytes);
}

}  // namespace kvpool
