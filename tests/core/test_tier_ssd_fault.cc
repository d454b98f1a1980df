// The SSD tier when a step fails: the group, and nothing beyond it, is lost.
#include <vector>

#include "tier/ssd.h"
#include "tier/ssd_parts.h"
#include "tier_ssd.h"

namespace kvpool {
namespace {

using test::first_group;
using test::group_of;
using test::kMega;
using test::opened_tier;
using test::outcome_of;
using test::small_slot;
using test::TempDirectory;
using test::TierBlock;

struct Tier {
  Tier() : ssd(opened_tier(directory.path(), 16 * kMega, &faults)) {
    SsdGroup group = first_group();
    REQUIRE(ssd->commit(group));
  }
  std::size_t entries() const {
    std::size_t count = 0;
    REQUIRE(ssd->for_each_entry([&](const BlockKey&, const BlockEntry&) { ++count; }));
    return count;
  }
  void reopen() {
    ssd.reset();
    ssd = opened_tier(directory.path(), 16 * kMega, &faults);
  }
  TempDirectory directory;
  FaultPoints faults;
  std::unique_ptr<Ssd> ssd;
};

std::vector<TierBlock> blocks_from(std::uint32_t first, std::uint32_t count) {
  std::vector<TierBlock> made;
  for (std::uint32_t i = first; i < first + count; ++i) made.emplace_back(i, small_slot(i));
  return made;
}

TEST_CASE("ssd fault: a slot that cannot be written is left out, and its followers with it") {
  for (const char* point : {"ssd.write", "ssd.write.short"}) {
    CAPTURE(std::string(point));
    Tier tier;
    // One thread writes, so that the order is known: the fault meets the second write.
    SsdOptions options;
    options.path = tier.directory / "serial";
    options.capacity_bytes = 16 * kMega;
    options.io_threads = 1;
    options.faults = &tier.faults;
    auto ssd = std::move(*Ssd::open(options));
    SsdGroup start = first_group();
    REQUIRE(ssd->commit(start));
    const auto blocks = blocks_from(0, 6);
    SsdGroup group;
    group.writes = {blocks[0].write(), blocks[1].write(0), blocks[2].write(1),
                    blocks[3].write(), blocks[4].write(2), blocks[5].write(3)};
    tier.faults.fail(point, 1, 1);
    REQUIRE(ssd->commit(group));
    CHECK(tier.faults.hits(point) == 1);
    const bool written[] = {true, false, false, true, false, true};
    std::size_t count = 0;
    for (std::size_t i = 0; i < 6; ++i) {
      CHECK(group.writes[i].written == written[i]);
      CHECK(group.writes[i].failed_io == (i == 1));
      if (written[i]) CHECK(outcome_of(*ssd, blocks[i]) == ReadOutcome::whole);
    }
    REQUIRE(ssd->for_each_entry([&](const BlockKey&, const BlockEntry&) { ++count; }));
    CHECK(count == 3);
    CHECK(ssd->counters().write_faults == 1);
    CHECK(ssd->counters().written_blocks == 3);
    CHECK_FALSE(ssd->is_read_only());
  }
}

TEST_CASE("ssd fault: one piece of a large slot is enough to leave it out") {
  Tier tier;
  std::vector<TierBlock> blocks;
  blocks.emplace_back(1, SsdPlace{0, 0, 4 << 20});
  SsdGroup group = group_of(blocks);
  tier.faults.fail("ssd.write", 1, 2);
  REQUIRE(tier.ssd->commit(group));
  CHECK(group.writes[0].failed_io);
  CHECK(tier.entries() == 0);
  CHECK(tier.ssd->counters().write_faults == 1);
  CHECK(tier.ssd->counters().syncs == 0);
}

TEST_CASE("ssd fault: deletes of a group are done though all of its writes failed") {
  Tier tier;
  const auto blocks = blocks_from(0, 2);
  SsdGroup group = group_of({blocks[0]});
  REQUIRE(tier.ssd->commit(group));
  group = group_of({blocks[1]});
  group.deletes = {{blocks[0].key, blocks[0].place}};
  tier.faults.fail("ssd.write", 1, 0);
  REQUIRE(tier.ssd->commit(group));
  CHECK(tier.entries() == 0);
}

TEST_CASE("ssd fault: a commit that is refused leaves the index as it was, and can be repeated") {
  Tier tier;
  const auto blocks = blocks_from(0, 4);
  SsdGroup group = group_of({blocks[0], blocks[1]});
  REQUIRE(tier.ssd->commit(group));
  group = group_of({blocks[2], blocks[3]});
  group.deletes = {{blocks[0].key, blocks[0].place}};
  tier.faults.fail("ssd.commit", 1, 0);
  CHECK_FALSE(tier.ssd->commit(group));
  for (const SsdWrite& write : group.writes) {
    CHECK_FALSE(write.written);
    CHECK_FALSE(write.failed_io);
  }
  CHECK(tier.ssd->counters().commit_faults == 1);
  CHECK(tier.entries() == 2);
  CHECK(outcome_of(*tier.ssd, blocks[0]) == ReadOutcome::whole);
  REQUIRE(tier.ssd->commit(group));
  CHECK(tier.entries() == 3);
  tier.reopen();
  CHECK(tier.entries() == 3);
}

TEST_CASE("ssd fault: keys to forget stay so until a commit has taken them") {
  Tier tier;
  const auto blocks = blocks_from(0, 1);
  SsdGroup group = group_of(blocks);
  REQUIRE(tier.ssd->commit(group));
  tier.ssd->forget_these({blocks[0].key});
  SsdGroup nothing;
  tier.faults.fail("ssd.commit", 1, 0);
  CHECK_FALSE(tier.ssd->commit(nothing));
  CHECK(tier.entries() == 1);
  REQUIRE(tier.ssd->commit(nothing));
  CHECK(tier.entries() == 0);
}

TEST_CASE("ssd fault: after a flush that failed the tier only reads") {
  Tier tier;
  const auto blocks = blocks_from(0, 3);
  SsdGroup group = group_of({blocks[0]});
  REQUIRE(tier.ssd->commit(group));
  group = group_of({blocks[1], blocks[2]});
  tier.faults.fail("ssd.sync", 1, 0);
  CHECK_FALSE(tier.ssd->commit(group));
  CHECK_FALSE(group.writes[0].written);
  CHECK(tier.ssd->is_read_only());
  CHECK(tier.ssd->why_read_only().find("flush") != std::string::npos);
  CHECK_FALSE(tier.ssd->commit(group));
  CHECK_FALSE(tier.ssd->resize(24 * kMega));
  CHECK(outcome_of(*tier.ssd, blocks[0]) == ReadOutcome::whole);
  CHECK(tier.entries() == 1);
  tier.reopen();
  CHECK_FALSE(tier.ssd->is_read_only());
  CHECK(tier.entries() == 1);
}

TEST_CASE("ssd fault: after too many faults the tier only reads, and says why") {
  for (const char* point : {"ssd.write", "ssd.commit"}) {
    CAPTURE(std::string(point));
    Tier tier;
    const auto blocks = blocks_from(0, 2);
    SsdGroup group = group_of({blocks[0]});
    REQUIRE(tier.ssd->commit(group));
    group = group_of({blocks[1]});
    tier.faults.fail(point, kSsdFaultsMax + 1, 0);
    for (std::uint64_t n = 0; n <= kSsdFaultsMax; ++n) {
      CHECK_FALSE(tier.ssd->is_read_only());
      (void)tier.ssd->commit(group);
      CHECK_FALSE(group.writes[0].written);
    }
    CHECK(tier.faults.hits(point) == kSsdFaultsMax + 1);
    CHECK(tier.ssd->is_read_only());
    CHECK(tier.ssd->why_read_only().find("16") != std::string::npos);
    CHECK_FALSE(tier.ssd->commit(group));
    CHECK(outcome_of(*tier.ssd, blocks[0]) == ReadOutcome::whole);
  }
}

TEST_CASE("ssd fault: a read that fails or brings other bytes says so, and the next is right") {
  struct Case {
    const char* point;
    ReadOutcome outcome;
  };
  Tier tier;
  const auto blocks = blocks_from(0, 1);
  SsdGroup group = group_of(blocks);
  REQUIRE(tier.ssd->commit(group));
  for (const Case& fault :
       {Case{"ssd.read", ReadOutcome::failed}, Case{"ssd.read.short", ReadOutcome::failed},
        Case{"ssd.read.flip", ReadOutcome::damaged}}) {
    tier.faults.fail(fault.point, 1, 0);
    CHECK(outcome_of(*tier.ssd, blocks[0]) == fault.outcome);
    CHECK(tier.faults.hits(fault.point) == 1);
    CHECK(outcome_of(*tier.ssd, blocks[0]) == ReadOutcome::whole);
  }
  CHECK(tier.ssd->counters().read_faults == 2);
  CHECK(tier.ssd->counters().damaged == 1);
}

TEST_CASE("ssd fault: O_DIRECT that is refused in the middle of a group loses nothing of it") {
  Tier tier;
  if (!tier.ssd->facts().direct) {
    MESSAGE("this filesystem has no O_DIRECT");
    return;
  }
  const auto blocks = blocks_from(0, 20);
  SsdGroup group = group_of(blocks);
  tier.faults.fail("ssd.direct", 1, 7);
  REQUIRE(tier.ssd->commit(group));
  CHECK(tier.faults.hits("ssd.direct") == 1);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    CHECK(group.writes[i].written);
    CHECK(outcome_of(*tier.ssd, blocks[i]) == ReadOutcome::whole);
  }
  CHECK(tier.ssd->counters().direct_refusals == 1);
  CHECK_FALSE(tier.ssd->facts().direct);
  CHECK(tier.ssd->facts().why_not_direct.find("EINVAL") != std::string::npos);
  tier.reopen();
  CHECK(tier.ssd->facts().direct);
  CHECK(tier.ssd->facts().why_not_direct.empty());
  CHECK(tier.entries() == 20);
}

TEST_CASE("ssd fault: lack of memory for reads is no fault of the device") {
  Tier tier;
  const auto blocks = blocks_from(0, 2);
  SsdGroup group = group_of(blocks);
  REQUIRE(tier.ssd->commit(group));
  for (int round = 0; round < 20; ++round) {  // more than kSsdFaultsMax
    test::TierReads batch(blocks);
    batch.reads->items[1].into = nullptr;
    tier.ssd->read(batch.reads);
    REQUIRE(batch.reads->wait(test::soon()));
    CHECK(batch.outcome(0) == ReadOutcome::whole);
    CHECK(batch.outcome(1) == ReadOutcome::failed);
  }
  CHECK(tier.ssd->counters().read_faults == 0);
  CHECK_FALSE(tier.ssd->is_read_only());
}

TEST_CASE("ssd fault: a transfer that fails is one fault, however many slots it was to bring") {
  Tier tier;
  const auto blocks = blocks_from(0, 8);  // neighbours: read at once
  SsdGroup group = group_of(blocks);
  REQUIRE(tier.ssd->commit(group));
  tier.faults.fail("ssd.read", 8, 0);
  test::TierReads batch(blocks);
  tier.ssd->read(batch.reads);
  REQUIRE(batch.reads->wait(test::soon()));
  for (std::size_t i = 0; i < blocks.size(); ++i) CHECK(batch.outcome(i) == ReadOutcome::failed);
  CHECK(tier.faults.hits("ssd.read") == 8);
  CHECK(tier.ssd->counters().read_faults == 1);
}

}  // namespace
}  // namespace kvpool
