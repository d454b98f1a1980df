// What was there at open: namespaces, entries, then chains and heat.
#include "node/store.h"
#include "base/check.h"

namespace kvpool {
namespace {

constexpr BlockId kMissing = kNoBlock - 1;
constexpr BlockId kLookUpsAhead = 12;

}  // namespace

void Store::restore_spaces(const std::vector<SsdSpace>& spaces,
                           const std::vector<SsdClass>& classes, std::uint64_t entries) {
  index_->begin_with(entries);
  // One that cannot be is left out, as after a large block size and a shrink: most often nothing
  // of it is there any more, and if so, restore_entry() turns it away.
  for (const SsdClass& found : classes) (void)ssd_->restore_class(found);
  for (const SsdSpace& found : spaces) restoring_.emplace(found.number, Restoring{found, nullptr});
}

// Only where there is an entry: what has none left may be of a size that this pool cannot hold.
Namespace* Store::restored_space(std::uint32_t number) {
  const auto known = restoring_.find(number);
  if (known == restoring_.end() || restore_error_) return nullptr;
  auto& [found, space] = known->second;
  if (space != nullptr) return space;
  auto opened = open_namespace(found.id, found.block_bytes);
  if (!opened) {
    restore_error_ = Error{opened.error().code,
                           "it holds blocks of " + std::to_string(found.block_bytes) +
                               " bytes, which this pool cannot hold (" + opened.error().message +
                               "): open it with more DRAM, or use another directory"};
    return nullptr;
  }
  space = *opened;
  ssd_->restore_space(space->incarnation.load(std::memory_order_relaxed), number);
  return space;
}

bool Store::restore_entry(const BlockKey& key, const BlockEntry& entry) {
  Namespace* const known = restored_space(key.space());
  if (known == nullptr || entry.bytes != known->block_bytes) return false;
  Namespace& space = *known;
  const auto record = take_record();
  if (!record) return false;
  const SsdPlace place{entry.slab_unit, entry.slot, entry.bytes};
  const std::uint32_t incarnation = space.incarnation.load(std::memory_order_relaxed);
  private_[*record] = {.pins_or_next = 0,
                       .state = State::resident,
                       .klass = static_cast<std::uint8_t>(space.size_class),
                       .parked = false,
                       .unworthy = false,
                       .copy = false,
                       .flags = kOnSsd | kRestored};
  if (!ssd_->restore_slot(place, *record)) {
    free_record(*record);
    return false;
  }
  index_->prepare(*record, {key.hash128(), incarnation, entry.bytes, 0});
  index_->publish(*record, entry.sum, kTierSsd);
  if (!index_->insert(key.hash128(), incarnation, *record)) {
    index_->withdraw(*record);
    ssd_->give(place);
    free_record(*record);
    return false;
  }
  ssd_->set_place(*record, place);
  ssd_->entry_added();
  ++on_ssd_;
  ++resident_;
  ++space.blocks;
  ++counters_.restored;
  return true;
}

Result<void> Store::entries_restored() {
  if (restore_error_) return std::unexpected(*restore_error_);
  for (const auto& [number, each] : restoring_)
    if (each.space == nullptr) ssd_->forget_space(number);
  return {};
}

// Of each record; kNoBlock: it has none, kMissing: it is not there. Each look-up is two cold lines,
// one after the other, so those of many records are on their way at a time.
std::vector<BlockId> Store::restored_parents(const ParentOf& parent_of) const {
  std::vector<BlockId> parents(records_used_, kNoBlock);
  const auto is_asked = [&](BlockId record) {
    return record < records_used_ && private_[record].state == State::resident &&
           parent_of(record) != Hash128{};
  };
  for (BlockId record = 0; record < records_used_; ++record) {
    const BlockId far = record + 2 * kLookUpsAhead, near = record + kLookUpsAhead;
    if (is_asked(far)) index_->prefetch_bucket(parent_of(far), index_->fields(far).incarnation);
    if (is_asked(near)) index_->prefetch_record(parent_of(near), index_->fields(near).incarnation);
    if (!is_asked(record)) continue;
    if (!index_->find(parent_of(record), index_->fields(record).incarnation, parents[record]))
      parents[record] = kMissing;
  }
  return parents;
}

// Parents before children, wherever they come in the order of keys. A child whose parent is not
// there could never be reached: it goes, and what hangs on it.
void Store::restore_chains(const ParentOf& parent_of, const HeatOf& heat_of, Seconds now) {
  enum class Seen : std::uint8_t { no, open, kept, orphan };
  std::vector<Seen> seen(records_used_, Seen::no);
  std::vector<BlockId> parents = restored_parents(parent_of), path, orphans;
  for (BlockId start = 0; start < records_used_; ++start) {
    if (private_[start].state != State::resident) continue;
    bool is_orphan = false;
    for (BlockId at = start; seen[at] == Seen::no;) {
      seen[at] = Seen::open;
      path.push_back(at);
      const BlockId parent = parents[at];
      if (parent == kNoBlock) break;
      is_orphan = parent == kMissing || seen[parent] == Seen::orphan || seen[parent] == Seen::open;
      if (is_orphan) {
        parents[at] = kNoBlock;
        break;
      }
      at = parent;
    }
    for (; !path.empty(); path.pop_back()) {
      const BlockId record = path.back();
      if (path.size() > kLookUpsAhead)
        __builtin_prefetch(&view().record(path[path.size() - 1 - kLookUpsAhead]));
      const IndexWriter::Fields fields = index_->fields(record);
      seen[record] = is_orphan ? Seen::orphan : Seen::kept;
      if (is_orphan) orphans.push_back(record);
      ssd_->heat().insert(record, fingerprint(fields.incarnation, fields.key), parents[record],
                          SsdBooks::group_of(*ssd_class(record)), now);
      ssd_->heat().set_heat(record, heat_of(record), now);
    }
  }
  for (auto it = orphans.rbegin(); it != orphans.rend(); ++it) retire(*it, Gone::lost, now);
  counters_.restored_orphans = orphans.size();
  counters_.restored -= orphans.size();
  restoring_.clear();
}

}  // namespace kvpool
