#include "node/hot_prefixes.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace kvpool {
namespace {

constexpr std::uint32_t kRecordsPerStep = 2048;  // some 0.2 us each, or less
constexpr std::uint32_t kFactsPerStep = 256;     // some cold lines each

// Heat in 1/64 of a doubling: what is kept of it per record has to be small.
constexpr double kStepsPerDoubling = 64, kStepsOfOne = 1 << 15;
std::uint16_t steps_of(double heat) {
  if (!(heat > 0)) return 0;
  const double steps = std::log2(heat) * kStepsPerDoubling + kStepsOfOne;
  return static_cast<std::uint16_t>(std::clamp(steps, 0.0, 65535.0));
}

std::uint64_t generation(const Store& store, BlockId record) {
  return store.view().record(record).generation.load(std::memory_order_relaxed);
}

}  // namespace

HotPrefixes::HotPrefixes(std::size_t count, std::uint32_t records, Seconds now)
    : count_(count), now_(now), children_(records) {
  ends_.reserve(count + 1);
}

bool HotPrefixes::step(const Store& store) {
  if (stage_ == Stage::facts) {
    const std::size_t until = std::min<std::size_t>(at_ + kFactsPerStep, ends_.size());
    for (; at_ < until; ++at_) tell(store, ends_[at_]);
    return at_ < ends_.size();
  }
  const auto records = static_cast<std::uint32_t>(children_.size());
  const std::uint32_t until = at_ + std::min(kRecordsPerStep, records - at_);
  for (; at_ < until; ++at_) {
    if (!store.is_resident(at_)) continue;
    stage_ == Stage::children ? count_child(store, at_) : consider(store, at_);
  }
  if (at_ < records) return true;
  at_ = 0;
  if (stage_ == Stage::children) {
    stage_ = Stage::ends;
  } else {
    stage_ = Stage::facts;
    std::ranges::sort(ends_, std::greater<>());
  }
  return true;
}

void HotPrefixes::count_child(const Store& store, BlockId record) {
  const BlockId parent = store.uses().parent(record);
  if (parent == kNoBlock || parent >= children_.size()) return;
  Child& child = children_[parent];
  child.heat_steps = std::max(child.heat_steps, steps_of(store.uses().heat(record, now_)));
  child.count += child.count < std::numeric_limits<std::uint16_t>::max();
}

void HotPrefixes::consider(const Store& store, BlockId record) {
  const double heat = store.uses().heat(record, now_);
  const Child& child = children_[record];
  if (child.count > 0 && child.heat_steps + kStepsPerDoubling >= steps_of(heat)) return;
  const End end{heat, record, generation(store, record)};
  if (ends_.size() == count_ && !(end > ends_.front())) return;
  if (store.name_of(record).first == nullptr) return;  // dropped, and not swept yet
  ends_.push_back(end);
  std::ranges::push_heap(ends_, std::greater<>());
  if (ends_.size() <= count_) return;
  std::ranges::pop_heap(ends_, std::greater<>());
  ends_.pop_back();
}

void HotPrefixes::tell(const Store& store, const End& end) {
  if (!store.is_resident(end.record) || generation(store, end.record) != end.generation) return;
  const auto [space, key] = store.name_of(end.record);
  if (space == nullptr) return;
  found_.push_back({.number = space->number,
                    .key = key,
                    .depth = store.uses().depth(end.record) + 1,
                    .heat = end.heat,
                    .idle_s = store.uses().idle_s(end.record, now_),
                    .tiers = store.view().record(end.record).tier.load(std::memory_order_relaxed),
                    .children = children_[end.record].count});
}

}  // namespace kvpool
