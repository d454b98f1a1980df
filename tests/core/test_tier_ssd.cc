// The SSD tier with real files: what was committed is there, what was not is not, and what went
// wrong is said.
#include "tier/ssd.h"

#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <map>
#include <thread>

#include "core_build.h"
#include "core_process.h"
#include "tier/index_store.h"
#include "tier_ssd.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;
using test::first_group;
using test::group_of;
using test::kMega;
using test::opened_tier;
using test::outcome_of;
using test::Pages;
using test::small_slot;
using test::soon;
using test::TempDirectory;
using test::TierBlock;
using test::TierReads;

std::map<Hash128, SsdPlace> entries_of(const Ssd& ssd) {
  std::map<Hash128, SsdPlace> found;
  REQUIRE(ssd.for_each_entry([&](const BlockKey& key, const BlockEntry& entry) {
    found[key.hash128()] = {entry.slab_unit, entry.slot, entry.bytes};
  }));
  return found;
}

void start(Ssd& ssd) {
  SsdGroup group = first_group();
  REQUIRE(ssd.commit(group));
}

std::vector<TierBlock> small_blocks(std::uint64_t seed, std::uint32_t from, std::uint32_t count) {
  std::vector<TierBlock> made;
  for (std::uint32_t i = 0; i < count; ++i) made.emplace_back(seed + i, small_slot(from + i));
  return made;
}

TEST_CASE("ssd: blocks of every size come back whole, now and after a reopen") {
  for (const bool direct : {true, false}) {
    for (const Durability durability : {Durability::async, Durability::relaxed}) {
      CAPTURE(direct);
      const TempDirectory directory;
      SsdOptions options;
      options.path = directory / "tier";
      options.capacity_bytes = 24 * kMega;
      options.durability = durability;
      options.direct = direct;
      auto ssd = std::move(*Ssd::open(options));
      start(*ssd);
      std::vector<TierBlock> blocks;
      blocks.emplace_back(1, SsdPlace{0, 0, 1});
      blocks.emplace_back(2, SsdPlace{0, 1, 4096});
      blocks.emplace_back(3, SsdPlace{1, 3, 5000});
      blocks.emplace_back(4, SsdPlace{2, 1, (1 << 20) + 4});
      blocks.emplace_back(5, SsdPlace{4, 0, 4 << 20});
      SsdGroup group = group_of(blocks);
      REQUIRE(ssd->commit(group));
      for (const SsdWrite& write : group.writes) CHECK(write.written);
      TierReads batch(blocks);
      ssd->read(batch.reads);
      REQUIRE(batch.reads->wait(soon()));
      for (std::size_t i = 0; i < blocks.size(); ++i) {
        CHECK(batch.outcome(i) == ReadOutcome::whole);
        CHECK(batch.into[i] == blocks[i].payload);  // the rest of the last page as well
      }
      const SsdCounters counters = ssd->counters();
      CHECK(counters.groups == 2);
      CHECK(counters.syncs == 1);
      CHECK(counters.written_blocks == 5);
      CHECK(counters.read_blocks == 5);
      CHECK(counters.read_bytes == counters.written_bytes);
      CHECK(counters.written_bytes == 1 + 4096 + 5000 + (1 << 20) + 4 + (4 << 20));
      CHECK(counters.index_written_bytes >= 2 * 4096);
      if (!direct) CHECK_FALSE(ssd->facts().direct);
      const SsdFacts before = ssd->facts();
      ssd.reset();
      ssd = std::move(*Ssd::open(options));
      for (const TierBlock& block : blocks) CHECK(outcome_of(*ssd, block) == ReadOutcome::whole);
      const SsdFacts after = ssd->facts();
      CHECK(std::ranges::equal(after.tier_id, before.tier_id));
      CHECK(std::ranges::equal(after.node_id, before.node_id));
      CHECK(after.units == before.units);
      CHECK(after.next_space == 2);
      const auto entries = entries_of(*ssd);
      REQUIRE(entries.size() == 5);
      for (const TierBlock& block : blocks) CHECK(entries.at(block.key.hash128()) == block.place);
      CHECK(ssd->spaces().size() == 1);
      CHECK(ssd->classes().size() == 1);
    }
  }
}

