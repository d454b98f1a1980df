#include "tier/ssd_scan.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "base/fork_guard.h"
#include "block/checksum.h"
#include "tier/descriptor.h"
#include "tier/index_store.h"
#include "tier/slab_file.h"
#include "tier/ssd_directory.h"

namespace kvpool {
namespace {

// Of a block that is read piece by piece, so that memory does not follow what an entry says.
constexpr std::size_t kPieceBytes = 4 << 20;

struct Item {
  BlockKey key;
  BlockEntry entry;
  std::uint64_t offset = 0;  // from unit 0
};

// 0, or an errno. The page cache does not keep what is read once.
int sum_of_range(int file, std::uint64_t from, std::uint64_t bytes, std::vector<std::byte>& buffer,
                 Hash128& sum) {
  ChecksumStream stream;
  for (std::uint64_t done = 0; done < bytes;) {
    const std::size_t piece = std::min<std::uint64_t>(bytes - done, kPieceBytes);
    const auto at = static_cast<off_t>(from + done);
    buffer.resize(std::max(buffer.size(), piece));
    const int error = transfer_whole(piece, [&](std::size_t got) {
      return pread(file, buffer.data() + got, piece - got, at + static_cast<off_t>(got));
    });
    if (error != 0) return error;
    stream.update(buffer.data(), piece);
    done += piece;
  }
  posix_fadvise(file, static_cast<off_t>(from), static_cast<off_t>(bytes), POSIX_FADV_DONTNEED);
  sum = stream.digest();
  return 0;
}

}  // namespace

const char* name_of(SsdDamage::Kind kind) {
  switch (kind) {
    case SsdDamage::Kind::entry:
      return "entry";
    case SsdDamage::Kind::space:
      return "space";
    case SsdDamage::Kind::outside:
      return "outside";
    case SsdDamage::Kind::overlap:
      return "overlap";
    case SsdDamage::Kind::payload:
      return "payload";
    case SsdDamage::Kind::unreadable:
      return "unreadable";
  }
  return "";
}

struct SsdScan::Parts {
  Result<void> open(const std::string& path);
  Result<void> open_slabs(const SsdDirectory& directory);
  Result<void> read_entries();
  void judge(const BlockKey& key, const BlockEntry& entry, bool check_holds);
  bool is_in_a_slab(const BlockEntry& entry) const;
  void count_missing_parents();
  void take_out_overlaps();
  void count_slabs();
  void report(SsdDamage::Kind kind, const Item& item);

