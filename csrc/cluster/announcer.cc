#include "cluster/announcer.h"

#include <algorithm>

namespace kvpool {
namespace {

// Of its time: whoever steps it does so every so often.
constexpr auto kAhead = std::chrono::milliseconds(20);

}  // namespace

bool Announcer::step(Time now, const Tell& tell) {
  if (is_idle() || now + kAhead < next_) return false;
  if (!walk_) {
    walk_.emplace();
    telling_ = asked_;
    asked_.reset();
  }
  piece_.clear();
  const bool is_more = node_.walk(*walk_, piece_);
  std::uint64_t told = 0;
  for (const Resident& each : piece_) {
    const DirectoryKey key = make_directory_key(each.space->id, each.key);
    if (!telling_.test(slot_of(key))) continue;
    tell(key);
    ++told;
  }
  told_ += told;
  next_ = std::max(next_, now) + std::chrono::nanoseconds(told * 1'000'000'000 / keys_per_s_);
  if (!is_more) {
    walk_.reset();
    ++rounds_;
  }
  return !is_idle() && now + kAhead >= next_;
}

}  // namespace kvpool
