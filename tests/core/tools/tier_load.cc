#include "tier_load.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "base/check.h"
#include "block/checksum.h"

namespace kvpool::test {
namespace {

// Two sizes that do not fill their slots, so that tails are there as well.
constexpr std::uint32_t kBlockBytes[] = {10'000, 37'000};
constexpr std::size_t kSpacesMax = 4;
constexpr std::uint64_t kDeletesMax = 6, kWritesMax = 7, kMovesMax = 2, kStampsMax = 4;

BlockKey key_from(const KeyBytes& bytes) {
  BlockKey key;
  std::memcpy(&key, bytes.data(), sizeof key);
  return key;
}

}  // namespace

TierLoad::Buffer::Buffer(std::uint64_t bytes)
    : at(static_cast<std::byte*>(std::aligned_alloc(kSlotAlignBytes, bytes)), std::free) {
  KVP_CHECK(at != nullptr);
  std::memset(at.get(), 0, bytes);
}

TierLoad::TierLoad(const SsdOptions& options, Reuse reuse, std::uint64_t seed)
    : options_(options), reuse_(reuse), dice_(seed) {
  open();
  const auto units = static_cast<std::uint32_t>(ssd_->facts().units);
  slots_ = std::make_unique<SlabPool>(units, units);
  for (const std::uint32_t bytes : kBlockBytes) classes_.push_back(*slots_->class_of(bytes));
  model_.next_space = 1;
}

void TierLoad::open() {
  auto opened = Ssd::open(options_);
  if (!opened) std::fprintf(stderr, "%s\n", opened.error().message.c_str());
  KVP_CHECK(opened.has_value());
  ssd_ = std::move(*opened);
  Expected::instance().promise_newest();
}

void TierLoad::reopen() {
  ssd_.reset();
  open();
  IndexState shown;
  const auto visited = ssd_->for_each_entry(
      [&](const BlockKey& key, const BlockEntry& entry) { shown.entries[bytes_of(key)] = entry; });
  KVP_CHECK(visited.has_value());
  const IndexState newest = Expected::instance().newest();
  for (const SsdSpace& space : ssd_->spaces())
    shown.spaces[space.number] = {space.id, space.block_bytes};
  for (const SsdClass& each : ssd_->classes()) shown.classes[each.slot_bytes] = each.slab_units;
  shown.hidden = ssd_->forgotten().size();
  shown.next_space = ssd_->facts().next_space;
  shown.tau_s = ssd_->facts().tau_s;
  differing_ += !is_same(shown, newest);
}

void TierLoad::step() {
  SsdGroup group;
  deleted_.clear();
  changed_.clear();
  buffers_.clear();
  change_spaces(group);
  add_deletes(group);
  if (reuse_ == Reuse::before_commit) give_back();
  add_moves(group);
  add_writes(group);
  add_stamps(group);
  if (dice_.chance(0.3)) model_.tau_s = group.tau_s = 10.0 + static_cast<double>(dice_.below(9));
  const bool committed = ssd_->commit(group);
  KVP_CHECK(committed);
  if (!expect_commit(group)) return;  // of nothing: no commit, so nothing came free
  if (reuse_ == Reuse::after_next_commit) std::swap(left_, left_before_);
  give_back();
}

void TierLoad::give_back() {
  for (const SsdPlace& place : left_) slots_->give(slots_->slot_at(place.offset()));
  left_.clear();
}

void TierLoad::leave(const SsdPlace& place) { left_.push_back(place); }

TierLoad::Blocks::iterator TierLoad::any_block() {
  if (blocks_.empty()) return blocks_.end();
  return std::next(blocks_.begin(), static_cast<std::ptrdiff_t>(dice_.below(blocks_.size())));
}

// --- one group -----------------------------------------------------------------------------------

void TierLoad::change_spaces(SsdGroup& group) {
  if (groups_ == 0) {
    for (const ClassId id : classes_) {
      group.new_classes.push_back({slots_->slot_bytes_of(id), slots_->slab_units(id)});
      model_.classes[slots_->slot_bytes_of(id)] = slots_->slab_units(id);
    }
  }
  if (spaces_.empty() || (spaces_.size() < kSpacesMax && dice_.chance(0.1))) {
    const std::uint32_t number = next_space_++;
    const SsdSpace space{number, {mix64(number), number}, kBlockBytes[number % 2]};
    group.new_spaces.push_back(space);
    spaces_.push_back(number);
    model_.spaces[number] = {space.id, space.block_bytes};
    model_.next_space = next_space_;
  } else if (spaces_.size() > 1 && dice_.chance(0.02)) {
    const std::uint32_t number = spaces_.front();
    spaces_.erase(spaces_.begin());
    group.dropped_spaces.push_back(number);
    model_.spaces.erase(number);
    for (auto block = blocks_.begin(); block != blocks_.end();) {
      const auto next = std::next(block);
      if (block->second.space == number) erase(group, block);
      block = next;
    }
  }
}

void TierLoad::erase(SsdGroup& group, Blocks::iterator block) {
  group.deletes.push_back({key_from(block->first), block->second.place});
  leave(block->second.place);
  deleted_.push_back(block->first);
  model_.entries.erase(block->first);
  blocks_.erase(block);
}

void TierLoad::add_deletes(SsdGroup& group) {
  const bool is_full = std::ranges::none_of(
      classes_, [&](ClassId id) { return slots_->free_slots(id) > kWritesMax; });
  if (!is_full && dice_.chance(0.5)) return;
  for (std::uint64_t left = dice_.between(1, kDeletesMax); left > 0 && !blocks_.empty(); --left)
    erase(group, any_block());
}

// The same block in another place; its old one is left as a deleted one's is.
void TierLoad::add_moves(SsdGroup& group) {
  for (std::uint64_t left = dice_.below(kMovesMax + 1); left > 0 && !blocks_.empty(); --left) {
    const auto block = any_block();
    if (std::ranges::find(changed_, block->first) != changed_.end()) continue;
    const SsdPlace from = block->second.place;
    const KnownPayload payload = *Expected::instance().payload_of(block->second.sum);
    if (add_write(group, key_from(block->first), block->second.klass, payload.seed)) leave(from);
  }
}

void TierLoad::add_writes(SsdGroup& group) {
  for (std::uint64_t left = dice_.below(kWritesMax + 1); left > 0; --left) {
    const std::uint64_t seed = next_seed_++;
    BlockKey key = BlockKey::of(spaces_[dice_.below(spaces_.size())], {mix64(seed), seed});
    // Deleted by this group and written again by it, as something else.
    if (!deleted_.empty() && dice_.chance(0.2)) {
      const BlockKey again = key_from(deleted_[dice_.below(deleted_.size())]);
      const bool is_known = std::ranges::find(spaces_, again.space()) != spaces_.end();
      if (is_known && !blocks_.contains(bytes_of(again))) key = again;
    }
    add_write(group, key, classes_[dice_.below(classes_.size())], seed);
  }
}

bool TierLoad::add_write(SsdGroup& group, const BlockKey& key, ClassId klass, std::uint64_t seed) {
  std::vector<UnitRun> ignored;
  if (!slots_->has_room(klass) && !slots_->add_slab(klass, ignored)) return false;
  const auto slot = slots_->take(klass, 0);
  if (!slot) return false;
  const std::uint32_t bytes = kBlockBytes[klass];
  Buffer& buffer = buffers_.emplace_back(slots_->slot_bytes_of(klass));
  fill_payload(seed, {buffer.at.get(), bytes});
  SsdWrite write;
  write.key = key;
  write.place = {static_cast<std::uint32_t>(slots_->slab_offset(slot->slab) / kUnitBytes),
                 slot->index, bytes};
  write.sum = checksum(buffer.at.get(), bytes);
  if (dice_.chance(0.5)) write.parent = {dice_.below(1000), 1};
  write.heat = static_cast<float>(dice_.below(100)) / 8;
  write.stamp_s = static_cast<std::uint32_t>(groups_);
  write.payload = buffer.at.get();
  Expected::instance().note_payload(write.sum, {key.hash128(), seed, bytes});
  group.writes.push_back(write);
  blocks_[bytes_of(key)] = {key.space(), write.place, klass, write.sum};
  changed_.push_back(bytes_of(key));
  BlockEntry& entry = model_.entries[bytes_of(key)];
  entry = {.slab_unit = write.place.slab_unit,
           .slot = write.place.slot,
           .bytes = bytes,
           .stamp_s = write.stamp_s,
           .sum = write.sum,
           .parent = write.parent,
           .generation = groups_ + 1,
           .heat = write.heat,
           .check = 0};
  return true;
}

void TierLoad::add_stamps(SsdGroup& group) {
  for (std::uint64_t left = dice_.below(kStampsMax + 1); left > 0 && !blocks_.empty(); --left) {
    const auto block = any_block();
    if (std::ranges::find(changed_, block->first) != changed_.end()) continue;
    const SsdStamp stamp{key_from(block->first), block->second.place,
                         static_cast<float>(dice_.below(1000)) / 16,
                         static_cast<std::uint32_t>(groups_)};
    group.stamps.push_back(stamp);
    BlockEntry& entry = model_.entries[block->first];
    entry.heat = stamp.heat;
    entry.stamp_s = stamp.stamp_s;
  }
}

// Entries are compared without their own checks, which only the tier knows how to make. True: there
// was a commit.
bool TierLoad::expect_commit(const SsdGroup& group) {
  IndexState now = Expected::instance().newest();
  const bool is_touched = now.groups == groups_ + 1;
  const bool has_content = !group.writes.empty() || !group.deletes.empty() ||
                           !group.stamps.empty() || !group.new_spaces.empty() ||
                           !group.dropped_spaces.empty() || group.tau_s > 0;
  for (auto& [key, entry] : now.entries) entry.check = 0;
  differing_ += is_touched != has_content || !is_same(now, model_);
  groups_ = now.groups;
  return has_content;
}

}  // namespace kvpool::test
