// The door through which a node asks its cluster: knows how many are inside, and can be shut.
//
// Promises:  1. once it is shut nobody is let in: a call says so at once, with a miss;
//            2. wait_empty() says when what calls use may go.
// Thread rule: every method from any thread; its lock is held for a few instructions.
#pragma once
#include <condition_variable>
#include <mutex>
#include <utility>

#include "node/elsewhere.h"

namespace kvpool {

class FarGate final : public Elsewhere {
 public:
  explicit FarGate(Elsewhere& to) : to_(to) {}  // outlived by `to`

  Miss find(const Ask& ask, std::span<std::uint8_t> has) override {
    const Visit visit(*this);
    return visit ? to_.find(ask, has) : Miss::absent;
  }
  Miss fetch(const Ask& ask, BlockSink& sink) override {
    const Visit visit(*this);
    return visit ? to_.fetch(ask, sink) : Miss::absent;
  }

  // For as long as it lives somebody is inside; false: the door was shut.
  class Visit {
   public:
    explicit Visit(FarGate& gate) : gate_(gate.enter() ? &gate : nullptr) {}
    ~Visit() {
      if (gate_ != nullptr) gate_->leave();
    }
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;
    explicit operator bool() const { return gate_ != nullptr; }

   private:
    FarGate* const gate_;
  };

  void shut() {
    const std::lock_guard lock(mutex_);
    is_shut_ = true;
  }
  // False: somebody still was inside at the deadline.
  bool wait_empty(Deadline deadline) {
    std::unique_lock lock(mutex_);
    return left_.wait_until(lock, deadline, [this] { return inside_ == 0; });
  }
  std::size_t inside() const {
    const std::lock_guard lock(mutex_);
    return inside_;
  }

 private:
  bool enter() {
    const std::lock_guard lock(mutex_);
    inside_ += !is_shut_;
    return !is_shut_;
  }
  void leave() {
    const std::lock_guard lock(mutex_);
    if (--inside_ == 0 && is_shut_) left_.notify_all();
  }

  Elsewhere& to_;
  mutable std::mutex mutex_;  // guards all below
  std::condition_variable left_;
  std::size_t inside_ = 0;
  bool is_shut_ = false;
};

}  // namespace kvpool
