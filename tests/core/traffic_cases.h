// What callers asked for and were told, counted beside the pool: its own figures are held to it.
#pragma once
#include <algorithm>
#include <numeric>

#include "node/node.h"
#include "node_cases.h"

namespace kvpool::test {

struct Tally {
  std::uint64_t lookups = 0, lookup_blocks = 0, present = 0, lookup_missed = 0;
  std::uint64_t gets = 0, get_blocks = 0, loaded = 0;
  std::array<std::uint64_t, kMisses> missed{};
  std::uint64_t put_blocks = 0;
  std::array<std::uint64_t, kPutStatuses> put_status{};

  void looked(std::size_t asked, std::size_t found) {
    ++lookups;
    lookup_blocks += asked;
    present += found;
    lookup_missed += found < asked;
  }
  void got(std::size_t asked, std::size_t delivered, Miss why) {
    ++gets;
    get_blocks += asked;
    loaded += delivered;
    if (delivered == asked) return;
    ++missed[static_cast<std::size_t>(why)];
    missed[static_cast<std::size_t>(Miss::behind)] += asked - delivered - 1;
  }
  void put(std::span<const PutStatus> statuses) {
    put_blocks += statuses.size();
    for (const PutStatus status : statuses) ++put_status[static_cast<std::size_t>(status)];
  }
  void put(PutStatus status) { put({&status, 1}); }
  void add(const Tally& more) {
    lookups += more.lookups;
    lookup_blocks += more.lookup_blocks;
    present += more.present;
    lookup_missed += more.lookup_missed;
    gets += more.gets;
    get_blocks += more.get_blocks;
    loaded += more.loaded;
    put_blocks += more.put_blocks;
    for (std::size_t i = 0; i < missed.size(); ++i) missed[i] += more.missed[i];
    for (std::size_t i = 0; i < put_status.size(); ++i) put_status[i] += more.put_status[i];
  }
};

inline std::uint64_t sum(std::span<const std::uint64_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
}

inline void check_sums(const TrafficTotals& totals) {
  CHECK(totals.lookup_blocks ==
        totals.lookup_dram + totals.lookup_ssd + totals.lookup_missed + totals.lookup_behind);
  CHECK(totals.get_blocks == totals.loaded() + sum(totals.missed));
  CHECK(totals.put_blocks == sum(totals.put_status));
  CHECK(totals.views <= totals.gets);
  CHECK(totals.view_blocks <= totals.loaded());
}

// All but `gets`: a call may take several requests.
inline void check_blocks(const TrafficTotals& totals, const Tally& tally) {
  check_sums(totals);
  CHECK(totals.lookups == tally.lookups);
  CHECK(totals.lookup_blocks == tally.lookup_blocks);
  CHECK(totals.lookup_dram + totals.lookup_ssd == tally.present);
  CHECK(totals.lookup_missed == tally.lookup_missed);
  CHECK(totals.get_blocks == tally.get_blocks);
  CHECK(totals.loaded() == tally.loaded);
  CHECK(totals.missed == tally.missed);
  CHECK(totals.put_blocks == tally.put_blocks);
  CHECK(totals.put_status == tally.put_status);
}

inline TrafficTotals traffic_of(Node& node, const Namespace& space) {
  const std::vector<SpaceTraffic> all = node.traffic();
  REQUIRE(space.number < all.size());
  REQUIRE(all[space.number].space == &space);
  CHECK(all[space.number].blocks == space.blocks);
  return all[space.number].totals;
}

}  // namespace kvpool::test
