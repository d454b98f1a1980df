// What was asked of one namespace and what became of it, block by block.
//
// Every call is counted once, at its end, whatever it came through: so at rest
//   lookup_blocks = lookup_dram + lookup_ssd + lookup_remote + lookup_missed + lookup_behind
//   get_blocks    = loaded_dram + loaded_ssd + loaded_remote + the sum of missed
//   put_blocks    = the sum of put_status
// It is of the namespace, not of its incarnation: a drop leaves it as it is, and nothing ever goes
// down but by wrapping around.
// Cost:      a lookup or get that finds all adds to three words of one line. That line is one of
//            kStripes, by thread, so that threads which read at the same time seldom share it.
// Thread rule: every method from any thread. totals() beside others sees some calls half.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "node/index_reader.h"
#include "node/miss.h"
#include "node/put_status.h"

namespace kvpool {

// What a get, a view or an acquire has found; `why`: of the first block that it did not.
struct Loaded {
  std::size_t dram = 0, ssd = 0, remote = 0;
  Miss why = Miss::none;

  std::size_t blocks() const { return dram + ssd + remote; }
};

struct TrafficTotals {
  std::uint64_t lookups = 0, lookup_blocks = 0, lookup_dram = 0, lookup_ssd = 0;
  std::uint64_t lookup_remote = 0;
  std::uint64_t lookup_missed = 0, lookup_behind = 0;  // the first that is missing; those behind it
  std::uint64_t gets = 0, get_blocks = 0, loaded_dram = 0, loaded_ssd = 0;
  std::uint64_t loaded_remote = 0;              // fetched from another member for this get
  std::uint64_t views = 0, view_blocks = 0;     // of the gets and of what they loaded: in place
  std::array<std::uint64_t, kMisses> missed{};  // blocks; `behind`: all but the first of a call
  std::uint64_t put_blocks = 0;
  std::array<std::uint64_t, kPutStatuses> put_status{};

  std::uint64_t loaded() const { return loaded_dram + loaded_ssd + loaded_remote; }
  std::uint64_t missed_for(Miss why) const { return missed[static_cast<std::size_t>(why)]; }
  std::uint64_t put_as(PutStatus status) const {
    return put_status[static_cast<std::size_t>(status)];
  }
};

class Traffic {
 public:
  static constexpr std::size_t kStripes = 8;

  void count_lookup(std::size_t asked, const Looked& looked) {
    Stripe& mine = stripes_[stripe_of_thread()];
    add(mine.lookups, 1);
    add(mine.lookup_blocks, asked);
    add(mine.lookup_dram, looked.present - looked.on_ssd - looked.remote);
    add(mine.lookup_ssd, looked.on_ssd);
    add(mine.lookup_remote, looked.remote);
    if (looked.present == asked) return;
    add(mine.lookup_missed, 1);
    add(mine.lookup_behind, asked - looked.present - 1);
  }

  void count_get(std::size_t asked, const Loaded& loaded) {
    Stripe& mine = stripes_[stripe_of_thread()];
    add(mine.gets, 1);
    add(mine.get_blocks, asked);
    add(mine.loaded_dram, loaded.dram);
    add(mine.loaded_ssd, loaded.ssd);
    add(mine.loaded_remote, loaded.remote);
    if (loaded.blocks() == asked) return;
    add(missed_[static_cast<std::size_t>(loaded.why)], 1);
    add(missed_[static_cast<std::size_t>(Miss::behind)], asked - loaded.blocks() - 1);
  }

  // A get that pins instead of copying.
  void count_view(std::size_t asked, const Loaded& loaded) {
    Stripe& mine = stripes_[stripe_of_thread()];
    add(mine.views, 1);
    add(mine.view_blocks, loaded.blocks());
    count_get(asked, loaded);
  }

