// A scan of a closed tier finds what is there, every kind of damage once, and nothing else.
#include "tier/ssd_scan.h"

#include <algorithm>
#include <fstream>

#include "block/checksum.h"
#include "tier/index_store.h"
#include "tier_files.h"
#include "tier_index.h"

namespace kvpool {
namespace {

using Kind = SsdDamage::Kind;
constexpr std::uint64_t kBlock = 10000;  // three pages, the last one not full
constexpr std::uint32_t kSlots = 170;    // of that size in 2 MiB
constexpr std::uint32_t kBlocks = 200;   // more than a slab has
constexpr std::uint64_t kMiB = 1 << 20;

// A tier of kBlocks blocks in two namespaces, closed.
class ClosedTier {
 public:
  ClosedTier() : random_("ssd scan") {
    auto ssd = open();
    REQUIRE_MESSAGE(ssd, ssd.error().message);
    SsdGroup group;
    group.new_spaces = {{1, test::random_hash(random_), kBlock},
                        {2, test::random_hash(random_), kBlock}};
    group.new_classes = {{SlabPool::slot_bytes(kBlock), 1}};
    group.tau_s = 600;
    std::vector<test::Pages> payloads;
    for (std::uint32_t i = 0; i < kBlocks; ++i) {
      payloads.emplace_back(SlabPool::slot_bytes(kBlock), i);
      SsdWrite write = test::random_write(random_, 1 + i % 2, i);
      write.place = place(i);
      write.sum = checksum(payloads.back().data(), kBlock);
      // Chains of one namespace, but for the last block, whose parent is nowhere.
      if (i + 1 < kBlocks) write.parent = i < 2 ? Hash128{} : group.writes[i - 2].key.hash128();
      write.stamp_s = 1000 + i;
      write.written = false;
      group.writes.push_back(write);
    }
    for (std::uint32_t i = 0; i < kBlocks; ++i) group.writes[i].payload = payloads[i].data();
    REQUIRE((*ssd)->commit(group));
    writes_ = group.writes;
    id_ = group.new_spaces[0].id;
  }
  static SsdPlace place(std::uint32_t i) { return {3 * (i / kSlots), i % kSlots, kBlock}; }
  static std::uint64_t offset(std::uint32_t i) { return kSsdDataOffset + place(i).offset(); }

  std::string path() const { return dir_ / "tier"; }
  std::string file(const char* name) const { return path() + "/" + name; }
  const SsdWrite& write(std::uint32_t i) const { return writes_[i]; }
  const Hash128& first_space() const { return id_; }
  test::Random& random() { return random_; }

  Result<std::unique_ptr<Ssd>> open() const {
    SsdOptions options;
    options.path = path();
    options.capacity_bytes = 64 * kMiB;
    options.io_threads = 1;
    return Ssd::open(options);
  }
  std::unique_ptr<SsdScan> scan() const {
    auto opened = SsdScan::open(path());
    REQUIRE_MESSAGE(opened, opened.error().message);
    return std::move(*opened);
  }
  std::string refusal() const {
    const auto opened = SsdScan::open(path());
    REQUIRE(!opened);
    CHECK(opened.error().code == Code::refused);
    CHECK(opened.error().message.find(path()) != std::string::npos);
    return opened.error().message;
  }
  // Entries as no pool would write them.
  void commit_to_index(const SsdGroup& group) const {
    auto index = IndexStore::open(file("index.mdb"), false, IndexStore::Access::write);
    REQUIRE(index);
    REQUIRE((*index)->apply(group, {}));
  }

