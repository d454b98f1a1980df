// Uses on their way to the policy: none is counted twice, what is overwritten is counted as lost,
// and what arrives is what was sent.
#include <atomic>
#include <thread>
#include <vector>

#include "block_random.h"
#include "core_build.h"
#include "node/touch_ring.h"

namespace kvpool {
namespace {

TouchRing::Touch touch_of(std::uint64_t n) {
  return {n + 1, static_cast<std::uint32_t>(n * 7), static_cast<Seconds>(n)};
}
bool is_whole(const TouchRing::Touch& touch) {
  const TouchRing::Touch sent = touch_of(touch.generation - 1);
  return touch.record == sent.record && touch.when == sent.when;
}

TEST_CASE("touch ring: oldest first, and the oldest are lost when it runs over") {
  test::Random random("touch ring");
  const auto ring = std::make_unique<TouchRing>();
  std::uint64_t sent = 0, expected = 0;
  for (std::size_t round = 0; round < test::scaled(200); ++round) {
    const auto count = random.between<std::uint64_t>(0, 2 * TouchRing::kEntries);
    for (std::uint64_t left = count; left > 0;) {
      const std::uint64_t batch = std::min<std::uint64_t>(left, random.between(1u, 256u));
      const std::uint64_t at = ring->claim(batch);
      for (std::uint64_t i = 0; i < batch; ++i) ring->put(at + i, touch_of(sent++));
      left -= batch;
    }
    CHECK(ring->empty() == (count == 0));
    CHECK(ring->half_full() == (count > TouchRing::kEntries / 2));
    std::uint64_t seen = 0;
    const std::uint64_t lost_before = expected;
    const std::uint64_t kept = std::min(count, TouchRing::kEntries);
    expected += count - kept;
    const std::uint64_t lost = ring->drain([&](const TouchRing::Touch& touch) {
      REQUIRE(touch.generation == expected + 1);
      REQUIRE(is_whole(touch));
      ++expected;
      ++seen;
    });
    REQUIRE(seen == kept);
    REQUIRE(lost == count - kept);
    REQUIRE(expected == lost_before + count);
    REQUIRE(ring->empty());
  }
}

constexpr std::uint64_t kProducers = 3, kBatch = 64;

struct Counts {
  std::uint64_t counted = 0, lost = 0, twice = 0, torn = 0, drains = 0;
};

// Producers that either wait while the ring is half full, or run over it as they like.
Counts produce_and_drain(std::uint64_t per_producer, bool throttled) {
  const auto ring = std::make_unique<TouchRing>();
  std::vector<std::uint8_t> seen(kProducers * per_producer);
  std::atomic<std::uint64_t> running{kProducers};
  std::vector<std::thread> producers;
  for (std::uint64_t p = 0; p < kProducers; ++p)
    producers.emplace_back([&, p] {
      for (std::uint64_t n = 0; n < per_producer; n += kBatch) {
        while (throttled && ring->half_full()) std::this_thread::yield();
        const std::uint64_t at = ring->claim(kBatch);
        for (std::uint64_t i = 0; i < kBatch; ++i)
          ring->put(at + i, touch_of(p * per_producer + n + i));
      }
      --running;
    });
  Counts counts;
  const auto drain = [&] {
    ++counts.drains;
    counts.lost += ring->drain([&](const TouchRing::Touch& touch) {
      const std::uint64_t n = touch.generation - 1;
      REQUIRE(n < seen.size());
      counts.torn += !is_whole(touch);
      counts.twice += seen[n]++ > 0;
      ++counts.counted;
    });
  };
  while (running > 0) {
    if (throttled && !ring->half_full())
      std::this_thread::yield();
    else
      drain();
  }
  for (std::thread& producer : producers) producer.join();
  drain();
  MESSAGE("sent " << seen.size() << ", counted " << counts.counted << ", lost " << counts.lost
                  << ", torn " << counts.torn << ", drains " << counts.drains);
  return counts;
}

// A use that was claimed but not yet written when the drainer came by is passed over; it is counted
// a lap later or never.
TEST_CASE("touch ring: producers that leave the drainer time lose only what was being written") {
  const std::uint64_t per_producer = test::scaled(300'000) / kBatch * kBatch;
  const Counts counts = produce_and_drain(per_producer, true);
  CHECK(counts.twice == 0);
  CHECK(counts.torn <= counts.counted / 20);  // of a producer that was stopped for a whole lap
  CHECK(counts.lost == 0);
  CHECK(counts.counted + counts.drains * kProducers * kBatch >= kProducers * per_producer);
}

// Of two producers a whole lap apart one may leave half of its use under the other's generation:
// whoever drains compares the two, as the node does.
TEST_CASE("touch ring: producers that run over each other lose uses and count none twice") {
  const std::uint64_t per_producer = test::scaled(300'000) / kBatch * kBatch;
  const Counts counts = produce_and_drain(per_producer, false);
  CHECK(counts.twice == 0);
  CHECK(counts.counted > 0);
  CHECK(counts.counted + counts.lost <= kProducers * per_producer);
}

}  // namespace
}  // namespace kvpool
