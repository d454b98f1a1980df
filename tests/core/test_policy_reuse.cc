// Reuse distances against a list, and samples of them against all of them.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <list>
#include <vector>

#include "block/key.h"
#include "policy/reuse.h"
#include "policy/reuse_book.h"
#include "policy_testing.h"

using namespace kvpool;
using kvpool::testing::Random;

namespace {

constexpr std::uint32_t kBlock = 4096;

double hit_rate(const ReuseCurve& curve, double size_bytes) {
  double hits = 0, before = 0;
  for (std::size_t i = 0; i < curve.counts.size(); ++i) {
    const double bound = curve.bounds_bytes[i];
    if (size_bytes < bound) {
      hits += curve.counts[i] * std::max(size_bytes - before, 0.0) / (bound - before);
      break;
    }
    hits += curve.counts[i];
    before = bound;
  }
  return curve.references > 0 ? hits / curve.references : 0;
}

double total(const ReuseCurve& curve) {
  double sum = curve.cold;
  for (const double count : curve.counts) sum += count;
  return sum;
}

// A few blocks are used all the time, most only now and then: popularity falls with the rank.
struct Zipf {
  explicit Zipf(std::uint64_t blocks, double exponent = 1) {
    double sum = 0;
    for (std::uint64_t i = 0; i < blocks; ++i)
      reach.push_back(sum += std::pow(double(i + 1), -exponent));
  }
  Fingerprint draw(Random& random) const {
    const double at = static_cast<double>(random.below(1 << 30)) / (1 << 30) * reach.back();
    const auto rank = std::ranges::upper_bound(reach, at) - reach.begin();
    return mix64(static_cast<std::uint64_t>(rank) + 1);
  }
  std::vector<double> reach;
};

// The list that LRU is: most recently used in front.
struct List {
  struct Block {
    Fingerprint name;
    std::uint32_t bytes;
  };
  // Of the block at its place: it, and all in front of it. 0 = not there.
  std::uint64_t use(Fingerprint name, std::uint32_t bytes) {
    std::uint64_t distance = 0;
    const auto found = std::ranges::find_if(blocks, [&](const Block& block) {
      if (block.name != name) distance += block.bytes;
      return block.name == name;
    });
    const bool is_there = found != blocks.end();
    if (is_there) blocks.erase(found);
    blocks.push_front({name, bytes});
    return is_there ? distance + bytes : 0;
  }
  void forget(Fingerprint name) {
    std::erase_if(blocks, [&](const Block& block) { return block.name == name; });
  }
  std::list<Block> blocks;
};

}  // namespace

TEST_CASE("reuse: exact distances are those of a list") {
  Random random(kvpool::testing::seed());
  Reuse reuse({.samples_max = 0, .half_life_s = 0});
  List list;
  std::vector<double> expected(Reuse::kBins, 0.0);
  double cold = 0, counted = 0;
  for (int i = 0; i < 30000; ++i) {
    const Fingerprint name = mix64(random.below(random.one_in(3) ? 3000 : 60) + 1);
    const auto bytes = static_cast<std::uint32_t>(name % 7 + 1) * kBlock;
    if (random.one_in(50)) {
      reuse.forget(name);
      list.forget(name);
      continue;
    }
    if (random.one_in(10)) {  // moved, but not counted
      reuse.refresh(name, bytes, 0);
      list.use(name, bytes);
      continue;
    }
    reuse.add(name, bytes, 0);
    ++counted;
    const std::uint64_t distance = list.use(name, bytes);
    if (distance == 0) {
      ++cold;
      continue;
    }
    std::size_t bin = 0;
    while (Reuse::bound_bytes(bin) < static_cast<double>(distance)) ++bin;
    ++expected[bin];
  }
  reuse.check_invariants();
  const ReuseCurve curve = reuse.curve(0);
  CHECK(curve.references == counted);
  CHECK(curve.sampled == counted);
  CHECK(curve.rate == 1);
  CHECK(curve.cold == cold);
  CHECK(curve.samples == list.blocks.size());
  for (std::size_t bin = 0; bin < expected.size(); ++bin) {
    CAPTURE(bin);
    CHECK((bin < curve.counts.size() ? curve.counts[bin] : 0) == expected[bin]);
  }
}

