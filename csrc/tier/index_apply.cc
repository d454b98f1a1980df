#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "tier/descriptor.h"
#include "tier/index_parts.h"

namespace kvpool {
namespace {

bool names_place(const BlockEntry& entry, const SsdPlace& place) {
  return SsdPlace{entry.slab_unit, entry.slot, entry.bytes} == place;
}

BlockEntry entry_of(const SsdWrite& write, std::uint64_t generation) {
  BlockEntry entry;
  entry.slab_unit = write.place.slab_unit;
  entry.slot = write.place.slot;
  entry.bytes = write.place.bytes;
  entry.stamp_s = write.stamp_s;
  entry.sum = write.sum;
  entry.parent = write.parent;
  entry.generation = generation;
  entry.heat = write.heat;
  entry.check = entry_check(write.key, entry);
  return entry;
}

// The steps of one transaction. Each answers LMDB's code; the first that is not 0 ends it all.
class Change {
 public:
  Change(const IndexStore::Parts& parts, MDB_txn* txn) : parts_(parts), txn_(txn) {}

  int drop_space(std::uint32_t number) { return erase(parts_.spaces_db, value_of(number)); }
  int add_space(const SsdSpace& space) {
    return put(txn_, parts_.spaces_db, value_of(space.number), space_record(space));
  }
  int add_class(const SsdClass& each) {
    return put(txn_, parts_.classes_db, value_of(each.slot_bytes), each.slab_units);
  }
  int erase_key(const BlockKey& key) { return erase(parts_.blocks_db, value_of(key)); }

  int erase_block(const SsdDelete& each) {
    BlockEntry entry;
    const int code = find(each.key, entry);
    if (code != 0 || !names_place(entry, each.place)) return code == MDB_NOTFOUND ? 0 : code;
    return erase_key(each.key);
  }
  int stamp(const SsdStamp& each) {
    BlockEntry entry;
    const int code = find(each.key, entry);
    if (code != 0) return code == MDB_NOTFOUND ? 0 : code;
    // An entry that is damaged must not get a check that holds.
    if (!names_place(entry, each.place) || entry.check != entry_check(each.key, entry)) return 0;
    entry.heat = each.heat;
    entry.stamp_s = each.stamp_s;
    entry.check = entry_check(each.key, entry);
    return put(txn_, parts_.blocks_db, value_of(each.key), entry);
  }
  int write(const SsdWrite& each, std::uint64_t generation) {
    return put(txn_, parts_.blocks_db, value_of(each.key), entry_of(each, generation));
  }

 private:
  int find(const BlockKey& key, BlockEntry& entry) {
    MDB_val wanted = value_of(key), value;
    const int code = mdb_get(txn_, parts_.blocks_db, &wanted, &value);
    if (code != 0) return code;
    return copy_out(value, entry) ? 0 : MDB_CORRUPTED;
  }
  int erase(MDB_dbi db, MDB_val key) {
    const int code = mdb_del(txn_, db, &key, nullptr);
    return code == MDB_NOTFOUND ? 0 : code;
  }

