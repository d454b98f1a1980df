// What hit rate would memory of another size give? The distances at which blocks are used again.
//
// The distance of a use: the bytes of all other blocks used since the last use of the same one, and
// its own. An LRU cache holds the block at that use exactly if it is at least so large; so the
// distances of all uses are the hit rate at every size. Only blocks whose hashed name lies below a
// threshold are followed, all uses of each, and what is counted of them is scaled up: SHARDS, in
// its form of fixed size (Waldspurger et al., FAST 2015).
//
// What departs from the paper: samples beyond `reach_bytes` are let go before the threshold falls,
// so that a node that runs for months keeps its rate instead of following all it ever saw; counts
// fade with a half-life; distances are bytes; the threshold falls by an eighth at a time; and the
// correction of the paper (SHARDS-adj) is made where it belongs, see corrected().
//
// Promises:  1. a use of a block that is not followed costs a multiplication and a comparison;
//            2. a use of one that is costs O(log samples_max), and a pass over all samples at most
//               once in samples_max / 8 of them; nothing is allocated;
//            3. memory: bytes(), 44 bytes a sample, whatever is used. Not in exact mode, which
//               follows every block there is: for traces and tests.
// Thread rule: one caller at a time.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "base/clock.h"
#include "base/lazy_array.h"
#include "policy/policy.h"

namespace kvpool {

struct ReuseOptions {
  std::uint32_t samples_max = 1 << 14;  // a power of two, 64 at least; 0 = exact
  std::uint64_t reach_bytes = 0;        // no size above this will be asked for; 0 = any may be
  Seconds half_life_s = 3600;           // of what is counted; 0 = it stays
  std::uint64_t salt = 0;               // so that nobody can choose keys that are all followed
};

// `references`, `sampled`, `cold` and `counts` are faded by age.
struct ReuseCurve {
  double references = 0;      // uses, followed or not
  double sampled = 0;         // uses of followed blocks
  double cold = 0;            // first uses, and those beyond the reach; scaled to `references`
  std::uint64_t samples = 0;  // blocks followed now
  double rate = 0;            // share of blocks that are followed
  double seen_bytes = 0;      // of all blocks that an LRU of any size would hold; about
  // counts[i]: uses at distances up to bounds_bytes[i] and above the bound before; scaled and
  // corrected so that they and `cold` add up to `references`. No trailing zeros.
  std::vector<double> bounds_bytes, counts;
};

class Reuse {
 public:
  explicit Reuse(const ReuseOptions& options);

  // A use. A time before the latest one counts as that.
  void add(Fingerprint name, std::uint32_t bytes, Seconds now) {
    add_hashed(hashed(name), bytes, now);
  }
  // The same with hashed(name), which is one for all of the same salt.
  void add_hashed(std::uint64_t hash, std::uint32_t bytes, Seconds now) {
    ++uncounted_;
    if (hash < threshold_) [[unlikely]]
      use(hash, bytes, now, true);
  }
  std::uint64_t hashed(Fingerprint name) const {
    return (name ^ options_.salt) * 0x9e37'79b9'7f4a'7c15u;
  }
  // The block is as new as if it had been used, but nobody asked for it: moved, not counted.
  void refresh(Fingerprint name, std::uint32_t bytes, Seconds now) {
    if (const std::uint64_t hash = hashed(name); hash < threshold_) use(hash, bytes, now, false);
  }
  // Somebody wanted it gone: it lies between no two uses any more, and its next use is a first one.
  void forget(Fingerprint name) {
    if (const std::uint64_t hash = hashed(name); hash < threshold_) drop(hash);
  }
  // So for all blocks. What was counted stays.
  void forget_all();

  void set_reach(std::uint64_t reach_bytes) { options_.reach_bytes = reach_bytes; }
  ReuseCurve curve(Seconds now) const;
  std::size_t bytes() const;
  void check_invariants() const;

  // Eight bins a doubling: what lies inside one is taken as spread evenly.
  static constexpr int kBinsPerDoubling = 8;
  static constexpr int kLowestLog2 = 9, kHighestLog2 = 50;
  static constexpr std::size_t kBins = (kHighestLog2 - kLowestLog2) * kBinsPerDoubling + 1;
  static double bound_bytes(std::size_t bin);

 private:
  using Place = std::uint32_t;  // in order of last use; a place is used once, until a rebuild
  struct Sample {
    std::uint64_t hash;
    std::uint32_t bytes;  // 0: nobody is here any more
    float uses;           // weights of the counted ones
  };
  static_assert(sizeof(Sample) == 16);

  void use(std::uint64_t hash, std::uint32_t bytes, Seconds now, bool counts);
  void count(std::size_t bin, double uses_before);
  static std::size_t bin_of(double distance_bytes);
  void count_references();
  void drop(std::uint64_t hash);
  void rebuild();
  void make_room();
  std::uint32_t count_below(std::uint64_t threshold) const;
  void resize(std::uint32_t samples_max);
  bool is_full() const { return samples_used_ == samples_max_; }
  double rate() const;

  // The table: hash -> place + 1, open addressing, twice samples_max_ long.
  std::uint64_t home(std::uint64_t hash) const;
  std::uint64_t find(std::uint64_t hash) const;  // where it is, or would be
  void take_out(std::uint64_t at);
  // Sums of bytes over places, as a Fenwick tree.
  void add_bytes(Place place, std::int64_t bytes);
  std::uint64_t bytes_until(Place place) const;

  void advance(Seconds now);
  std::array<double, kBins + 1> corrected(double references) const;

  // What every use needs, together.
  std::uint64_t threshold_ = ~std::uint64_t{0};
  std::uint64_t uncounted_ = 0;  // uses since references_ was brought up to date
  ReuseOptions options_;
  bool is_exact_;
  std::uint32_t samples_max_ = 0;
  std::uint32_t places_ = 0;  // length of samples_ and sums_
  Place next_ = 0;            // first unused place
  std::uint32_t samples_used_ = 0;
  std::uint64_t bytes_ = 0;  // of all samples
  LazyArray<Sample> samples_;
  LazyArray<std::uint64_t> sums_;
  LazyArray<std::uint32_t> table_;

  // A use now counts weight_, which doubles every half-life: older counts fade without being
  // touched. Before it gets too large all are scaled down.
  bool is_started_ = false;
  Seconds now_ = 0, origin_ = 0;
  double weight_ = 1;
  double references_ = 0, sampled_ = 0;
  static constexpr std::size_t kCold = kBins;  // of first uses
  std::array<double, kBins + 1> counts_{};
  std::array<double, kBins + 1> doubts_{};  // of the variance of the sum of counts_
};

}  // namespace kvpool
