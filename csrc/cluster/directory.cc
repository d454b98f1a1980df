#include "cluster/directory.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/check.h"

namespace kvpool {
namespace {

// One part is copied when it grows, while its keys wait: some 0.2 ms for this much.
constexpr std::uint64_t kPartBytes = 256 << 10;
constexpr std::uint64_t kPartsMax = 1024;
constexpr std::size_t kKeysPerPass = 8192;

std::size_t parts_for(std::uint64_t bytes_max) {
  return std::bit_floor(std::clamp<std::uint64_t>(bytes_max / kPartBytes, 1, kPartsMax));
}

std::uint32_t sets_for(std::uint64_t part_bytes) {
  constexpr std::uint64_t kFew = 1, kMany = 1u << 24;
  return static_cast<std::uint32_t>(
      std::clamp(part_bytes / DirectorySegment::kSetBytes, kFew, kMany));
}

}  // namespace

Directory::Directory(const DirectoryOptions& options)
    : bytes_max_(options.bytes_max),
      salt_(options.salt),
      segments_count_(parts_for(options.bytes_max)),
      segments_(std::make_unique<DirectorySegment[]>(segments_count_)) {
  for (std::size_t i = 0; i < segments_count_; ++i)
    segments_[i].init(sets_for(bytes_max_ / segments_count_), salt_, &lives_);
}

// --- holders -------------------------------------------------------------------------------------

std::optional<Holder> Directory::take_holder() {
  const std::lock_guard lock(mutex_);
  std::uint16_t number = 0;
  if (!free_.empty()) {
    number = free_.back();
    free_.pop_back();
  } else if (never_used_ < HolderLives::kNumbers) {
    number = never_used_++;
  } else {
    return std::nullopt;
  }
  lives_.next(number);
  KVP_CHECK(lives_.is_alive(number));
  ++holders_;
  return Holder{number, lives_.life(number)};
}

void Directory::drop_holder(Holder holder) {
  const std::lock_guard lock(mutex_);
  if (holder.number == 0 || lives_.life(holder.number) != holder.life) return;  // dropped before
  lives_.next(holder.number);
  --holders_;
  condemned_.push_back({.number = holder.number, .parts_left = segments_count_});
}

bool Directory::is_behind() const {
  const std::lock_guard lock(mutex_);
  return condemned_.size() >= HolderLives::kNumbers / 2;
}

// Every part is looked at once after a holder was dropped, wherever the round was then.
bool Directory::sweep(std::size_t parts) {
  for (; parts > 0; --parts) {
    std::size_t part = 0;
    {
      const std::lock_guard lock(mutex_);
      if (condemned_.empty()) return false;
      part = sweep_at_;
    }
    {
      const std::lock_guard lock(segments_[part].lock());
      segments_[part].sweep([](std::uint64_t) { return false; });
    }
    const std::lock_guard lock(mutex_);
    if (sweep_at_ != part) continue;  // somebody else sweeps as well
    sweep_at_ = (part + 1) % segments_count_;
    for (Condemned& each : condemned_) each.parts_left -= std::exchange(each.is_due, true);
    while (!condemned_.empty() && condemned_.front().parts_left == 0) {
      free_.push_back(condemned_.front().number);
      condemned_.pop_front();
      ++swept_holders_;
    }
  }
  const std::lock_guard lock(mutex_);
  return !condemned_.empty();
}

// --- keys ----------------------------------------------------------------------------------------

template <typename Visit>
void Directory::by_part(std::span<const DirectoryKey> keys, Visit visit) {
  std::vector<std::uint32_t> ends(segments_count_ + 1);
  std::vector<std::uint64_t> hashes(std::min(keys.size(), kKeysPerPass));
  std::vector<std::uint16_t> order(hashes.size());
  for (std::size_t from = 0; from < keys.size(); from += kKeysPerPass) {
    const auto some = keys.subspan(from, std::min(kKeysPerPass, keys.size() - from));
    std::ranges::fill(ends, 0);
    for (std::size_t i = 0; i < some.size(); ++i) {
      hashes[i] = DirectorySegment::hash_of(some[i].high, salt_);
      ++ends[part_of(hashes[i]) + 1];
    }
    for (std::size_t part = 0; part < segments_count_; ++part) ends[part + 1] += ends[part];
    for (std::size_t i = 0; i < some.size(); ++i)
      order[ends[part_of(hashes[i])]++] = static_cast<std::uint16_t>(i);
    // By now ends[part] is where the part's keys end.
    for (std::size_t part = 0, at = 0; part < segments_count_; ++part) {
      const std::size_t end = ends[part];
      if (at == end) continue;
      DirectorySegment& segment = segments_[part];
      const std::lock_guard lock(segment.lock());
      for (std::size_t k = at; k < end; ++k) segment.prefetch(hashes[order[k]]);
      for (; at < end; ++at)
        visit(segment, hashes[order[at]], some[order[at]].high, from + order[at]);
    }
  }
}

std::size_t Directory::add(std::span<const DirectoryKey> keys, Holder holder) {
  std::size_t added = 0;
  by_part(keys, [&](DirectorySegment& segment, std::uint64_t hash, std::uint64_t tag, std::size_t) {
    added += segment.add(hash, tag, holder);
  });
  if (lives_.life(holder.number) != holder.life)
    late_.fetch_add(keys.size() - added, std::memory_order_relaxed);
  return added;
}

std::size_t Directory::remove(std::span<const DirectoryKey> keys, Holder holder) {
  std::size_t removed = 0;
  by_part(keys, [&](DirectorySegment& segment, std::uint64_t hash, std::uint64_t tag, std::size_t) {
    removed += segment.remove(hash, tag, holder);
  });
  return removed;
}

void Directory::find(std::span<const DirectoryKey> keys, std::span<Numbers> found) {
  KVP_CHECK(found.size() >= keys.size());
  by_part(keys, [&](DirectorySegment& segment, std::uint64_t hash, std::uint64_t tag,
                    std::size_t i) { found[i] = segment.find(hash, tag); });
}

void Directory::forget_slots(const SlotSet& slots) {
  if (slots.none()) return;
  for (std::size_t part = 0; part < segments_count_; ++part) {
    const std::lock_guard lock(segments_[part].lock());
    segments_[part].sweep([&](std::uint64_t tag) { return slots.test(tag >> 48); });
  }
}

DirectoryStats Directory::stats() const {
  DirectoryStats stats{.bytes_max = bytes_max_};
  for (std::size_t part = 0; part < segments_count_; ++part) {
    const std::lock_guard lock(segments_[part].lock());
    const DirectorySegment::Counters& counters = segments_[part].counters();
    stats.entries += counters.entries;
    stats.bytes += counters.bytes;
    stats.evicted += counters.evicted;
    stats.crowded += counters.crowded;
  }
  stats.late = late_.load(std::memory_order_relaxed);
  if (stats.entries > 0)
    stats.bytes_per_key = static_cast<double>(stats.bytes) / static_cast<double>(stats.entries);
  const std::lock_guard lock(mutex_);
  stats.holders = holders_;
  stats.swept_holders = swept_holders_;
  return stats;
}

}  // namespace kvpool
