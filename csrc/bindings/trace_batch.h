// A batch of a trace as Python hands it over: flat arrays, of which nothing is believed.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cmath>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "policy/simulator.h"

namespace kvpool {

template <typename T>
using TraceColumn =
    nanobind::ndarray<const T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

// Raises ValueError when they disagree, or for a time that is no number.
inline void check_trace_batch(std::span<const double> times, std::span<const std::uint32_t> lengths,
                              std::size_t ids) {
  if (times.size() != lengths.size()) {
    throw nanobind::value_error(("times_s has " + std::to_string(times.size()) +
                                 " requests, lengths " + std::to_string(lengths.size()))
                                    .c_str());
  }
  const auto total = std::accumulate(lengths.begin(), lengths.end(), std::uint64_t{0});
  if (total != ids) {
    throw nanobind::value_error(
        ("lengths add up to " + std::to_string(total) + " blocks, ids has " + std::to_string(ids))
            .c_str());
  }
  for (const double time : times)
    if (!std::isfinite(time)) throw nanobind::value_error("times_s must be finite numbers");
}

// Ids are names: only their equality counts, so a signed one is taken by its bits.
template <typename Id>
void intern_all(BlockNames& names, std::span<const Id> ids, std::vector<BlockNames::Name>& into) {
  into.clear();
  for (const Id id : ids) into.push_back(names.intern(static_cast<std::uint64_t>(id)));
}

}  // namespace kvpool