TEST_CASE("reuse: as long as all blocks are followed, samples say what is exact") {
  Random random(kvpool::testing::seed());
  const Zipf zipf(1000);
  Reuse exact({.samples_max = 0, .half_life_s = 0});
  Reuse sampled({.samples_max = 1024, .half_life_s = 0, .salt = random.below(1ull << 60)});
  for (int i = 0; i < 20000; ++i) {
    const Fingerprint name = zipf.draw(random);
    exact.add(name, kBlock, 0);
    sampled.add(name, kBlock, 0);
  }
  sampled.check_invariants();
  CHECK(sampled.curve(0).counts == exact.curve(0).counts);
  CHECK(sampled.curve(0).cold == exact.curve(0).cold);
}

TEST_CASE("reuse: a few samples tell the whole curve") {
  Random random(kvpool::testing::seed());
  const Zipf zipf(100000, 0.8);
  Reuse exact({.samples_max = 0, .half_life_s = 0});
  Reuse sampled({.half_life_s = 0, .salt = random.below(1ull << 60)});
  for (int i = 0; i < 200000; ++i) {
    const Fingerprint name = zipf.draw(random);
    exact.add(name, kBlock, 0);
    sampled.add(name, kBlock, 0);
  }
  sampled.check_invariants();
  const ReuseCurve truth = exact.curve(0), curve = sampled.curve(0);
  CHECK(curve.references == 200000);
  CHECK(total(curve) == doctest::Approx(curve.references));
  CHECK(curve.samples <= 1 << 14);
  CHECK(curve.rate < 0.4);
  double error = 0;
  int sizes = 0;
  for (double blocks = 64; blocks < 60000; blocks *= 1.1, ++sizes)
    error += std::abs(hit_rate(curve, blocks * kBlock) - hit_rate(truth, blocks * kBlock));
  MESSAGE("mean absolute error ", error / sizes);
  CHECK(error / sizes < 0.03);  // 0.006 on average over seeds
}

// Whether the one block in every request is followed or not must not move the rest of the curve.
TEST_CASE("reuse: one block that is used all the time does not distort the curve") {
  Random random(kvpool::testing::seed());
  const Zipf zipf(20000, 0.5);
  for (int round = 0; round < 6; ++round) {
    Reuse exact({.samples_max = 0, .half_life_s = 0});
    Reuse sampled({.samples_max = 2048, .half_life_s = 0, .salt = random.below(1ull << 60)});
    for (int i = 0; i < 60000; ++i) {
      const Fingerprint name = i % 4 == 0 ? 1 : zipf.draw(random);
      exact.add(name, kBlock, 0);
      sampled.add(name, kBlock, 0);
    }
    const ReuseCurve truth = exact.curve(0), curve = sampled.curve(0);
    CAPTURE(round);
    for (const double blocks : {1000.0, 4000.0, 16000.0})
      CHECK(std::abs(hit_rate(curve, blocks * kBlock) - hit_rate(truth, blocks * kBlock)) < 0.08);
  }
}

TEST_CASE("reuse: counts fade with the half-life, and a change of the workload is seen") {
  Reuse reuse({.samples_max = 1024, .half_life_s = 100});
  const auto round = [&](std::uint64_t first, std::uint64_t blocks, Seconds now) {
    for (std::uint64_t i = 0; i < blocks; ++i) reuse.add(mix64(first + i), kBlock, now);
  };
  for (int i = 0; i < 10; ++i) round(1, 500, i);
  CHECK(hit_rate(reuse.curve(10), 512 * kBlock) > 0.85);
  CHECK(reuse.curve(10).references == doctest::Approx(5000).epsilon(0.1));
  CHECK(reuse.curve(110).references == doctest::Approx(reuse.curve(10).references / 2));
  for (int i = 0; i < 10; ++i) round(1000 + 200u * static_cast<unsigned>(i), 200, 1000 + i);
  CHECK(hit_rate(reuse.curve(1010), 512 * kBlock) < 0.06);  // nothing but first uses since
  // Times that lie farther apart than any number holds half-lives of.
  round(1, 1000, 1e9);
  const ReuseCurve late = reuse.curve(1e9);
  CHECK(late.references == doctest::Approx(1000).epsilon(0.05));  // those since the last sample
  CHECK(total(late) == doctest::Approx(late.references));
  reuse.check_invariants();
}

