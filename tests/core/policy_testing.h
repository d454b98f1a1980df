// Shared by the tests of policies: a printed seed and small random choices.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

namespace kvpool::testing {

// The same run every time, unless KVPOOL_TEST_SEED says another. Known: with 1325774122 the model
// of "half-life that follows" and the policy differ by 0.02 half-lives about one victim; one seed
// in some two hundred does that, and it is not understood yet.
inline std::uint64_t seed() {
  static const std::uint64_t chosen = [] {
    const char* given = std::getenv("KVPOOL_TEST_SEED");
    const std::uint64_t made = given != nullptr ? std::strtoull(given, nullptr, 10) : 20261129;
    std::printf("KVPOOL_TEST_SEED=%llu\n", static_cast<unsigned long long>(made));
    return made;
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
