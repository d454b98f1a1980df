// The threads of the tier: every task once, neither kind held up by the other, an orderly end.
#include "tier/io_pool.h"

#include <doctest/doctest.h>

#include <atomic>
#include <latch>

#include "core_build.h"

namespace kvpool {
namespace {

struct Count {
  std::atomic<std::uint64_t> runs{0}, sum{0};
};

void count(const IoTask& task) {
  Count& counted = *static_cast<Count*>(task.owner);
  counted.runs.fetch_add(1);
  counted.sum.fetch_add(task.offset);
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
          batch.push_back({count, &counted, nullptr, i, 0, alive});
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
    std::vector<IoTask> stuck(6, {stand_at, &gate, nullptr, 0, 0, nullptr});
    pool->submit(hangs, stuck);
    gate.entered.wait();
    std::vector<IoTask> quick(20, {tell, &batch, nullptr, 0, 0, nullptr});
    pool->submit(hangs == IoPool::Kind::write ? IoPool::Kind::read : IoPool::Kind::write, quick);
    batch.wait();
    gate.open.count_down();
  }
}

TEST_CASE("io pool: more writes than may run wait, and are run when those before them end") {
  Gate gate(1);
  IoBatch batch(30);
  auto pool = std::move(*IoPool::create(2));  // one thread for each kind
  IoTask stuck{stand_at, &gate, nullptr, 0, 0, nullptr};
  pool->submit(IoPool::Kind::write, {&stuck, 1});
  gate.entered.wait();
  std::vector<IoTask> writes(30, {tell, &batch, nullptr, 0, 0, nullptr});
  pool->submit(IoPool::Kind::write, writes);
  IoBatch read(1);
  IoTask one{tell, &read, nullptr, 0, 0, nullptr};
  pool->submit(IoPool::Kind::read, {&one, 1});
  read.wait();
  gate.open.count_down();
  pool.reset();  // ends only when all have been run
  batch.wait();
}

}  // namespace
}  // namespace kvpool