TEST_CASE("reuse: what lies beyond the reach goes before the rate falls") {
  // Ten times as many blocks come and go as are followed, but never more than 500 matter.
  Reuse near({.samples_max = 1024, .reach_bytes = 500 * kBlock});
  Reuse far({.samples_max = 1024});
  for (std::uint64_t i = 0; i < 10240; ++i) {
    for (Reuse* reuse : {&near, &far}) {
      reuse->add(mix64(i + 1), kBlock, 0);
      if (i >= 100) reuse->add(mix64(i - 99), kBlock, 0);
    }
  }
  CHECK(near.curve(0).rate > 0.99);
  CHECK(far.curve(0).rate < 0.2);
  for (const Reuse* reuse : {&near, &far}) {
    reuse->check_invariants();
    CHECK(hit_rate(reuse->curve(0), 400 * kBlock) == doctest::Approx(0.5).epsilon(0.1));
    CHECK(hit_rate(reuse->curve(0), 100 * kBlock) < 0.1);
  }
}

TEST_CASE("reuse: keys that all want to be followed take no memory and stop nothing") {
  Reuse reuse({.samples_max = 64});
  const std::size_t bytes = reuse.bytes();
  // Names whose hash is 0, 1, 2, ...: the inverse of the multiplier, as somebody might who knows
  // that there is no salt.
  std::uint64_t inverse = 1;
  for (int i = 0; i < 6; ++i) inverse *= 2 - 0x9e37'79b9'7f4a'7c15u * inverse;
  for (std::uint64_t i = 0; i < 20000; ++i) reuse.add(i * inverse, kBlock, 0);
  reuse.check_invariants();
  const ReuseCurve curve = reuse.curve(0);
  CHECK(curve.samples <= 64);
  CHECK(curve.references == 20000);
  CHECK(total(curve) == doctest::Approx(20000));
  CHECK(reuse.bytes() == bytes);
}

TEST_CASE("reuse: no size, no time and no curve without uses is an error") {
  Reuse reuse({});
  CHECK(reuse.curve(5).references == 0);
  CHECK(reuse.curve(5).counts.empty());
  reuse.add(1, 0, std::nan(""));
  reuse.add(1, 0xffffffff, -INFINITY);
  reuse.forget(2);
  reuse.add(1, 5, 3);
  CHECK(reuse.curve(INFINITY).references == 3);
  reuse.forget_all();
  CHECK(reuse.curve(3).samples == 0);
  reuse.check_invariants();
}

TEST_CASE("reuse book: a curve for each namespace as far as there is room, all in one") {
  ReuseBook book(7);
  std::size_t spaces = 0;
  for (std::uint32_t space = 0; space < 40; ++space)
    for (int round = 0; round < 2; ++round)
      for (std::uint64_t i = 0; i < 10; ++i) book.add(space, mix64(space * 100 + i + 1), kBlock, 0);
  book.for_each_space([&](std::uint32_t space, const Reuse& own) {
    CHECK(space < ReuseBook::kSpacesMax);
    CHECK(own.curve(0).references == 20);
    CHECK(own.curve(0).cold == 10);
    ++spaces;
  });
  CHECK(spaces == ReuseBook::kSpacesMax);
  CHECK(book.all().curve(0).references == 800);
  CHECK(book.bytes() < 4u << 20);
  // A dropped namespace keeps what it counted, and its blocks come for the first time again.
  book.drop_space(3);
  for (std::uint64_t i = 0; i < 10; ++i) book.add(3, mix64(300 + i + 1), kBlock, 0);
  book.for_each_space([&](std::uint32_t space, const Reuse& own) {
    if (space == 3) CHECK(own.curve(0).cold == 20);
  });
  book.check_invariants();
}