// A model that knows keys and places, and slots that are written again and again.
TEST_CASE("ssd: many groups on recycled slots agree with a model, across reopens") {
  test::Random random("ssd: many groups");
  const TempDirectory directory;
  auto ssd = opened_tier(directory.path());
  start(*ssd);
  std::map<std::uint32_t, TierBlock> model;  // by slot
  std::uint64_t seed = 1;
  for (std::size_t round = 0; round < test::scaled(120); ++round) {
    SsdGroup group;
    std::map<std::uint32_t, TierBlock> next = model;
    std::vector<std::uint32_t> freed;
    for (const auto& [slot, block] : model)
      if (random.between(0, 3) == 0) {
        group.deletes.push_back({block.key, block.place});
        next.erase(slot);
        freed.push_back(slot);
      }
    const int count = random.between(0, 24);
    for (int i = 0; i < count; ++i) {
      const std::uint32_t slot = random.between(0u, 95u);
      if (next.contains(slot) || std::ranges::find(freed, slot) != freed.end()) continue;
      next.emplace(slot, TierBlock(seed++, small_slot(slot)));
    }
    for (const auto& [slot, block] : next)
      if (!model.contains(slot)) group.writes.push_back(block.write());
    REQUIRE(ssd->commit(group));
    model = std::move(next);
    if (random.between(0, 9) == 0) {
      ssd.reset();
      ssd = opened_tier(directory.path());
    }
    for (const auto& [slot, block] : model)
      if (random.between(0, 7) == 0) REQUIRE(outcome_of(*ssd, block) == ReadOutcome::whole);
  }
  ssd.reset();
  ssd = opened_tier(directory.path());
  const auto entries = entries_of(*ssd);
  CHECK(entries.size() == model.size());
  for (const auto& [slot, block] : model) {
    CHECK(entries.at(block.key.hash128()) == block.place);
    CHECK(outcome_of(*ssd, block) == ReadOutcome::whole);
  }
  CHECK(ssd->forgotten().empty());
}

TEST_CASE("ssd: a delete or a stamp that names another place changes nothing") {
  const TempDirectory directory;
  const auto ssd = opened_tier(directory.path());
  start(*ssd);
  const auto blocks = small_blocks(1, 0, 2);
  SsdGroup group = group_of(blocks);
  REQUIRE(ssd->commit(group));
  group = {};
  group.deletes = {{blocks[0].key, small_slot(7)}, {blocks[1].key, blocks[1].place}};
  group.stamps = {{blocks[0].key, small_slot(7), 3.0F, 99}};
  REQUIRE(ssd->commit(group));
  std::size_t seen = 0;
  REQUIRE(ssd->for_each_entry([&](const BlockKey& key, const BlockEntry& entry) {
    CHECK(key.hash128() == blocks[0].key.hash128());
    CHECK(entry.stamp_s == 0);
    ++seen;
  }));
  CHECK(seen == 1);
  CHECK(ssd->counters().syncs == 1);  // the second group had no payload
}

TEST_CASE("ssd: a group of nothing costs nothing") {
  const TempDirectory directory;
  const auto ssd = opened_tier(directory.path());
  SsdGroup group;
  REQUIRE(ssd->commit(group));
  CHECK(ssd->counters().groups == 0);
  CHECK(ssd->counters().syncs == 0);
}

