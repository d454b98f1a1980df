// The reuse distances of a node: of all its blocks together, and of each namespace by itself.
//
// The curve of a namespace is that of memory which holds nothing else. Namespaces beyond the first
// kSpacesMax that are used count in `all` alone.
// Memory: 0.7 MiB, and 96 KiB for each namespace that has a curve: 3.7 MiB at most.
// Thread rule: the node's lock.
#pragma once
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "policy/reuse.h"

namespace kvpool {

class ReuseBook {
 public:
  static constexpr std::size_t kSpacesMax = 32;
  static constexpr std::uint32_t kSamples = 1 << 14, kSpaceSamples = 1 << 11;

  explicit ReuseBook(std::uint64_t salt) : salt_(salt), all_({.salt = salt}) {}

  struct Use {
    std::uint32_t space;  // its number
    Fingerprint name;
    std::uint32_t bytes;
  };
  // As in Reuse.
  void add(const Use& use, Seconds now) {
    all_.add(use.name, use.bytes, now);
    if (Reuse* const own = of(use.space)) own->add(use.name, use.bytes, now);
  }
  void refresh(const Use& use, Seconds now) {
    all_.refresh(use.name, use.bytes, now);
    if (Reuse* const own = of(use.space)) own->refresh(use.name, use.bytes, now);
  }
  void forget(const Use& use) {
    all_.forget(use.name);
    if (Reuse* const own = of(use.space)) own->forget(use.name);
  }
  // Of a namespace that was dropped: blocks still around are forgotten as they go.
  void forget_in_all(Fingerprint name) { all_.forget(name); }
  void drop_space(std::uint32_t space) {
    if (space < by_space_.size() && by_space_[space] > 0) own_[by_space_[space] - 1u]->forget_all();
  }
  void set_reach(std::uint64_t reach_bytes) {
    reach_bytes_ = reach_bytes;
    all_.set_reach(reach_bytes);
    for (const auto& own : own_) own->set_reach(reach_bytes);
  }

  const Reuse& all() const { return all_; }
  // (number, curve) pairs.
  template <typename Visit>
  void for_each_space(Visit visit) const {
    for (std::uint32_t space = 0; space < by_space_.size(); ++space)
      if (by_space_[space] > 0) visit(space, *own_[by_space_[space] - 1u]);
  }
  void check_invariants() const {
    all_.check_invariants();
    for (const auto& own : own_) own->check_invariants();
  }
  std::size_t bytes() const {
    std::size_t bytes = all_.bytes() + by_space_.size();
    for (const auto& own : own_) bytes += own->bytes();
    return bytes;
  }

 private:
  static constexpr std::uint8_t kNone = 0;

  Reuse* of(std::uint32_t space) {
    if (space >= by_space_.size() || by_space_[space] == kNone) return first_use(space);
    return own_[by_space_[space] - 1u].get();
  }
  Reuse* first_use(std::uint32_t space) {
    if (own_.size() == kSpacesMax) return nullptr;
    if (space >= by_space_.size()) by_space_.resize(space + 1, kNone);
    own_.push_back(std::make_unique<Reuse>(
        ReuseOptions{.samples_max = kSpaceSamples, .reach_bytes = reach_bytes_, .salt = salt_}));
    by_space_[space] = static_cast<std::uint8_t>(own_.size());
    return own_.back().get();
  }

  const std::uint64_t salt_;
  std::uint64_t reach_bytes_ = 0;
  Reuse all_;
  std::vector<std::uint8_t> by_space_;  // place in own_ plus one
  std::vector<std::unique_ptr<Reuse>> own_;
};

}  // namespace kvpool
