// Seeded randomness of the block tests. KVPOOL_SEED=n repeats a run; without it every run differs.
#pragma once
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

namespace kvpool::test {

inline std::uint64_t run_seed() {
  const char* given = std::getenv("KVPOOL_SEED");
  static const std::uint64_t seed =
      given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  return seed;
}

class Random {
 public:
  explicit Random(const char* test) : engine_(run_seed()) {
    std::printf("%s: KVPOOL_SEED=%llu\n", test, static_cast<unsigned long long>(run_seed()));
  }
  // Both ends included.
  template <typename Int>
  Int between(Int low, Int high) {
    return std::uniform_int_distribution<Int>(low, high)(engine_);
  }
  bool coin() { return between(0, 1) == 1; }
  std::vector<unsigned char> bytes(std::size_t count) {
    std::vector<unsigned char> out(count);
    for (auto& byte : out) byte = static_cast<unsigned char>(engine_());
    return out;
  }
  std::mt19937_64& engine() { return engine_; }

 private:
  std::mt19937_64 engine_;
};

template <typename Bytes>
std::string hex(const Bytes& bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const auto byte : bytes) {
    text += kDigits[static_cast<unsigned char>(byte) >> 4];
    text += kDigits[static_cast<unsigned char>(byte) & 15];
  }
  return text;
}

}  // namespace kvpool::test