TEST_CASE("ssd: flipped, cut and zeroed payload is damage, and never delivered") {
  const TempDirectory directory;
  const auto ssd = opened_tier(directory.path());
  start(*ssd);
  const auto blocks = small_blocks(1, 0, 3);
  SsdGroup group = group_of(blocks);
  REQUIRE(ssd->commit(group));
  const auto offset = [&](std::size_t i) { return kSsdDataOffset + blocks[i].place.offset(); };
  const std::byte wrong = blocks[0].payload.data()[4097] ^ std::byte{4};
  test::overwrite(directory / "slabs", offset(0) + 4097, &wrong, 1);
  const std::vector<std::byte> zeros(64 << 10);
  test::overwrite(directory / "slabs", offset(1), zeros.data(), zeros.size());
  CHECK(outcome_of(*ssd, blocks[0]) == ReadOutcome::damaged);
  CHECK(outcome_of(*ssd, blocks[1]) == ReadOutcome::damaged);
  CHECK(outcome_of(*ssd, blocks[2]) == ReadOutcome::whole);
  REQUIRE(truncate((directory / "slabs").c_str(), static_cast<off_t>(offset(2) + 4096)) == 0);
  CHECK(outcome_of(*ssd, blocks[2]) == ReadOutcome::damaged);
  // A place that no tier could have given, as a damaged book might say.
  auto reads = std::make_shared<SsdReads>(1);
  ssd->read(reads);
  REQUIRE(reads->wait(soon()));
  CHECK(reads->items[0].outcome == ReadOutcome::failed);
  const SsdCounters counters = ssd->counters();
  CHECK(counters.damaged == 3);
  CHECK(counters.read_faults == 0);  // the device did as it was told, and the last never came to it
  CHECK(counters.read_blocks == 1);
}

// The blocks lie in a row and are moved in one call; it stops in the middle of the third.
TEST_CASE("ssd: of slots that are moved together only those that failed are lost") {
  const TempDirectory directory;
  const auto blocks = small_blocks(1, 0, 6);
  const off_t end = static_cast<off_t>(kSsdDataOffset + blocks[2].place.offset() + 8192);
  auto ssd = opened_tier(directory.path());
  start(*ssd);
  SsdGroup group = group_of(blocks);
  REQUIRE(ssd->commit(group));
  const off_t whole = test::stat_of(directory / "slabs").st_size;
  REQUIRE(truncate((directory / "slabs").c_str(), end) == 0);
  TierReads cut(blocks);
  ssd->read(cut.reads);
  REQUIRE(cut.reads->wait(soon()));
  for (std::size_t i = 0; i < 6; ++i) {
    CHECK(cut.outcome(i) == (i < 2 ? ReadOutcome::whole : ReadOutcome::damaged));
    if (i < 2) CHECK(cut.into[i] == blocks[i].payload);
  }
  REQUIRE(truncate((directory / "slabs").c_str(), whole) == 0);
  ssd.reset();

  const int status = test::status_of_child([&] {
    const auto limited = test::open_tier(directory.path());
    if (!limited) return 1;
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{static_cast<rlim_t>(end), static_cast<rlim_t>(end)};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 2;
    SsdGroup again = group_of(blocks);
    (void)(*limited)->commit(again);  // the limit may stop the index as well
    for (std::size_t i = 0; i < 6; ++i)
      if (again.writes[i].failed_io != (i >= 2)) return 3;
    return (*limited)->counters().write_faults == 4 ? 0 : 4;
  });
  CHECK(status == 0);
}

