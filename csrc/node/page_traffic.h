// What a client has counted in its page, as the node takes it: only what has come since it looked
// last, so that what it has taken never goes down, whatever the client does to its words.
//
// A client may write anything there. It counts for what it says, up to kWordMax for each word in
// its life: more than any client reads, and so few that sums of thousands of them fit a word.
// Sums are made here, never read, so that those of a namespace stay right (node/traffic.h).
// Thread rule: one thread at a time (the node's lock); the client writes beside it.
#pragma once
#include <array>
#include <cstdint>

#include "node/client_page.h"
#include "node/traffic.h"

namespace kvpool {

// What one client has read by itself, in all namespaces.
struct ClientTotals {
  std::uint64_t gets = 0, get_blocks = 0, get_bytes = 0;  // copied out
  std::uint64_t views = 0, view_blocks = 0;               // in place

  void add(const ClientTotals& more) {
    gets += more.gets;
    get_blocks += more.get_blocks;
    get_bytes += more.get_bytes;
    views += more.views;
    view_blocks += more.view_blocks;
  }
};

class PageTraffic {
 public:
  static constexpr std::uint64_t kWordMax = 1ull << 52;

  struct More {
    std::uint64_t space = 0;  // TrafficRow::space
    TrafficTotals traffic{};
    ClientTotals client{};  // without bytes: the page does not know how large a block is
  };
  // visit(More) of each row that says more than it did.
  template <typename Visit>
  void take(const ClientPage& page, Visit visit) {
    for (std::uint64_t left = page.traffic.in_use.load(std::memory_order_relaxed); left != 0;
         left &= left - 1) {
      const auto row = static_cast<std::uint32_t>(__builtin_ctzll(left));
      const std::uint64_t space =
          page.traffic[row][TrafficRow::space].load(std::memory_order_relaxed);
      if (space == 0) continue;
      Words more;
      if (take_row(page.traffic[row], taken_[row], more)) visit(told(space, more));
    }
  }

 private:
  using Words = std::array<std::uint64_t, TrafficRow::kWords>;

  static bool take_row(const TrafficRow& row, Words& taken, Words& more) {
    bool is_more = false;
    for (std::uint32_t at = TrafficRow::space + 1; at < TrafficRow::kWords; ++at) {
      const std::uint64_t now = std::min(row[at].load(std::memory_order_relaxed), kWordMax);
      more[at] = now > taken[at] ? now - taken[at] : 0;
      taken[at] += more[at];
      is_more |= more[at] != 0;
    }
    return is_more;
  }

  static More told(std::uint64_t space, const Words& words) {
    More more{.space = space};
    more.client = {.gets = words[TrafficRow::gets],
                   .get_blocks = words[TrafficRow::loaded],
                   .views = words[TrafficRow::views],
                   .view_blocks = words[TrafficRow::view_blocks]};
    TrafficTotals& traffic = more.traffic;
    traffic.lookups = words[TrafficRow::lookups];
    traffic.lookup_dram = words[TrafficRow::lookup_dram];
    traffic.lookup_ssd = words[TrafficRow::lookup_ssd];
    traffic.lookup_missed = words[TrafficRow::lookup_missed];
    traffic.lookup_behind = words[TrafficRow::lookup_behind];
    traffic.lookup_blocks =
        traffic.lookup_dram + traffic.lookup_ssd + traffic.lookup_missed + traffic.lookup_behind;
    traffic.views = more.client.views;
    traffic.view_blocks = more.client.view_blocks;
    traffic.gets = more.client.gets + more.client.views;
    traffic.loaded_dram = more.client.get_blocks + more.client.view_blocks;
    traffic.get_blocks = traffic.loaded_dram;
    for (std::uint32_t why = 0; why < kMisses; ++why) {
      traffic.missed[why] = words[TrafficRow::missed + why];
      traffic.get_blocks += traffic.missed[why];
    }
    return more;
  }

  std::array<Words, kTrafficRows> taken_{};
};

}  // namespace kvpool