 private:
  test::TempDirectory dir_;
  test::Random random_;
  std::vector<SsdWrite> writes_;
  Hash128 id_;
};

// All of it, in steps; what was found, by kind.
std::map<Kind, std::vector<SsdDamage>> verified(SsdScan& scan) {
  while (!scan.is_done()) scan.verify_some(7);
  CHECK(scan.progress().blocks == scan.facts().blocks);
  CHECK(scan.progress().damaged == scan.damage().size());
  std::map<Kind, std::vector<SsdDamage>> found;
  for (const SsdDamage& each : scan.damage()) found[each.kind].push_back(each);
  return found;
}
void check_only(const std::map<Kind, std::vector<SsdDamage>>& found, Kind kind, std::size_t count) {
  for (const auto& [each, damage] : found)
    CHECK_MESSAGE(each == kind, "found ", name_of(each), " as well");
  REQUIRE(found.contains(kind));
  CHECK(found.at(kind).size() == count);
}

TEST_CASE("ssd scan: what is whole is counted and found whole") {
  const ClosedTier tier;
  const auto scan = tier.scan();
  const SsdScanFacts& facts = scan->facts();
  CHECK(facts.meta.capacity_bytes == 64 * kMiB);
  CHECK(facts.meta.version == 1);
  CHECK(facts.blocks == kBlocks);
  CHECK(facts.bytes == kBlocks * kBlock);
  CHECK(facts.slot_bytes == kBlocks * 12288);
  CHECK(facts.missing_parents == 1);
  CHECK(facts.slab_file_bytes == kSsdDataOffset + facts.meta.units * kUnitBytes);
  CHECK(facts.index_used_bytes > kBlocks * 94);
  REQUIRE(facts.spaces.size() == 2);
  CHECK(facts.spaces[0].space.id == tier.first_space());
  CHECK(facts.spaces[1].blocks == kBlocks / 2);
  CHECK(facts.spaces[1].bytes == kBlocks / 2 * kBlock);
  REQUIRE(facts.classes.size() == 1);
  CHECK(facts.classes[0].slabs == 2);
  CHECK(facts.classes[0].blocks == kBlocks);
  CHECK(!scan->is_done());
  CHECK(verified(*scan).empty());
  CHECK(scan->progress().bytes == kBlocks * kBlock);
}

TEST_CASE("ssd scan: blocks are counted by the time of their last use") {
  const ClosedTier tier;
  const auto scan = tier.scan();
  const auto count = [&](std::uint64_t now_s) {
    std::vector<std::uint64_t> blocks;
    for (const SsdScanAge& age : scan->ages(now_s)) blocks.push_back(age.blocks);
    return blocks;
  };
  using Counts = std::vector<std::uint64_t>;
  // Stamps are 1000..1199; of a time before them nobody is surprised.
  CHECK(count(0) == Counts{kBlocks, 0, 0, 0, 0, 0, 0});
  CHECK(count(1199) == Counts{60, 140, 0, 0, 0, 0, 0});
  CHECK(count(1000 + 7 * 86400) == Counts{0, 0, 0, 0, 0, 199, 1});
  const auto now = scan->ages(1199), later = scan->ages(1199 + 86400 * 30);
  CHECK(now[0].bytes == 60 * kBlock);
  CHECK(now[0].heat > 0);
  CHECK(later.back().heat < now[0].heat / 1000);
}

TEST_CASE("ssd scan: one process has the tier, or looks at it") {
  const ClosedTier tier;
  {
    const auto ssd = tier.open();
    REQUIRE(ssd);
    CHECK(tier.refusal().find("has it open") != std::string::npos);
  }
  const auto scan = tier.scan();
  const auto ssd = tier.open();
  REQUIRE(!ssd);
  CHECK(ssd.error().message.find("has it open") != std::string::npos);
  CHECK(tier.refusal().find("has it open") != std::string::npos);
}

TEST_CASE("ssd scan: a scan changes neither index nor slabs") {
  const ClosedTier tier;
  const auto bytes_of = [&](const char* name) {
    std::ifstream in(tier.file(name), std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  const std::string index = bytes_of("index.mdb"), slabs = bytes_of("slabs");
  const std::size_t files = test::files_in(tier.path());
  verified(*tier.scan());
  CHECK((bytes_of("index.mdb") == index));
  CHECK((bytes_of("slabs") == slabs));
  CHECK(test::files_in(tier.path()) == files);
}

TEST_CASE("ssd scan: what is no tier is refused, and nothing is made there") {
  const test::TempDirectory dir;
  const auto none = SsdScan::open(dir / "none");
  REQUIRE(!none);
  CHECK(none.error().message.find("No such file") != std::string::npos);
  const auto empty = SsdScan::open(dir.path());
  REQUIRE(!empty);
  CHECK(empty.error().message.find("no tier") != std::string::npos);
  CHECK(test::files_in(dir.path()) == 0);
  std::ofstream(dir / "file") << "x";
  CHECK(!SsdScan::open(dir / "file"));

  const ClosedTier tier, other;
  std::filesystem::copy_file(other.file("slabs"), tier.file("slabs"),
                             std::filesystem::copy_options::overwrite_existing);
  CHECK(tier.refusal().find("different tiers") != std::string::npos);
  std::filesystem::resize_file(tier.file("index.mdb"), 40960);
  CHECK(tier.refusal().find("cut short") != std::string::npos);
}

TEST_CASE("ssd scan: bytes that were not written are found") {
  ClosedTier tier;
  const std::byte one{1};
  test::overwrite(tier.file("slabs"), tier.offset(17) + kBlock - 1, &one, 1);
  test::overwrite(tier.file("slabs"), tier.offset(180) + kBlock, &one, 1);  // not of the payload
  const test::Pages zeros(12288);
  test::overwrite(tier.file("slabs"), tier.offset(190), zeros.data(), zeros.size());
  const auto found = verified(*tier.scan());
  check_only(found, Kind::payload, 2);
  const SsdDamage& damage = found.at(Kind::payload)[0];
  CHECK(damage.key.hash128() == tier.write(17).key.hash128());
  CHECK(damage.offset == tier.offset(17));
  CHECK(damage.bytes == kBlock);
}

TEST_CASE("ssd scan: blocks behind the end of a truncated slab file are found") {
  ClosedTier tier;
  std::filesystem::resize_file(tier.file("slabs"), tier.offset(150) + 5000);
  check_only(verified(*tier.scan()), Kind::outside, kBlocks - 150);
}

TEST_CASE("ssd scan: an entry with a flipped bit is found, wherever the bit is") {
  for (int i = 0; i < 20; ++i) {
    ClosedTier tier;
    std::ifstream in(tier.file("index.mdb"), std::ios::binary);
    const std::string index(std::istreambuf_iterator<char>(in), {});
    const std::size_t byte = tier.random().between<std::size_t>(0, 63);
    const int bit = tier.random().between(0, 7);
    // What a split moved stays in the free part of its old page: every copy is changed.
    const std::string sum = test::bytes_of(tier.write(42).sum);
    for (auto at = index.find(sum); at != std::string::npos; at = index.find(sum, at + 1)) {
      const auto flipped = static_cast<char>(index[at - 16 + byte] ^ (1 << bit));
      test::overwrite(tier.file("index.mdb"), at - 16 + byte, &flipped, 1);
    }
    const auto found = verified(*tier.scan());
    check_only(found, Kind::entry, 1);
    CHECK(found.at(Kind::entry)[0].key.hash128() == tier.write(42).key.hash128());
  }
}

TEST_CASE("ssd scan: entries that no pool would write are found") {
  ClosedTier tier;
  SsdGroup group;
  const auto add = [&](std::uint32_t space, SsdPlace place) {
    group.writes.push_back(test::random_write(tier.random(), space, 0));
    group.writes.back().place = place;
  };
  SUBCASE("a namespace that is not known") {
    add(9, ClosedTier::place(kBlocks));
    tier.commit_to_index(group);
    const auto found = verified(*tier.scan());
    check_only(found, Kind::space, 1);
    CHECK(found.at(Kind::space)[0].space_id == Hash128{});
  }
  SUBCASE("a place that another has a part of") {
    group.new_classes = {{8192, 1}};
    add(1, ClosedTier::place(5));
    add(1, {0, 40 * 12288 / 8192 + 1, 8192});  // parts of blocks 40 and 41
    tier.commit_to_index(group);
    const auto found = verified(*tier.scan());
    check_only(found, Kind::overlap, 5);
  }
  SUBCASE("a size without slabs, a slot behind its slab, a unit behind the file") {
    add(1, {0, 0, 4096});
    add(1, {6, kSlots, kBlock});
    add(1, {1u << 30, 0, kBlock});
    add(1, {6, 0, 0});
    add(1, {6, 0xffffffff, 0xffffffff});
    tier.commit_to_index(group);
    check_only(verified(*tier.scan()), Kind::outside, 5);
  }
}

TEST_CASE("ssd scan: no more damage is told one by one than a terminal can take") {
  ClosedTier tier;
  SsdGroup group;
  for (std::uint32_t i = 0; i < 1500; ++i)
    group.writes.push_back(test::random_write(tier.random(), 7, i));
  tier.commit_to_index(group);
  const auto scan = tier.scan();
  while (!scan->is_done()) scan->verify_some(1000);
  CHECK(scan->progress().damaged == 1500);
  CHECK(scan->damage().size() == SsdScan::kDamageMax);
}

}  // namespace
}  // namespace kvpool