  ForkGuard fork_guard;
  std::unique_ptr<SsdDirectory> directory;  // has the lock
  Descriptor slabs;
  std::unique_ptr<IndexStore> index;  // closed once it is read
  SsdScanFacts facts;
  std::map<std::uint64_t, std::uint64_t> slab_units;  // by slot bytes
  std::vector<Item> items;                            // to be read, by offset
  std::size_t next = 0;
  Progress progress;
  std::vector<SsdDamage> damage;
  std::vector<std::byte> buffer;
};

// --- opening -------------------------------------------------------------------------------------

Result<void> SsdScan::Parts::open(const std::string& path) {
  // A claim would make the directory.
  struct stat status{};
  if (stat(path.c_str(), &status) != 0) return fail_for(errno, "cannot be opened");
  if (!S_ISDIR(status.st_mode)) return fail(Code::refused, "is not a directory");
  auto claimed = SsdDirectory::claim(path);
  if (!claimed) return std::unexpected(claimed.error());
  directory = std::move(*claimed);
  const auto content = directory->content();
  if (!content) return std::unexpected(content.error());
  if (*content != SsdDirectory::Content::tier)
    return fail(Code::refused, "holds no tier of kvpool");
  auto store = IndexStore::open(directory->index_path(), false, IndexStore::Access::read_only);
  if (!store) return std::unexpected(store.error());
  index = std::move(*store);
  facts.meta = index->meta();
  facts.index_used_bytes = index->used_bytes();
  facts.entries_max = IndexStore::entries_max(facts.meta.index_bytes);
  if (auto opened = open_slabs(*directory); !opened) return opened;
  if (auto read = read_entries(); !read) return read;
  index.reset();
  take_out_overlaps();
  count_slabs();
  progress.blocks = facts.blocks - items.size();
  return {};
}

Result<void> SsdScan::Parts::open_slabs(const SsdDirectory& in) {
  const auto header = SlabFile::open({.directory = in.descriptor(), .direct = false});
  if (!header) return std::unexpected(header.error());
  if (!std::ranges::equal((*header)->header().tier_id, facts.meta.tier_id))
    return fail(Code::refused, "its slab file and its index belong to different tiers");
  slabs = Descriptor(openat(in.descriptor(), kSlabFileName, O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
  struct stat status{};
  if (!slabs.is_open() || fstat(slabs.get(), &status) != 0)
    return fail_for(errno, "slab file: cannot be opened");
  facts.slab_file_bytes = static_cast<std::uint64_t>(status.st_size);
  return {};
}

Result<void> SsdScan::Parts::read_entries() {
  for (const SsdSpace& space : index->spaces()) facts.spaces.push_back({space, 0, 0});
  std::ranges::sort(facts.spaces, {}, [](const auto& each) { return each.space.number; });
  for (const SsdClass& size : index->classes()) {
    facts.classes.push_back({size, 0, 0});
    slab_units[size.slot_bytes] = size.slab_units;
  }
  items.reserve(index->entries());
  const auto read =
      index->for_each_entry([&](const BlockKey& key, const BlockEntry& entry, bool check_holds) {
        judge(key, entry, check_holds);
      });
  if (read) count_missing_parents();  // while they are in the order of keys
  return read;
}

void SsdScan::Parts::judge(const BlockKey& key, const BlockEntry& entry, bool check_holds) {
  using Kind = SsdDamage::Kind;
  const Item item{key, entry, SsdPlace{entry.slab_unit, entry.slot, entry.bytes}.offset()};
  ++facts.blocks;
  if (entry.check != entry_check(key, entry)) return report(Kind::entry, item);
  facts.bytes += entry.bytes;
  facts.slot_bytes += SlabPool::slot_bytes(entry.bytes);
  const auto space = std::ranges::lower_bound(facts.spaces, key.space(), {},
                                              [](const auto& each) { return each.space.number; });
  if (space == facts.spaces.end() || space->space.number != key.space())
    return report(Kind::space, item);
  ++space->blocks;
  space->bytes += entry.bytes;
  if (!check_holds || !is_in_a_slab(entry)) return report(Kind::outside, item);
  items.push_back(item);
}

// Relies on a place that the index has found to be in the file as it should be.
bool SsdScan::Parts::is_in_a_slab(const BlockEntry& entry) const {
  const std::uint64_t slot_bytes = SlabPool::slot_bytes(entry.bytes);
  const auto units = slab_units.find(slot_bytes);
  if (units == slab_units.end() || units->second > facts.meta.units) return false;
  if (entry.slot >= units->second * kUnitBytes / slot_bytes) return false;
  const SsdPlace place{entry.slab_unit, entry.slot, entry.bytes};
  return kSsdDataOffset + place.offset() + slot_bytes <= facts.slab_file_bytes;
}

void SsdScan::Parts::count_missing_parents() {
  const auto less = [](const BlockKey& a, const BlockKey& b) {
    return std::memcmp(&a, &b, sizeof(BlockKey)) < 0;
  };
  for (const Item& item : items) {
    if (item.entry.parent == Hash128{}) continue;
    const BlockKey parent = BlockKey::of(item.key.space(), item.entry.parent);
    facts.missing_parents += !std::ranges::binary_search(items, parent, less, &Item::key);
  }
}

// Nobody knows whose bytes are where two entries say that theirs are: neither is read.
void SsdScan::Parts::take_out_overlaps() {
  std::ranges::sort(items, {}, &Item::offset);
  const auto end_of = [](const Item& item) {
    return item.offset + SlabPool::slot_bytes(item.entry.bytes);
  };
  std::uint64_t end = 0;  // of all before
  std::size_t kept = 0;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const bool meets_one_before = items[i].offset < end;
    end = std::max(end, end_of(items[i]));
    if (meets_one_before || (i + 1 < items.size() && items[i + 1].offset < end))
      report(SsdDamage::Kind::overlap, items[i]);
    else
      items[kept++] = items[i];
  }
  items.resize(kept);
}

// Relies on the order of offsets: the blocks of a slab follow each other.
void SsdScan::Parts::count_slabs() {
  std::map<std::uint64_t, SsdScanFacts::Class*> classes;
  for (SsdScanFacts::Class& each : facts.classes) classes[each.size.slot_bytes] = &each;
  std::map<std::uint64_t, std::uint32_t> last;  // slab of a class
  for (const Item& item : items) {
    const std::uint64_t slot_bytes = SlabPool::slot_bytes(item.entry.bytes);
    SsdScanFacts::Class& mine = *classes[slot_bytes];
    if (mine.blocks++ == 0 || last[slot_bytes] != item.entry.slab_unit) ++mine.slabs;
    last[slot_bytes] = item.entry.slab_unit;
  }
}

void SsdScan::Parts::report(SsdDamage::Kind kind, const Item& item) {
  ++progress.damaged;
  if (damage.size() >= kDamageMax) return;
  const auto space = std::ranges::find(facts.spaces, item.key.space(),
                                       [](const auto& each) { return each.space.number; });
  damage.push_back({kind, item.key, space == facts.spaces.end() ? Hash128{} : space->space.id,
                    kSsdDataOffset + item.offset, item.entry.bytes});
}

Result<std::unique_ptr<SsdScan>> SsdScan::open(const std::string& path) {
  auto parts = std::make_unique<Parts>();
  if (const auto opened = parts->open(path); !opened)
    return fail(opened.error().code, "SSD tier in " + path + ": " + opened.error().message);
  return std::unique_ptr<SsdScan>(new SsdScan(std::move(parts)));
}

SsdScan::SsdScan(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}

SsdScan::~SsdScan() {
  // The lock is the parent's: a forked child must not give it up.
  if (parts_->fork_guard.is_child()) (void)parts_.release();
}

// --- looking -------------------------------------------------------------------------------------

const SsdScanFacts& SsdScan::facts() const { return parts_->facts; }
SsdScan::Progress SsdScan::progress() const { return parts_->progress; }
bool SsdScan::is_done() const { return parts_->next == parts_->items.size(); }
const std::vector<SsdDamage>& SsdScan::damage() const { return parts_->damage; }

std::vector<SsdScanAge> SsdScan::ages(std::uint64_t now_s) const {
  constexpr std::uint64_t kHour = 3600, kDay = 24 * kHour;
  std::vector<SsdScanAge> ages;
  for (const std::uint64_t limit : {60ul, 600ul, kHour, 6 * kHour, kDay, 7 * kDay, 0ul})
    ages.push_back({.seconds_max = limit});
  const double tau_s = parts_->facts.meta.tau_s;
  for (const Item& item : parts_->items) {
    const std::uint64_t age_s = now_s - std::min<std::uint64_t>(now_s, item.entry.stamp_s);
    const auto mine = std::ranges::find_if(ages, [&](const SsdScanAge& each) {
      return each.seconds_max == 0 || age_s < each.seconds_max;
    });
    ++mine->blocks;
    mine->bytes += item.entry.bytes;
    const double halvings = tau_s > 0 ? static_cast<double>(age_s) / tau_s : 0;
    mine->heat += static_cast<double>(item.entry.heat) * std::exp2(-halvings);
  }
  return ages;
}

void SsdScan::verify_some(std::size_t blocks) {
  Parts& p = *parts_;
  for (; blocks > 0 && p.next < p.items.size(); --blocks) {
    const Item& item = p.items[p.next++];
    Hash128 sum;
    const int error =
        sum_of_range(p.slabs.get(), kSsdDataOffset + item.offset, item.entry.bytes, p.buffer, sum);
    if (error != 0)
      p.report(SsdDamage::Kind::unreadable, item);
    else if (sum != item.entry.sum)
      p.report(SsdDamage::Kind::payload, item);
    ++p.progress.blocks;
    p.progress.bytes += item.entry.bytes;
  }
}

}  // namespace kvpool
