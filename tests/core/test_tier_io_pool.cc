// The threads of the tier: every task once, neither kind held up by the other, an orderly end.
#include "tier/io_pool.h"

#include <doctest/doctest.h>

#include <atomic>
#include <latch>

#include "block_random.h"
#include "core_build.h"

namespace kvpool {
namespace {

struct Range {
  std::uint64_t start, length;
  std::uint64_t offset() const { return start; }
  std::uint64_t slot_bytes() const { return length; }
};

// Each byte of each slot is in one transfer, and none is larger than a piece.
TEST_CASE("io pool: slots are cut into pieces, and joined where they lie one behind the other") {
  test::Random random("io pool: slots are cut");
  for (int round = 0; round < 200; ++round) {
    std::vector<Range> slots;
    std::uint64_t at = 0;
    for (int i = random.between(0, 40); i > 0; --i) {
      const std::uint64_t pages = random.between(0u, random.coin() ? 40u : 900u);
      if (random.between(0, 4) == 0) at += kSlotAlignBytes * random.between(1u, 9u);
      slots.push_back({at, pages * kSlotAlignBytes});
      at += pages * kSlotAlignBytes;
    }
    std::vector<std::uint64_t> moved(slots.size());
    for (const IoCut& cut : cut_into_transfers(slots.size(), [&](auto i) { return slots[i]; })) {
      REQUIRE(cut.bytes > 0);
      REQUIRE(cut.bytes <= kIoPieceBytes);
      REQUIRE(cut.slots <= kIoSlotsMax);
      if (cut.slots == 1) {
        REQUIRE(moved[cut.first] == cut.offset);
        moved[cut.first] += cut.bytes;
        continue;
      }
      REQUIRE(cut.offset == 0);
      std::uint64_t sum = 0;
      for (std::size_t i = cut.first; i < cut.first + cut.slots; ++i) {
        REQUIRE(slots[i].start == slots[cut.first].start + sum);
        sum += moved[i] = slots[i].length;
      }
      REQUIRE(sum == cut.bytes);
    }
    for (std::size_t i = 0; i < slots.size(); ++i) REQUIRE(moved[i] == slots[i].length);
  }
  const std::vector<Range> row{{0, 64 << 10}, {64 << 10, 64 << 10}, {128 << 10, 4096}};
  CHECK(cut_into_transfers(3, [&](auto i) { return row[i]; }).size() == 1);
}

struct Count {
  std::atomic<std::uint64_t> runs{0}, sum{0};
};

void count(const IoTask& task) {
  Count& counted = *static_cast<Count*>(task.owner);
  counted.runs.fetch_add(1);
  counted.sum.fetch_add(task.cut.first);
}

TEST_CASE("io pool: every task is run once before the destructor returns") {
  for (const std::uint32_t threads : {0u, 1u, 2u, 3u, 8u, 1000u}) {
    CAPTURE(threads);
    Count counted;
    const auto alive = std::make_shared<int>(0);
    const std::size_t tasks = test::scaled(4000);
    {
      auto pool = std::move(*IoPool::create(threads));
      for (std::size_t at = 0; at < tasks; at += 8) {
        std::vector<IoTask> batch;
        for (std::size_t i = at; i < std::min(at + 8, tasks); ++i)
          batch.push_back({count, &counted, nullptr, {i, 1, 0, 0}, alive});
        pool->submit(at % 24 == 0 ? IoPool::Kind::write : IoPool::Kind::read, batch);
      }
    }
    CHECK(counted.runs == tasks);
    CHECK(counted.sum == tasks * (tasks - 1) / 2);
    CHECK(alive.use_count() == 1);
  }
}

struct Gate {
  explicit Gate(std::ptrdiff_t count) : entered(count) {}
  std::latch entered, open{1};
};

void stand_at(const IoTask& task) {
  Gate& gate = *static_cast<Gate*>(task.owner);
  gate.entered.count_down();
  gate.open.wait();
}

void tell(const IoTask& task) { static_cast<IoBatch*>(task.owner)->one_done(); }

// Of eight threads a kind uses six at most while it has to leave some to the other.
TEST_CASE("io pool: writes that hang leave threads to reads, and reads that hang leave some too") {
  for (const IoPool::Kind hangs : {IoPool::Kind::write, IoPool::Kind::read}) {
    Gate gate(6);
    IoBatch batch(20);
    auto pool = std::move(*IoPool::create(8));
    std::vector<IoTask> stuck(6, {stand_at, &gate, nullptr, {}, nullptr});
    pool->submit(hangs, stuck);
    gate.entered.wait();
    std::vector<IoTask> quick(20, {tell, &batch, nullptr, {}, nullptr});
    pool->submit(hangs == IoPool::Kind::write ? IoPool::Kind::read : IoPool::Kind::write, quick);
    batch.wait();
    CHECK_FALSE(gate.open.try_wait());  // those that hang still do
    gate.open.count_down();
  }
}

TEST_CASE("io pool: more writes than may run wait, and are run when those before them end") {
  Gate gate(1);
  Count counted;
  auto pool = std::move(*IoPool::create(2));  // one thread for each kind
  IoTask stuck{stand_at, &gate, nullptr, {}, nullptr};
  pool->submit(IoPool::Kind::write, {&stuck, 1});
  gate.entered.wait();
  std::vector<IoTask> writes(30, {count, &counted, nullptr, {}, nullptr});
  pool->submit(IoPool::Kind::write, writes);
  IoBatch read(1);
  IoTask one{tell, &read, nullptr, {}, nullptr};
  pool->submit(IoPool::Kind::read, {&one, 1});
  read.wait();
  CHECK(counted.runs == 0);  // the one thread that may write hangs
  gate.open.count_down();
  pool.reset();  // ends only when all have been run
  CHECK(counted.runs == 30);
}

}  // namespace
}  // namespace kvpool
