// Shared by the tests of policies: the seed of the run and small random choices.
#pragma once
#include <cstdint>
#include <cstdio>
#include <random>

#include "block_random.h"

namespace kvpool::testing {

// KVPOOL_SEED=n repeats a run, as in all other tests.
inline std::uint64_t seed() {
  static const std::uint64_t chosen = [] {
    std::printf("policy: KVPOOL_SEED=%llu\n", static_cast<unsigned long long>(test::run_seed()));
    return test::run_seed();
  }();
  return chosen;
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  // Below `bound`.
  std::uint64_t below(std::uint64_t bound) { return engine_() % bound; }
  bool one_in(std::uint64_t n) { return below(n) == 0; }

 private:
  std::mt19937_64 engine_;
};

}  // namespace kvpool::testing
