// Shared by the tests of policies: a printed seed and small random choices.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

namespace kvpool::testing {

// KVPOOL_TEST_SEED repeats a run; otherwise every run is a new one.
inline std::uint64_t seed() {
  static const std::uint64_t chosen = [] {
    const char* given = std::getenv("KVPOOL_TEST_SEED");
    const std::uint64_t made =
        given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
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