TEST_CASE("ssd: what the index holds of unknown namespaces or impossible places is not shown") {
  const TempDirectory directory;
  const TierBlock good(1, small_slot(0)), outside(2, SsdPlace{1000, 0, 64 << 10});
  {
    const auto ssd = opened_tier(directory.path());
    start(*ssd);
  }
  {
    const auto index =
        std::move(*IndexStore::open(directory / "index.mdb", false, IndexStore::Access::write));
    SsdGroup group;
    group.writes = {good.write(), outside.write(), good.write(), good.write()};
    group.writes[2].key = BlockKey::of(77, {1, 2});
    group.writes[3].key = BlockKey::of(1, {3, 4});
    group.writes[3].place = {0, 0xffff'ffff, 0xffff'f000};  // 64 bits of offset are not enough
    for (SsdWrite& write : group.writes) write.written = true;
    REQUIRE(index->apply(group, {}));
  }
  auto ssd = opened_tier(directory.path());
  CHECK(ssd->forgotten().size() == 3);
  CHECK(entries_of(*ssd).size() == 1);
  ssd->forget_these(ssd->forgotten());
  SsdGroup group;
  REQUIRE(ssd->commit(group));
  ssd.reset();
  ssd = opened_tier(directory.path());
  CHECK(entries_of(*ssd).size() == 1);
  CHECK(ssd->forgotten().empty());
}

TEST_CASE("ssd: a wait ends at its deadline, and what was abandoned is cleaned up once, later") {
  const TempDirectory directory;
  FaultPoints faults;
  auto ssd = opened_tier(directory.path(), 16 * kMega, &faults);
  start(*ssd);
  const auto blocks = small_blocks(1, 0, 12);
  SsdGroup group = group_of(blocks);
  REQUIRE(ssd->commit(group));
  faults.pause("ssd.read", 60s);
  auto batch = std::make_unique<TierReads>(blocks);
  ssd->read(batch->reads);
  CHECK_FALSE(batch->reads->wait(std::chrono::steady_clock::now() + 1ms));
  std::atomic<int> cleaned{0};
  // The memory goes with the reads: only the clean-up may free it.
  auto* const memory = batch.release();
  std::atomic<bool> done{false};
  REQUIRE(memory->reads->abandon([&, memory] {
    for (std::size_t i = 0; i < memory->reads->items.size(); ++i)
      if (memory->outcome(i) != ReadOutcome::pending) ++cleaned;
    delete memory;
    done = true;
    done.notify_all();
  }));
  CHECK_FALSE(done);
  faults.resume("ssd.read");
  done.wait(false);
  CHECK(cleaned == 12);

  TierReads whole(blocks);
  ssd->read(whole.reads);
  REQUIRE(whole.reads->wait(soon()));
  CHECK_FALSE(whole.reads->abandon([] { FAIL("all was done"); }));

  // Closing runs what is under way to its end.
  faults.pause("ssd.read", 60s);
  auto last = std::make_unique<TierReads>(blocks);
  ssd->read(last->reads);
  bool closed = false;
  REQUIRE(last->reads->abandon([&] { closed = true; }));
  faults.resume("ssd.read");
  ssd.reset();
  CHECK(closed);
}

TEST_CASE("ssd: readers and the writer do not wait for each other's bytes") {
  const TempDirectory directory;
  const auto ssd = opened_tier(directory.path());
  start(*ssd);
  const auto blocks = small_blocks(1, 0, 64);
  SsdGroup first = group_of(blocks);
  REQUIRE(ssd->commit(first));
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> reads{0}, wrong{0};
  std::vector<std::thread> readers;
  for (int t = 0; t < 3; ++t)
    readers.emplace_back([&] {
      while (!stop || reads < 100) {
        TierReads batch({blocks.begin(), blocks.begin() + 32});
        ssd->read(batch.reads);
        if (!batch.reads->wait(soon())) std::abort();
        for (std::size_t i = 0; i < 32; ++i)
          wrong += batch.outcome(i) != ReadOutcome::whole || batch.into[i] != blocks[i].payload;
        reads += 32;
        (void)ssd->facts();
        (void)ssd->counters();
      }
    });
  for (std::size_t round = 0; round < test::scaled(60); ++round) {
    const auto other = small_blocks(1000 + round * 32, 64, 32);
    SsdGroup group = group_of(other);
    REQUIRE(ssd->commit(group));
  }
  stop = true;
  for (std::thread& reader : readers) reader.join();
  CHECK(wrong == 0);
}

}  // namespace
}  // namespace kvpool
