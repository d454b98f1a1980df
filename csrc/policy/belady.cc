#include "policy/belady.h"

#include <algorithm>

#include "base/check.h"

namespace kvpool {

void BeladySimulator::request(std::span<const Name> blocks, Seconds) {
  trace_.insert(trace_.end(), blocks.begin(), blocks.end());
  ends_.push_back(trace_.size());
}

void BeladySimulator::finish() {
  find_next_uses();
  std::size_t begin = 0;
  for (const std::size_t end : ends_) {
    serve(begin, end);
    begin = end;
  }
}

void BeladySimulator::find_next_uses() {
  const Name names = trace_.empty() ? 0 : *std::max_element(trace_.begin(), trace_.end()) + 1;
  due_.assign(names, kNever);
  is_resident_.assign(names, false);
  pinned_by_.assign(names, 0);
  next_uses_.resize(trace_.size());
  for (std::size_t i = trace_.size(); i-- > 0;) {
    next_uses_[i] = due_[trace_[i]];
    due_[trace_[i]] = i;
  }
}

void BeladySimulator::serve(std::size_t begin, std::size_t end) {
  ++report_.requests;
  report_.blocks += end - begin;
  for (std::size_t i = begin; i < end; ++i) {
    pinned_by_[trace_[i]] = static_cast<std::uint32_t>(report_.requests);
  }
  std::size_t hits_end = begin;
  while (hits_end < end && is_resident_[trace_[hits_end]]) ++hits_end;
  report_.hit_blocks += hits_end - begin;
  for (std::size_t i = begin; i < end; ++i) see(i);
}

// One block is used: its next use moves, or it comes in.
void BeladySimulator::see(std::size_t position) {
  const Name name = trace_[position];
  const Use next_use = next_uses_[position];
  if (!is_resident_[name]) {
    if (resident_ == capacity_ && !make_room(next_use)) return;
    is_resident_[name] = true;
    ++resident_;
  }
  due_[name] = next_use;
  farthest_.push({next_use, name});
}

// Evicts the farthest next use; guarded: of the blocks that may go, and only past `next_use`.
bool BeladySimulator::make_room(Use next_use) {
  bool is_made = false;
  while (!farthest_.empty()) {
    const Candidate candidate = farthest_.top();
    const Name name = candidate.name;
    if (!is_resident_[name] || due_[name] != candidate.next_use) {
      farthest_.pop();
      continue;
    }
    if (is_guarded_ && candidate.next_use <= next_use) break;
    farthest_.pop();
    if (is_guarded_ && pinned_by_[name] == report_.requests) {
      pinned_.push_back(candidate);
      continue;
    }
    is_resident_[name] = false;
    --resident_;
    ++report_.evictions;
    is_made = true;
    break;
  }
  for (const Candidate& candidate : pinned_) farthest_.push(candidate);
  pinned_.clear();
  return is_made;
}

}  // namespace kvpool
