// Ghosts against a list, and the array they live in.
#include <doctest/doctest.h>

#include <algorithm>
#include <list>
#include <utility>

#include "base/lazy_array.h"
#include "policy/ghost_table.h"
#include "policy_testing.h"

namespace kvpool {
namespace {

using testing::Random;

TEST_CASE("ghosts: same answers as a list, the oldest out first, never above the bound") {
  Random random(testing::seed());
  std::uint64_t ghosts_max = 100;
  GhostTable table(ghosts_max);
  std::list<std::pair<Fingerprint, std::uint64_t>> model;  // oldest first
  auto forget = [&](Fingerprint fp) {
    model.remove_if([&](const auto& ghost) { return ghost.first == fp; });
  };
  for (std::uint64_t step = 0; step < 100'000; ++step) {
    const Fingerprint fp = random.below(300) << 56;  // Fingerprints may be alike in their low bits.
    if (random.one_in(3)) {
      const auto found = std::find_if(model.begin(), model.end(),
                                      [&](const auto& ghost) { return ghost.first == fp; });
      const auto word = table.recall(fp);
      REQUIRE(word.has_value() == (found != model.end()));
      if (word) REQUIRE(*word == found->second);
      forget(fp);
    } else {
      table.remember(fp, step);
      forget(fp);
      if (ghosts_max > 0) model.emplace_back(fp, step);
      if (model.size() > ghosts_max) model.pop_front();
    }
    if (random.one_in(1000)) {
      ghosts_max = random.below(250);
      table.set_max(ghosts_max);
      while (model.size() > ghosts_max) model.pop_front();
    }
    REQUIRE(table.size() == model.size());
    if (step % 64 == 0) table.check_invariants();
  }
}

TEST_CASE("ghosts: a bound lowered far is reached in steps, oldest first, and memory comes back") {
  constexpr std::uint64_t kMany = 100'000;
  GhostTable table(kMany);
  for (Fingerprint fp = 0; fp < kMany; ++fp) table.remember(fp, fp);
  const std::size_t full_bytes = table.bytes();
  CHECK(full_bytes <= 32 * kMany + 2 * 4096);
  table.set_max(1000);
  const std::uint64_t left = table.size();
  CHECK(left < kMany);
  CHECK(left > 1000);  // One call does a bounded share of the work.
  for (Fingerprint fp = kMany; fp < 2 * kMany && table.size() > 1000; ++fp) table.remember(fp, fp);
  CHECK(table.size() == 1000);
  for (Fingerprint fp = 3 * kMany; fp < 4 * kMany; ++fp) table.remember(fp, fp);
  table.check_invariants();
  CHECK(table.bytes() <= 32 * 1000 + 2 * 4096);
  CHECK(table.recall(4 * kMany - 1) == 4 * kMany - 1);
  CHECK(table.recall(4 * kMany - 1000) == 4 * kMany - 1000);
  CHECK_FALSE(table.recall(4 * kMany - 1001).has_value());
  table.set_max(kMany);
  for (Fingerprint fp = 0; fp < kMany; ++fp) table.remember(fp, fp);
  CHECK(table.size() == kMany);
  table.check_invariants();
}

TEST_CASE("ghosts: none are kept when none may be") {
  GhostTable table(0);
  table.remember(1, 1);
  CHECK(table.size() == 0);
  CHECK_FALSE(table.recall(1).has_value());
  CHECK(table.bytes() == 0);
}

TEST_CASE("lazy array: fresh elements are zero, trimmed ones are zero again") {
  LazyArray<std::uint64_t> array(10'000);
  CHECK(array.bytes() == 0);
  for (std::size_t i = 0; i < 10'000; ++i) {
    REQUIRE(array[i] == 0);
    array[i] = i + 1;
  }
  array.reach(10'000);
  CHECK(array.bytes() == 80 * 1024 - 80 * 1024 % 4096);
  array.trim(512);  // exactly one page
  CHECK(array.bytes() == 4096);
  CHECK(array[511] == 512);
  CHECK(array[512] == 0);
  CHECK(array[9'999] == 0);
}

TEST_CASE("lazy array: extending keeps what was written and moving hands it over") {
  LazyArray<std::uint32_t> array(1024);
  array[1023] = 7;
  array.reach(1024);
  array.extend(std::size_t{1} << 32);
  CHECK(array[1023] == 7);
  CHECK(array[(std::size_t{1} << 32) - 1] == 0);
  LazyArray<std::uint32_t> other = std::move(array);
  CHECK(other[1023] == 7);
  CHECK(other.length_max() == std::size_t{1} << 32);
  CHECK_THROWS_AS(LazyArray<std::uint32_t>(~std::size_t{0} / 8), std::bad_alloc);
}

}  // namespace
}  // namespace kvpool
