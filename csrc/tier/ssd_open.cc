// Opening, formatting, and the size of a tier.
#include <sys/random.h>
#include <sys/statvfs.h>

#include <algorithm>

#include "base/check.h"
#include "tier/ssd_parts.h"

namespace kvpool {
namespace {

std::string bytes_text(std::uint64_t bytes) { return std::to_string(bytes) + " bytes"; }

bool fill_random(std::uint8_t (&id)[16]) {
  return getrandom(id, sizeof id, 0) == static_cast<ssize_t>(sizeof id);
}

}  // namespace

SsdSplit SsdSplit::of(std::uint64_t capacity_bytes, std::uint64_t index_bytes_now) {
  SsdSplit split;
  split.index_bytes = std::max(index_bytes_now, IndexStore::bytes_for(capacity_bytes));
  const std::uint64_t books = split.bytes();
  if (capacity_bytes > books) split.units = (capacity_bytes - books) / kUnitBytes;
  return split;
}

std::uint64_t SsdSplit::least(std::uint64_t index_bytes_now) {
  // More capacity may ask for more index, which asks for more capacity; it settles in a few steps,
  // since the index is a small part.
  std::uint64_t capacity_bytes = 0;
  for (;;) {
    SsdSplit split = of(capacity_bytes, index_bytes_now);
    if (split.units > 0) return capacity_bytes;
    split.units = 1;
    capacity_bytes = std::max(capacity_bytes + 1, split.bytes());
  }
}

Result<SsdSplit> Ssd::Parts::split_or_refuse(std::uint64_t capacity_bytes,
                                             std::uint64_t index_bytes_now) const {
  const SsdSplit split = SsdSplit::of(capacity_bytes, index_bytes_now);
  if (split.units == 0)
    return fail(Code::bad_argument, "a capacity of " + bytes_text(capacity_bytes) +
                                        " is too small; the least is " +
                                        bytes_text(SsdSplit::least(index_bytes_now)));
  if (split.units > kSsdUnitsMax)
    return fail(Code::bad_argument, "a capacity of " + bytes_text(capacity_bytes) +
                                        " is more than a tier can have (2 PiB)");
  return split;
}

// Asked before room is taken: an answer with numbers, where a failure half-way would be none.
Result<void> Ssd::Parts::check_room(std::uint64_t more_bytes) const {
  struct statvfs room{};
  if (fstatvfs(directory->descriptor(), &room) != 0)
    return fail_for(errno, "its filesystem does not say how much is free");
  const std::uint64_t free_bytes = room.f_bavail * room.f_frsize;
  const std::uint64_t floor_bytes = options.free_floor_bytes;
  if (free_bytes >= more_bytes && free_bytes - more_bytes >= floor_bytes) return {};
  return fail(Code::no_resource,
              "needs " + bytes_text(more_bytes) + " more and " + bytes_text(floor_bytes) +
                  " are to stay free, but its filesystem has " + bytes_text(free_bytes) + " free");
}

Result<void> Ssd::Parts::format() {
  if (options.capacity_bytes == 0)
    return fail(Code::bad_argument, "holds no tier yet, and a new one needs a capacity");
  const auto split = split_or_refuse(options.capacity_bytes, 0);
  if (!split) return std::unexpected(split.error());
  TierMeta meta;
  if (!fill_random(meta.tier_id) || !fill_random(meta.node_id))
    return fail_for(errno, "no random numbers");
  meta.capacity_bytes = options.capacity_bytes;
  meta.units = split->units;
  meta.index_bytes = split->index_bytes;

  if (auto done = directory->start_format(); !done) return done;
  if (auto done = check_room(split->bytes()); !done) return done;
  auto file = SlabFile::create({directory->descriptor(), options.direct, options.faults},
                               meta.tier_id, split->units);
  if (!file) return std::unexpected(file.error());
  slabs = std::move(*file);
  auto store =
      IndexStore::create(directory->index_path(), meta, options.durability == Durability::relaxed);
  if (!store) return std::unexpected(store.error());
  index = std::move(*store);
  return directory->end_format();
}

Result<void> Ssd::Parts::open_existing() {
  auto file = SlabFile::open({directory->descriptor(), options.direct, options.faults});
  if (!file) return std::unexpected(file.error());
  slabs = std::move(*file);
  auto store = IndexStore::open(directory->index_path(), options.durability == Durability::relaxed,
                                IndexStore::Access::write);
  if (!store) return std::unexpected(store.error());
  index = std::move(*store);
  const TierMeta& meta = index->meta();
  if (!std::ranges::equal(meta.tier_id, slabs->header().tier_id))
    return fail(Code::refused,
                "its slab file and its index belong to different tiers; put the "
                "one that belongs here back, or empty the directory");
  if (meta.units == 0 || meta.units > kSsdUnitsMax)
    return fail(Code::refused, "its index says " + std::to_string(meta.units) +
                                   " units, which no tier has; empty the directory");
  if (auto done = slabs->restore(meta.units); !done) return done;
  // A smaller capacity is not taken here: only the node can move blocks out of the end.
  if (options.capacity_bytes > meta.capacity_bytes) return resize(options.capacity_bytes);
  return {};
}

Result<void> Ssd::Parts::open() {
  auto claimed = SsdDirectory::claim(options.path);
  if (!claimed) return std::unexpected(claimed.error());
  directory = std::move(*claimed);
  const auto content = directory->content();
  if (!content) return std::unexpected(content.error());
  auto threads = IoPool::create(options.io_threads);  // what can fail comes before a format
  if (!threads) return std::unexpected(threads.error());
  pool = std::move(*threads);
  auto opened = *content == SsdDirectory::Content::tier ? open_existing() : format();
  if (!opened) return opened;
  take_facts();
  directory->keep();
  return {};
}

Result<void> Ssd::Parts::resize(std::uint64_t capacity_bytes) {
  if (read_only) return fail(Code::refused, "only reads, and cannot be resized");
  const TierMeta before = index->meta();
  const auto split = split_or_refuse(capacity_bytes, before.index_bytes);
  if (!split) return std::unexpected(split.error());
  const SsdSplit now{before.units, before.index_bytes};
  if (split->bytes() > now.bytes())
    if (auto done = check_room(split->bytes() - now.bytes()); !done) return done;

  // The index never says more units than the file has: growing, the file goes first; shrinking,
  // the index does.
  if (split->units > before.units)
    if (auto done = slabs->resize(split->units); !done) return done;
  auto recorded = index->grow(split->index_bytes, capacity_bytes, split->units);
  if (!recorded) {
    if (index->is_broken())
      make_read_only("the index does not know whether it has a new size: " +
                     recorded.error().message);
    else if (split->units > before.units)
      (void)slabs->resize(before.units);  // a longer file is cut at the next open
    return recorded;
  }
  take_facts();
  return split->units < before.units ? slabs->resize(split->units) : Result<void>{};
}

void Ssd::Parts::take_facts() {
  const TierMeta& meta = index->meta();
  std::lock_guard lock(mutex);
  std::ranges::copy(meta.tier_id, facts.tier_id);
  std::ranges::copy(meta.node_id, facts.node_id);
  facts.capacity_bytes = meta.capacity_bytes;
  facts.units = meta.units;
  facts.index_bytes = meta.index_bytes;
  facts.index_used_bytes = index->used_bytes();
  facts.entries = index->entries();
  facts.entries_max = IndexStore::entries_max(meta.index_bytes);
  facts.next_space = meta.next_space;
  facts.tau_s = meta.tau_s;
  index_written_bytes = index->written_bytes();
}

Result<std::unique_ptr<Ssd>> Ssd::open(const SsdOptions& options) {
  auto parts = std::make_unique<Parts>(options);
  if (auto opened = parts->open(); !opened)
    return fail(opened.error().code, "SSD tier in " + options.path + ": " + opened.error().message);
  return std::unique_ptr<Ssd>(new Ssd(std::move(parts)));
}

}  // namespace kvpool
