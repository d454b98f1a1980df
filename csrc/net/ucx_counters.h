// What a UCX lane has done, counted where it happens.
#pragma once
#include <atomic>
#include <cstdint>

namespace kvpool {

struct UcxCounters {
  std::atomic<std::uint64_t> whole{0}, damaged{0}, failed{0};  // blocks that were asked for
  std::atomic<std::uint64_t> bytes{0};                         // of whole ones
  std::atomic<std::uint64_t> late{0};                          // deadlines that closed an endpoint
  std::atomic<std::uint64_t> errors{0};                        // peers that were found broken
};

}  // namespace kvpool
