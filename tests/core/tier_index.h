// Groups of made-up blocks for the tests of the SSD index.
#pragma once
#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "block_random.h"
#include "tier/index_store.h"
#include "tier_files.h"

namespace kvpool::test {

// In memory, thousands of commits take no time; it is as good as a disk unless that is the point.
inline std::string memory_folder() {
  const std::filesystem::path memory = "/dev/shm";
  return std::filesystem::is_directory(memory) ? memory : std::filesystem::temp_directory_path();
}

inline TierMeta meta_of(std::uint64_t index_bytes, std::uint64_t units = 1 << 20) {
  TierMeta meta;
  for (int i = 0; i < 16; ++i) meta.tier_id[i] = static_cast<std::uint8_t>(i + 1);
  meta.capacity_bytes = index_bytes + units * kUnitBytes;
  meta.units = units;
  meta.index_bytes = index_bytes;
  meta.tau_s = 600;
  return meta;
}

inline Hash128 random_hash(Random& random) {
  return {random.between<std::uint64_t>(0, ~0ull), random.between<std::uint64_t>(0, ~0ull)};
}

// `number` makes the place: no two writes of a test share one.
inline SsdWrite random_write(Random& random, std::uint32_t space, std::uint32_t number) {
  SsdWrite write;
  write.key = BlockKey::of(space, random_hash(random));
  write.place = {number / 16, number % 16, 65536};
  write.sum = random_hash(random);
  write.parent = random_hash(random);
  write.heat = static_cast<float>(number) / 8;
  write.stamp_s = 1'700'000'000 + number;
  write.written = true;
  return write;
}

template <typename Record>
std::string bytes_of(const Record& record) {
  return std::string(reinterpret_cast<const char*>(&record), sizeof(record));
}

}  // namespace kvpool::test
