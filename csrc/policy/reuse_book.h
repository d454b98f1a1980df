// The reuse distances of a node: of all its blocks together, and of each namespace by itself.
//
// The curve of a namespace is that of memory which holds nothing else. Namespaces beyond the first
// kSpacesMax that are used count in `all` alone.
// Memory: 0.7 MiB, and 96 KiB for each namespace that has a curve: 3.7 MiB at most.
// Thread rule: the node's lock.
#pragma once
#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "block/key.h"
#include "policy/reuse.h"

namespace kvpool {

class ReuseBook {
 public:
  static constexpr std::size_t kSpacesMax = 32;
  static constexpr std::uint32_t kSamples = 1 << 14, kSpaceSamples = 1 << 11;

  explicit ReuseBook(std::uint64_t salt) : salt_(salt), all_({.salt = salt}) {}

  // Of a block in its namespace. Cheaper than its fingerprint, since every use needs it: keys that
  // were made to have one name would count as one block.
  static Fingerprint name_of(std::uint32_t incarnation, const Hash128& key) {
    return (key.low + incarnation * 0xd6e8'feb8'6659'fd93u) ^ key.high * 0xff51'afd7'ed55'8ccdu;
  }

  // As in Reuse; `space`: its number.
  void add(std::uint32_t space, Fingerprint name, std::uint32_t bytes, Seconds now) {
    const std::uint64_t hash = all_.hashed(name);
    all_.add_hashed(hash, bytes, now);
    if (Reuse* const own = of(space)) own->add_hashed(hash, bytes, now);
  }
  void refresh(std::uint32_t space, Fingerprint name, std::uint32_t bytes, Seconds now) {
    all_.refresh(name, bytes, now);
    if (Reuse* const own = of(space)) own->refresh(name, bytes, now);
  }
  void forget(std::uint32_t space, Fingerprint name) {
    all_.forget(name);
    if (Reuse* const own = of(space)) own->forget(name);
  }
  // Of a namespace that was dropped: blocks still around are forgotten as they go.
  void forget_in_all(Fingerprint name) { all_.forget(name); }
  void drop_space(std::uint32_t space) {
    if (space < by_space_.size() && by_space_[space] != nullptr) by_space_[space]->forget_all();
  }
  void set_reach(std::uint64_t reach_bytes) {
    reach_bytes_ = reach_bytes;
    all_.set_reach(reach_bytes);
    for (const auto& own : own_) own->set_reach(reach_bytes);
  }

  const Reuse& all() const { return all_; }
  // Numbers and distances.
  template <typename Visit>
  void for_each_space(Visit visit) const {
    for (std::uint32_t space = 0; space < by_space_.size(); ++space)
      if (by_space_[space] != nullptr) visit(space, *by_space_[space]);
  }
  void check_invariants() const {
    all_.check_invariants();
    for (const auto& own : own_) own->check_invariants();
  }
  std::size_t bytes() const {
    std::size_t bytes = all_.bytes() + by_space_.size() * sizeof(Reuse*);
    for (const auto& own : own_) bytes += own->bytes();
    return bytes;
  }

 private:
  Reuse* of(std::uint32_t space) {
    if (space < by_space_.size() && by_space_[space] != nullptr) [[likely]]
      return by_space_[space];
    return first_use(space);
  }
  Reuse* first_use(std::uint32_t space) {
    if (own_.size() == kSpacesMax) return nullptr;
    try {
      if (space >= by_space_.size()) by_space_.resize(space + 1);
      own_.push_back(std::make_unique<Reuse>(
          ReuseOptions{.samples_max = kSpaceSamples, .reach_bytes = reach_bytes_, .salt = salt_}));
    } catch (const std::bad_alloc&) {
      return nullptr;  // no curve yet; asked again at the next use
    }
    return by_space_[space] = own_.back().get();
  }

  const std::uint64_t salt_;
  std::uint64_t reach_bytes_ = 0;
  Reuse all_;
  std::vector<Reuse*> by_space_;  // nullptr: not used yet, or there was no room
  std::vector<std::unique_ptr<Reuse>> own_;
};

}  // namespace kvpool
