// Memory that one-sided reads land in. What was read goes on to its place once it is known to be
// whole: a read that was given up may still be landing, and must not do so in a slot of the pool.
//
// Promise:   a piece of memory is used again only when nobody holds it any more: neither who waits
//            for the read nor the device that carries it out.
// Thread rule: take() from any thread; memory may outlive this.
#pragma once
#include <atomic>
#include <memory>

#include "node/bounce_pool.h"

namespace kvpool {

class Staging : public std::enable_shared_from_this<Staging> {
 public:
  static constexpr std::uint64_t kBytesMax = 256ull << 20;  // in use, by all

  // nullptr: too much is in use, or the machine has none.
  std::shared_ptr<std::byte> take(std::size_t bytes) {
    if (used_.fetch_add(bytes) + bytes > kBytesMax) {
      used_.fetch_sub(bytes);
      return nullptr;
    }
    auto bounce = std::make_shared<Bounce>(bounces_.take(bytes));
    std::byte* const memory = bounce->memory();
    const auto give = [bounce, bytes, own = shared_from_this()](std::byte*) mutable {
      bounce.reset();  // before the pool that it goes back to
      own->used_.fetch_sub(bytes);
    };
    std::shared_ptr<std::byte> held(memory, give);
    return memory == nullptr ? nullptr : held;
  }
  std::uint64_t used() const { return used_.load(); }

 private:
  BouncePool bounces_;
  std::atomic<std::uint64_t> used_{0};
};

}  // namespace kvpool