  // Those from a payload_due on are asked for again, with payload, and count then.
  void count_put(std::span<const PutStatus> statuses) {
    std::array<std::uint64_t, kPutStatuses> counts{};
    std::size_t asked = 0;
    for (; asked < statuses.size() && statuses[asked] != PutStatus::payload_due; ++asked)
      ++counts[static_cast<std::size_t>(statuses[asked])];
    add(put_blocks_, asked);
    for (std::size_t i = 0; i < counts.size(); ++i) add(put_status_[i], counts[i]);
  }

  // What somebody else has counted (node/page_traffic.h).
  void add_reads(const TrafficTotals& more) {
    Stripe& any = stripes_[0];
    add(any.lookups, more.lookups);
    add(any.lookup_blocks, more.lookup_blocks);
    add(any.lookup_dram, more.lookup_dram);
    add(any.lookup_ssd, more.lookup_ssd);
    add(any.lookup_remote, more.lookup_remote);
    add(any.lookup_missed, more.lookup_missed);
    add(any.lookup_behind, more.lookup_behind);
    add(any.gets, more.gets);
    add(any.get_blocks, more.get_blocks);
    add(any.loaded_dram, more.loaded_dram);
    add(any.loaded_ssd, more.loaded_ssd);
    add(any.loaded_remote, more.loaded_remote);
    add(any.views, more.views);
    add(any.view_blocks, more.view_blocks);
    for (std::size_t i = 0; i < missed_.size(); ++i) add(missed_[i], more.missed[i]);
  }

  TrafficTotals totals() const {
    TrafficTotals all;
    for (const Stripe& each : stripes_) {
      all.lookups += read(each.lookups);
      all.lookup_blocks += read(each.lookup_blocks);
      all.lookup_dram += read(each.lookup_dram);
      all.lookup_ssd += read(each.lookup_ssd);
      all.lookup_remote += read(each.lookup_remote);
      all.lookup_missed += read(each.lookup_missed);
      all.lookup_behind += read(each.lookup_behind);
      all.gets += read(each.gets);
      all.get_blocks += read(each.get_blocks);
      all.loaded_dram += read(each.loaded_dram);
      all.loaded_ssd += read(each.loaded_ssd);
      all.loaded_remote += read(each.loaded_remote);
      all.views += read(each.views);
      all.view_blocks += read(each.view_blocks);
    }
    std::ranges::transform(missed_, all.missed.begin(), read);
    all.put_blocks = read(put_blocks_);
    std::ranges::transform(put_status_, all.put_status.begin(), read);
    return all;
  }

 private:
  using Count = std::atomic<std::uint64_t>;
  struct Stripe {
    alignas(64) Count lookups{0};
    Count lookup_blocks{0}, lookup_dram{0}, lookup_ssd{0}, lookup_remote{0}, lookup_missed{0},
        lookup_behind{0};
    alignas(64) Count gets{0};
    Count get_blocks{0}, loaded_dram{0}, loaded_ssd{0}, loaded_remote{0}, views{0}, view_blocks{0};
  };
  static_assert(sizeof(Stripe) == 128);

  static void add(Count& count, std::uint64_t more) {
    if (more != 0) count.fetch_add(more, std::memory_order_relaxed);
  }
  static std::uint64_t read(const Count& count) { return count.load(std::memory_order_relaxed); }
  // Threads in the order in which they first came, so that few of them never share.
  static std::size_t stripe_of_thread() {
    static constinit std::atomic<std::uint32_t> next{1};
    static constinit thread_local std::uint32_t mine = 0;  // 0: none yet
    if (mine == 0) mine = next.fetch_add(1, std::memory_order_relaxed) | kStripes;
    return mine % kStripes;
  }

  std::array<Stripe, kStripes> stripes_;
  // A call that misses copies less than it was asked to, and a put takes the node's lock: no
  // stripes for those.
  alignas(64) std::array<Count, kMisses> missed_{};
  alignas(64) Count put_blocks_{0};
  std::array<Count, kPutStatuses> put_status_{};
};

}  // namespace kvpool
