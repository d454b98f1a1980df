// The table of what left: exactly the latest are remembered, by the latest reason.
#include <doctest/doctest.h>

#include <deque>
#include <unordered_map>

#include "block/key.h"
#include "node/departures.h"
#include "policy_testing.h"

using namespace kvpool;
using kvpool::testing::Random;

TEST_CASE("departures: against a list of all that left") {
  Random random(kvpool::testing::seed());
  constexpr std::uint32_t kMax = 64;
  Departures table(kMax, random.below(1ull << 60));
  // Places in the ring, newest last: one for each departure, also of a block that left before.
  std::deque<Fingerprint> left;
  std::unordered_map<Fingerprint, std::pair<int, Departure>> latest;
  for (int i = 0; i < 20000; ++i) {
    const Fingerprint name = random.one_in(2) ? mix64(random.below(100)) : random.below(100);
    const Departure departure{.why = static_cast<Gone>(random.below(kGoneReasons)),
                              .was_on_ssd = random.one_in(2),
                              .status = static_cast<std::uint8_t>(random.below(12)),
                              .heat = static_cast<float>(random.below(1000)),
                              .when = 1000.0 + i};
    table.note(name, departure);
    left.push_back(name);
    latest[name] = {i, departure};
    if (left.size() > kMax) {
      const auto old = latest.find(left.front());
      if (old != latest.end() && old->second.first == i - static_cast<int>(kMax)) latest.erase(old);
      left.pop_front();
    }
    if (i % 97 != 0) continue;
    table.check_invariants();
    REQUIRE(table.size() == latest.size());
    for (std::uint64_t n = 0; n < 100; ++n) {
      for (const Fingerprint asked : {Fingerprint{n}, mix64(n)}) {
        const auto found = table.look(asked);
        const auto known = latest.find(asked);
        REQUIRE(found.has_value() == (known != latest.end()));
        if (!found) continue;
        const Departure& expected = known->second.second;
        REQUIRE(found->why == expected.why);
        REQUIRE(found->was_on_ssd == expected.was_on_ssd);
        REQUIRE(found->status == expected.status);
        REQUIRE(found->heat == expected.heat);
        REQUIRE(found->when == doctest::Approx(expected.when));
      }
    }
  }
}

TEST_CASE("departures: memory follows the pool, and has an end") {
  CHECK(Departures::entries_for(0) == 1 << 10);
  CHECK(Departures::entries_for(1ull << 46) == 1 << 17);
  for (std::uint64_t bytes = 1 << 20; bytes < 1ull << 40; bytes *= 2) {
    const Departures table(Departures::entries_for(bytes), 0);
    CHECK(table.bytes() <= std::max<std::uint64_t>(bytes / 256, 32 << 10));
    CHECK(table.bytes() <= 4u << 20);
  }
  Departures table(1 << 17, 5);
  for (std::uint64_t i = 0; i < 1 << 18; ++i) table.note(mix64(i), {});
  CHECK(table.size() == 1 << 17);
  CHECK(table.bytes() <= 4u << 20);
  table.check_invariants();
}
