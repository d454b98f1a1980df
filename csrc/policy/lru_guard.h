// Watches whether LRU would have done better, and says how much heat should count.
//
// Heat pays where uses of the past foretell uses to come, and where the cache is too small for
// recency to help at all. Where neither holds (conversations that end at random, in a cache that
// just holds the live ones), heat keeps what is finished and LRU is the better rule. So a sample of
// the blocks is also run through an LRU list of proportional length; when that list has clearly had
// more hits, heat counts less, down to nothing: then temperature is LRU.
//
// The sample is chosen by fingerprint, so that it holds the same blocks always: all of them in a
// cache of up to kSampleMax blocks, every 2^k-th fingerprint in a larger one.
//
// Promises:  1. weight() is 1 until LRU leads by more than kLead and more than chance explains;
//            2. at most kSampleMax blocks in the list at any size of the cache: 200 KiB in all;
//            3. O(1) a use; a use of a block outside the sample costs one test of a bit.
#pragma once
#include <cstdint>

#include "policy/ghost_table.h"
#include "policy/policy.h"

namespace kvpool {

class LruGuard {
 public:
  LruGuard();

  // A block came in, which is a use that missed. True: it is in the sample, and its later uses and
  // its leaving are to be told as well.
  bool inserted(BlockId id, Fingerprint fp);
  void touched(BlockId id);
  void left(BlockId id);

  // So many blocks are resident, and the cache may be filling still.
  void saw_resident(std::uint64_t resident);
  // A block is evicted with so many resident: that is what the cache holds.
  void saw_full(std::uint64_t resident);

  // Between 0 (only recency counts) and 1 (heat counts in full).
  double weight() const { return weight_; }
  void check_invariants() const {
    recent_.check_invariants();
    residents_.check_invariants();
  }
  std::size_t bytes() const { return recent_.bytes() + residents_.bytes(); }

 private:
  static constexpr std::uint64_t kSampleMax = 2048;
  static constexpr double kLead = 0.002;    // hits per use
  static constexpr double kDeviations = 3;  // of the difference, were it a coin toss each time
  static constexpr double kWeightPerLead = 4;
  static constexpr double kRecovery = 1.0 / 256;  // an adjustment; there are 512 in a window
  static constexpr double kUsesMin = 4096;        // the window, in uses: that, or 32 cachefuls

  bool is_sampled(Fingerprint fp) const;
  void used(Fingerprint fp, bool is_hit);
  void fade();
  void adjust();
  void resample(std::uint64_t resident);

  GhostTable recent_;     // the LRU list: fingerprints
  GhostTable residents_;  // id -> fingerprint, of sampled blocks in the cache
  int sample_shift_ = 0;
  bool is_full_ = false;
  double weight_ = 1;
  double uses_ = 0;
  double lead_ = 0;         // hits of LRU less hits of the cache
  double differences_ = 0;  // uses in which only one of the two had a hit
  std::uint64_t until_adjust_ = 1;
};

}  // namespace kvpool
