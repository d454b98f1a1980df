// What the tests of the SSD tier share: blocks that know their payload, groups of them, reads.
#pragma once
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "block/checksum.h"
#include "tier/ssd.h"
#include "tier_files.h"

namespace kvpool::test {

inline constexpr std::uint64_t kMega = 1 << 20;

inline std::chrono::steady_clock::time_point soon() {  // reached means hung
  return std::chrono::steady_clock::now() + std::chrono::seconds(60);
}

// A block of the one namespace (number 1) that these tests have; its seed makes its bytes.
struct TierBlock {
  TierBlock(std::uint64_t block_seed, SsdPlace at)
      : key(BlockKey::of(1, {mix64(block_seed), ~block_seed})),
        place(at),
        payload(at.slot_bytes(), block_seed),
        sum(checksum(payload.data(), at.bytes)) {}

  SsdWrite write(std::uint32_t after = SsdWrite::kNone) const {
    SsdWrite made;
    made.key = key;
    made.place = place;
    made.sum = sum;
    made.payload = payload.data();
    made.after = after;
    return made;
  }

  BlockKey key;
  SsdPlace place;
  Pages payload;
  Hash128 sum;
};

inline SsdGroup group_of(const std::vector<TierBlock>& blocks) {
  SsdGroup group;
  for (const TierBlock& block : blocks) group.writes.push_back(block.write());
  return group;
}

// The first group of a tier: nothing is shown whose namespace is not there.
inline SsdGroup first_group() {
  SsdGroup group;
  group.new_spaces = {{1, {11, 12}, 64 << 10}};
  group.new_classes = {{64 << 10, 1}};
  return group;
}

// A batch of reads and the memory it goes to.
struct TierReads {
  explicit TierReads(const std::vector<TierBlock>& blocks)
      : reads(std::make_shared<SsdReads>(blocks.size())) {
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      into.emplace_back(blocks[i].place.slot_bytes());
      reads->items[i].place = blocks[i].place;
      reads->items[i].sum = blocks[i].sum;
      reads->items[i].into = into[i].data();
    }
  }
  ReadOutcome outcome(std::size_t i) const { return reads->items[i].outcome.load(); }

  std::shared_ptr<SsdReads> reads;
  std::vector<Pages> into;
};

inline ReadOutcome outcome_of(Ssd& ssd, const TierBlock& block) {
  TierReads batch({TierBlock(block.place.bytes == 0 ? 0 : 1, block.place)});
  batch.reads->items[0].sum = block.sum;
  ssd.read(batch.reads);
  REQUIRE(batch.reads->wait(soon()));
  if (batch.outcome(0) == ReadOutcome::whole)
    CHECK(std::memcmp(batch.into[0].data(), block.payload.data(), block.place.bytes) == 0);
  return batch.outcome(0);
}

inline Result<std::unique_ptr<Ssd>> open_tier(const std::string& path,
                                              std::uint64_t capacity_bytes = 16 * kMega,
                                              FaultPoints* faults = nullptr) {
  SsdOptions options;
  options.path = path;
  options.capacity_bytes = capacity_bytes;
  options.faults = faults;
  return Ssd::open(options);
}

inline std::unique_ptr<Ssd> opened_tier(const std::string& path,
                                        std::uint64_t capacity_bytes = 16 * kMega,
                                        FaultPoints* faults = nullptr) {
  auto ssd = open_tier(path, capacity_bytes, faults);
  REQUIRE_MESSAGE(ssd, ssd.error().message);
  return std::move(*ssd);
}

// 64 KiB slots in slabs of one unit.
inline SsdPlace small_slot(std::uint32_t n) { return {n / 32, n % 32, 64 << 10}; }

}  // namespace kvpool::test
