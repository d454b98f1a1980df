// The table of what left: the latest are remembered, by the latest reason, in bounded memory.
#include <doctest/doctest.h>

#include <algorithm>
#include <unordered_map>

#include "block/key.h"
#include "node/departures.h"
#include "policy_testing.h"

using namespace kvpool;
using kvpool::testing::Random;

TEST_CASE("departures: what is found is the latest, as it was noted") {
  Random random(kvpool::testing::seed());
  constexpr std::uint32_t kMax = 256;
  Departures table(kMax, random.below(1ull << 60));
  std::unordered_map<Fingerprint, Departure> latest;
  std::uint64_t found = 0, asked = 0;
  for (int i = 0; i < 20000; ++i) {
    const Fingerprint name = random.one_in(2) ? mix64(random.below(200)) : random.below(200);
    const Departure departure{.why = static_cast<Gone>(random.below(kGoneReasons)),
                              .was_on_ssd = random.one_in(2),
                              .status = static_cast<std::uint8_t>(random.below(12)),
                              .heat = static_cast<float>(random.below(1000)),
                              .when = 1000.0 + i};
    table.prefetch(name);
    table.note(name, departure);
    latest[name] = departure;
    REQUIRE(table.look(name).has_value());
    if (i % 97 != 0) continue;
    for (const auto& [each, expected] : latest) {
      ++asked;
      const auto answer = table.look(each);
      if (!answer) continue;
      ++found;
      REQUIRE(answer->why == expected.why);
      REQUIRE(answer->was_on_ssd == expected.was_on_ssd);
      REQUIRE(answer->status == expected.status);
      REQUIRE(answer->heat == expected.heat);
      REQUIRE(answer->when == doctest::Approx(expected.when));
    }
  }
  CHECK(found > asked / 3);
  CHECK_FALSE(table.look(mix64(12345)).has_value());
}

TEST_CASE("departures: the latest stay, the oldest go") {
  Random random(kvpool::testing::seed());
  constexpr std::uint64_t kMax = 1 << 14, kNames = 1 << 17;
  Departures table(kMax, random.below(1ull << 60));
  const std::uint64_t first = random.below(1ull << 40);
  for (std::uint64_t i = 0; i < kNames; ++i)
    table.note(mix64(first + i), {.when = static_cast<double>(i)});
  const auto share = [&](std::uint64_t from, std::uint64_t count) {
    std::uint64_t kept = 0;
    for (std::uint64_t i = from; i < from + count; ++i)
      kept += table.look(mix64(first + i)).has_value();
    return static_cast<double>(kept) / static_cast<double>(count);
  };
  CHECK(share(kNames - kMax / 8, kMax / 8) > 0.99);
  CHECK(share(kNames - kMax, kMax) > 0.7);
  CHECK(share(0, kMax) < 0.01);
}

TEST_CASE("departures: memory follows the pool, and has an end") {
  CHECK(Departures::entries_for(0) == 1 << 10);
  CHECK(Departures::entries_for(1ull << 46) == 1 << 18);
  for (std::uint64_t bytes = 1 << 20; bytes < 1ull << 40; bytes *= 2) {
    const Departures table(Departures::entries_for(bytes), 0);
    CHECK(table.bytes() <= std::max<std::uint64_t>(bytes / 256, 16 << 10));
    CHECK(table.bytes() <= 4u << 20);
  }
}