  const IndexStore::Parts& parts_;
  MDB_txn* txn_;
};

template <typename Item, typename Step>
int each_of(const std::vector<Item>& items, const Step& step) {
  for (const Item& item : items)
    if (const int code = step(item)) return code;
  return 0;
}

// What leaves goes first: it makes room for what comes.
int change_all(Change& change, const SsdGroup& group, const std::vector<BlockKey>& also_delete,
               std::uint64_t generation) {
  int code = each_of(also_delete, [&](const auto& key) { return change.erase_key(key); });
  if (code == 0)
    code = each_of(group.deletes, [&](const auto& each) { return change.erase_block(each); });
  if (code == 0)
    code = each_of(group.dropped_spaces, [&](auto number) { return change.drop_space(number); });
  if (code == 0)
    code = each_of(group.new_spaces, [&](const auto& space) { return change.add_space(space); });
  if (code == 0)
    code = each_of(group.new_classes, [&](const auto& each) { return change.add_class(each); });
  if (code == 0)
    code = each_of(group.writes, [&](const auto& each) {
      return each.written ? change.write(each, generation) : 0;
    });
  if (code == 0) code = each_of(group.stamps, [&](const auto& each) { return change.stamp(each); });
  return code;
}

TierMeta meta_after(const TierMeta& before, const SsdGroup& group) {
  TierMeta meta = before;
  ++meta.groups;
  for (const SsdSpace& space : group.new_spaces)
    meta.next_space = std::max<std::uint64_t>(meta.next_space, space.number + 1ull);
  if (group.tau_s != 0) meta.tau_s = group.tau_s;
  return meta;
}

// Runs `step` and the new meta record as one transaction.
template <typename Step>
Result<void> commit_with(IndexStore::Parts& parts, TierMeta meta, const Step& step) {
  if (parts.is_broken)
    return fail(Code::no_resource, "index file: no commit after one with an unknown end");
  IndexTxn txn(parts.env, 0);
  if (txn.begin_code() != 0) {
    parts.is_broken = txn.begin_code() == MDB_PANIC;
    return std::unexpected(parts.error(txn.begin_code(), "cannot begin a commit"));
  }
  const std::size_t id = mdb_txn_id(txn);
  seal(meta);
  int code = step(txn);
  if (code == 0) code = put(txn, parts.meta_db, value_of(kMetaKey), meta);
  if (code != 0) return std::unexpected(parts.error(code, "cannot prepare a commit"));
  code = txn.commit();
  if (code != 0) {
    // LMDB's own codes, and memory, come before the first write. What the disk refuses may leave
    // pages or the commit record in any state until the file is opened anew.
    parts.is_broken = code > 0 && code != ENOMEM;
    return std::unexpected(parts.error(code, "cannot commit"));
  }
  parts.meta = meta;
  parts.refresh_figures(id);
  return {};
}

}  // namespace

Result<void> IndexStore::apply(const SsdGroup& group, const std::vector<BlockKey>& also_delete) {
  const TierMeta meta = meta_after(parts_->meta, group);
  return commit_with(*parts_, meta, [&](MDB_txn* txn) {
    Change change(*parts_, txn);
    return change_all(change, group, also_delete, meta.groups);
  });
}

Result<void> IndexStore::grow(std::uint64_t index_bytes, std::uint64_t capacity_bytes,
                              std::uint64_t units) {
  if (parts_->is_broken)
    return fail(Code::no_resource, "index file: not resized after a commit that failed");
  TierMeta meta = parts_->meta;
  meta.capacity_bytes = capacity_bytes;
  meta.units = units;
  if (index_bytes > meta.index_bytes) {
    const Descriptor file(::open(parts_->path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC));
    if (!file.is_open()) return std::unexpected(parts_->error(errno, "cannot be opened"));
    const int code = posix_fallocate(file.get(), 0, static_cast<off_t>(index_bytes));
    // A full disk leaves what it could give: it is given back.
    if (code != 0) (void)!ftruncate(file.get(), static_cast<off_t>(meta.index_bytes));
    if (code != 0) return std::unexpected(parts_->error(code, "cannot grow"));
    if (const int mapped = mdb_env_set_mapsize(parts_->env, index_bytes)) {
      parts_->is_broken = true;  // the old map is gone
      return std::unexpected(parts_->error(mapped, "cannot map the larger file"));
    }
    meta.index_bytes = index_bytes;
  }
  if (auto recorded = commit_with(*parts_, meta, [](MDB_txn*) { return 0; }); !recorded)
    return recorded;
  // Not even with `relaxed` may this one be taken back: the slab file is cut to it next.
  if (const int code = mdb_env_sync(parts_->env, 1)) {
    parts_->is_broken = true;
    return std::unexpected(parts_->error(code, "cannot flush its new size"));
  }
  return {};
}

}  // namespace kvpool
