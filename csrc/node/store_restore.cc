// What was there at open: namespaces, entries, then chains and heat.
#include "node/store.h"
#include "base/check.h"

namespace kvpool {

Result<void> Store::restore_spaces(const std::vector<SsdSpace>& spaces,
                                   const std::vector<SsdClass>& classes) {
  for (const SsdClass& found : classes)
    if (!ssd_->restore_class(found))
      return fail(Code::refused, "slabs for slots of " + std::to_string(found.slot_bytes) +
                                     " bytes, " + std::to_string(found.slab_units) +
                                     " units long, cannot be");
  for (const SsdSpace& found : spaces) {
    auto space = open_namespace(found.id, found.block_bytes);
    if (!space)
      return fail(
          Code::bad_argument,
          "the SSD directory holds a namespace that this pool cannot: " + space.error().message);
    ssd_->set_number((*space)->incarnation.load(std::memory_order_relaxed), found.number);
    restoring_.emplace(found.number, *space);
  }
  return {};
}

bool Store::restore_entry(const BlockKey& key, const BlockEntry& entry) {
  const auto known = restoring_.find(key.space());
  if (known == restoring_.end() || entry.bytes != known->second->block_bytes) return false;
  Namespace& space = *known->second;
  const auto record = take_record();
  if (!record) return false;
  const SsdPlace place{entry.slab_unit, entry.slot, entry.bytes};
  const std::uint32_t incarnation = space.incarnation.load(std::memory_order_relaxed);
  private_[*record] = {.pins_or_next = 0,
                       .state = State::resident,
                       .klass = static_cast<std::uint8_t>(space.size_class),
                       .parked = false,
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

// Parents before children, wherever they come in the order of keys. A child whose parent is not
// there could never be reached: it goes, and what hangs on it.
void Store::restore_chains(const ParentOf& parent_of, const HeatOf& heat_of, Seconds now) {
  enum class Seen : std::uint8_t { no, open, kept, orphan };
  std::vector<Seen> seen(records_used_, Seen::no);
  std::vector<BlockId> parents(records_used_, kNoBlock), path, orphans;
  for (BlockId start = 0; start < records_used_; ++start) {
    if (private_[start].state != State::resident) continue;
    bool is_orphan = false;
    for (BlockId at = start; seen[at] == Seen::no;) {
      seen[at] = Seen::open;
      path.push_back(at);
      const Hash128 hash = parent_of(at);
      if (hash == Hash128{}) break;
      BlockId parent = kNoBlock;
      const bool found = index_->find(hash, index_->fields(at).incarnation, parent);
      is_orphan = !found || seen[parent] == Seen::orphan || seen[parent] == Seen::open;
      if (is_orphan) break;
      parents[at] = parent;
      at = parent;
    }
    for (; !path.empty(); path.pop_back()) {
      const BlockId record = path.back();
      const IndexWriter::Fields fields = index_->fields(record);
      seen[record] = is_orphan ? Seen::orphan : Seen::kept;
      if (is_orphan) orphans.push_back(record);
      ssd_->heat().insert(record, fingerprint(fields.incarnation, fields.key), parents[record],
                          SsdBooks::group_of(*ssd_class(record)), now);
      ssd_->heat().set_heat(record, heat_of(record), now);
    }
  }
  for (auto it = orphans.rbegin(); it != orphans.rend(); ++it) retire(*it, Leave::removed, now);
  counters_.restored_orphans = orphans.size();
  counters_.restored -= orphans.size();
  restoring_.clear();
}

}  // namespace kvpool
