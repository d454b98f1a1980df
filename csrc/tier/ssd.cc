#include "tier/ssd.h"

#include <algorithm>

#include "base/check.h"
#include "tier/ssd_parts.h"

namespace kvpool {

Ssd::Ssd(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}

Ssd::~Ssd() {
  // A forked child has none of the threads, and the files are its parent's: it must not join,
  // close or unlock anything.
  if (parts_->fork_guard.is_child()) (void)parts_.release();
}

std::vector<SsdSpace> Ssd::spaces() const { return parts_->index->spaces(); }

std::vector<SsdClass> Ssd::classes() const { return parts_->index->classes(); }

// Inside the file, without trusting a number in it: none of these can wrap.
bool Ssd::Parts::is_inside(const BlockEntry& entry) const {
  const std::uint64_t slot_bytes = SlabPool::slot_bytes(entry.bytes);
  if (entry.bytes == 0 || entry.slab_unit >= facts.units) return false;
  return entry.slot < (facts.units - entry.slab_unit) * kUnitBytes / slot_bytes;
}

Result<void> Ssd::for_each_entry(const VisitEntry& visit) const {
  std::vector<std::uint32_t> known;
  for (const SsdSpace& space : spaces()) known.push_back(space.number);
  std::ranges::sort(known);
  std::vector<BlockKey> forgotten;
  auto done = parts_->index->for_each_entry([&](const BlockKey& key, const BlockEntry& entry,
                                                bool check_holds) {
    if (check_holds && parts_->is_inside(entry) && std::ranges::binary_search(known, key.space()))
      visit(key, entry);
    else
      forgotten.push_back(key);
  });
  if (!done) return done;
  parts_->found_forgotten = std::move(forgotten);
  parts_->has_looked = true;
  return {};
}

std::vector<BlockKey> Ssd::forgotten() const {
  if (!parts_->has_looked) (void)for_each_entry([](const BlockKey&, const BlockEntry&) {});
  return parts_->found_forgotten;
}

void Ssd::forget_these(std::vector<BlockKey> keys) {
  parts_->to_forget.insert(parts_->to_forget.end(), keys.begin(), keys.end());
}

std::uint64_t Ssd::units_for(std::uint64_t capacity_bytes) const {
  return SsdSplit::of(capacity_bytes, facts().index_bytes).units;
}

Result<void> Ssd::resize(std::uint64_t capacity_bytes) {
  auto done = parts_->resize(capacity_bytes);
  if (done) return done;
  return fail(done.error().code,
              "SSD tier in " + parts_->options.path + ": " + done.error().message);
}

SsdFacts Ssd::facts() const {
  std::lock_guard lock(parts_->mutex);
  SsdFacts facts = parts_->facts;
  facts.direct = parts_->slabs->direct();
  facts.why_not_direct = parts_->slabs->why_not_direct();
  return facts;
}

SsdCounters Ssd::counters() const {
  const Parts& p = *parts_;
  SsdCounters now;
  now.groups = p.groups;
  now.syncs = p.syncs;
  now.written_blocks = p.written_blocks;
  now.written_bytes = p.written_bytes;
  now.read_blocks = p.read_blocks;
  now.read_bytes = p.read_bytes;
  now.index_written_bytes = p.index_written_bytes;
  now.write_faults = p.write_faults;
  now.read_faults = p.read_faults;
  now.damaged = p.damaged;
  now.commit_faults = p.commit_faults;
  now.direct_refusals = p.slabs->direct_refusals();
  return now;
}

bool Ssd::is_read_only() const { return parts_->read_only; }

std::string Ssd::why_read_only() const {
  std::lock_guard lock(parts_->mutex);
  return parts_->why_read_only;
}

}  // namespace kvpool
