// Reads that were asked for together, between the thread that waits and the worker's thread.
//
// Each place may be several pieces (it may lie across chunks of the peer's registration). Memory is
// the caller's, and `keeper` is what owns it: it is held until nothing can land there any more,
// which may be after the caller has gone.
// Thread rule: wait_for() by one thread, the caller's; the rest by the worker's.
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace kvpool {

struct UcxPiece {
  std::uint64_t remote = 0;  // address at the peer
  std::uint64_t bytes = 0;
  std::byte* into = nullptr;
  std::uint32_t chunk = 0;  // whose remote key it is read with
  std::uint32_t place = 0;  // its number among the places of the batch
};

class UcxBatch {
 public:
  using Time = std::chrono::steady_clock::time_point;
  enum class Answer : std::uint8_t { landed, failed, pending };

  UcxBatch(std::vector<UcxPiece> pieces, std::size_t places, std::shared_ptr<const void> keeper,
           Time deadline)
      : pieces_(std::move(pieces)), deadline_(deadline), keeper_(std::move(keeper)) {
    places_.resize(places);
    for (const UcxPiece& piece : pieces_) ++places_[piece.place].left;
  }

  // pending: not until then.
  Answer wait_for(std::size_t place, Time until) {
    std::unique_lock lock(mutex_);
    awaited_ = place;
    Place& asked = places_[place];
    if (!landed_.wait_until(lock, until, [&] { return asked.left == 0; })) return Answer::pending;
    return asked.has_failed ? Answer::failed : Answer::landed;
  }

  Time deadline() const { return deadline_; }
  const UcxPiece& piece(std::size_t number) const { return pieces_[number]; }
  bool has_next() const { return next_ < pieces_.size(); }
  std::size_t take_next() { return next_++; }
  bool is_over() const { return ended_ == pieces_.size(); }

  void end_piece(std::size_t number, bool is_whole) {
    const std::lock_guard lock(mutex_);
    Place& place = places_[pieces_[number].place];
    place.has_failed = place.has_failed || !is_whole;
    if (++ended_ == pieces_.size()) keeper_.reset();  // before anybody is told
    if (--place.left == 0 && pieces_[number].place == awaited_) landed_.notify_one();
  }
  // All that were not begun.
  void fail_rest() {
    while (has_next()) end_piece(take_next(), false);
  }

 private:
  struct Place {
    std::uint32_t left = 0;
    bool has_failed = false;
  };

  const std::vector<UcxPiece> pieces_;
  const Time deadline_;
  std::size_t next_ = 0, ended_ = 0;  // the worker's thread's
  std::mutex mutex_;                  // guards all below
  std::condition_variable landed_;
  std::vector<Place> places_;
  std::size_t awaited_ = 0;
  std::shared_ptr<const void> keeper_;
};

}  // namespace kvpool
