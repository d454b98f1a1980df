#include "expected.h"

#include <dlfcn.h>
#include <lmdb.h>

#include <cstring>

#include "base/check.h"
#include "disk.h"

namespace kvpool::test {
namespace {

bool is_same(const BlockEntry& a, const BlockEntry& b) {
  return std::memcmp(&a, &b, sizeof a) == 0;  // no padding; a NaN is a NaN
}

template <typename T>
T record_of(const MDB_val& value) {
  T record;
  KVP_CHECK(value.mv_size == sizeof record);
  std::memcpy(static_cast<void*>(&record), value.mv_data, sizeof record);
  return record;
}

// Databases that the transaction has: an index that is being formatted has none at first.
template <typename Visit>
void for_each(MDB_txn* txn, const char* database, Visit visit) {
  MDB_dbi db = 0;
  if (mdb_dbi_open(txn, database, 0, &db) != 0) return;
  MDB_cursor* cursor = nullptr;
  KVP_CHECK(mdb_cursor_open(txn, db, &cursor) == 0);
  MDB_val key{}, value{};
  for (int code = mdb_cursor_get(cursor, &key, &value, MDB_FIRST); code == 0;
       code = mdb_cursor_get(cursor, &key, &value, MDB_NEXT))
    visit(key, value);
  mdb_cursor_close(cursor);
}

IndexState state_in(MDB_txn* txn) {
  IndexState state;
  for_each(txn, "meta", [&](const MDB_val&, const MDB_val& value) {
    const auto meta = record_of<TierMeta>(value);
    state.next_space = meta.next_space;
    state.groups = meta.groups;
    state.tau_s = meta.tau_s;
  });
  for_each(txn, "spaces", [&](const MDB_val& key, const MDB_val& value) {
    const auto record = record_of<SpaceRecord>(value);
    state.spaces[record_of<std::uint32_t>(key)] = {record.id, record.block_bytes};
  });
  for_each(txn, "classes", [&](const MDB_val& key, const MDB_val& value) {
    state.classes[record_of<std::uint64_t>(key)] = record_of<std::uint64_t>(value);
  });
  for_each(txn, "blocks", [&](const MDB_val& key, const MDB_val& value) {
    const auto block = record_of<BlockKey>(key);
    if (state.spaces.contains(block.space()))
      state.entries[bytes_of(block)] = record_of<BlockEntry>(value);
    else
      ++state.hidden;
  });
  return state;
}

bool is_ours(MDB_txn* txn) {
  MDB_env* const env = mdb_txn_env(txn);
  const char* path = nullptr;
  MDB_envinfo facts{};
  if (mdb_env_get_path(env, &path) != 0 || mdb_env_info(env, &facts) != 0) return false;
  const bool writes = mdb_txn_id(txn) > facts.me_last_txnid;
  return writes && Expected::instance().follows(path);
}

}  // namespace

bool is_same(const IndexState& a, const IndexState& b) {
  return a.spaces == b.spaces && a.classes == b.classes && a.next_space == b.next_space &&
         a.hidden == b.hidden && std::memcmp(&a.tau_s, &b.tau_s, sizeof a.tau_s) == 0 &&
         std::ranges::equal(a.entries, b.entries, [](const auto& one, const auto& other) {
           return one.first == other.first && is_same(one.second, other.second);
         });
}

void fill_payload(std::uint64_t seed, std::span<std::byte> into) {
  for (std::size_t at = 0; at < into.size(); at += 8) {
    const std::uint64_t word = mix64(mix64(seed + 1) + at);
    std::memcpy(into.data() + at, &word, std::min<std::size_t>(8, into.size() - at));
  }
}

Expected& Expected::instance() {
  static Expected expected;
  return expected;
}

void Expected::note_payload(const Hash128& sum, const KnownPayload& payload) {
  std::lock_guard lock(mutex_);
  payloads_[sum] = payload;
}

void Expected::follow(const std::string& index_path) {
  std::lock_guard lock(mutex_);
  path_ = index_path;
  states_.assign(1, {});
  states_.back().next_space = 1;
}

void Expected::commit_starts(IndexState next) {
  std::lock_guard lock(mutex_);
  states_.push_back(std::move(next));
  if (states_.size() > kStates) states_.pop_front();
  is_committing_ = true;
}

void Expected::commit_ended(bool committed) {
  std::lock_guard lock(mutex_);
  is_committing_ = false;
  if (!committed) {
    states_.pop_back();
    return;
  }
  ++since_promise_;
  const IndexState& state = states_.back();
  for (const auto& [key, entry] : state.entries) {
    if (entry.generation != state.groups) continue;  // of an earlier commit
    BlockKey block;
    std::memcpy(&block, key.data(), sizeof block);
    committed_.insert(block.hash128());
    const SsdPlace place{entry.slab_unit, entry.slot, entry.bytes};
    const auto [before, is_new] = extents_.emplace(place.offset(), entry.sum);
    recycled_ += !is_new && before->second != entry.sum;
    before->second = entry.sum;
  }
}

void Expected::promise_newest() {
  std::lock_guard lock(mutex_);
  since_promise_ = 0;
}

IndexState Expected::newest() {
  std::lock_guard lock(mutex_);
  return states_[states_.size() - (is_committing_ ? 2 : 1)];
}

bool Expected::was_committed(const Hash128& hash) {
  std::lock_guard lock(mutex_);
  return committed_.contains(hash);
}

std::uint64_t Expected::recycled() {
  std::lock_guard lock(mutex_);
  return recycled_;
}

std::optional<int> Expected::commits_lost(const IndexState& found) const {
  for (std::size_t age = 0; age < states_.size(); ++age)
    if (is_same(states_[states_.size() - 1 - age], found))
      return static_cast<int>(age) - (is_committing_ ? 1 : 0);
  return std::nullopt;
}

const KnownPayload* Expected::payload_of(const Hash128& sum) const {
  const auto known = payloads_.find(sum);
  return known == payloads_.end() ? nullptr : &known->second;
}

}  // namespace kvpool::test

// In front of liblmdb's, for the core calls it from here.
extern "C" __attribute__((visibility("default"))) int mdb_txn_commit(MDB_txn* txn) {
  static const auto next = reinterpret_cast<int (*)(MDB_txn*)>(dlsym(RTLD_NEXT, "mdb_txn_commit"));
  using kvpool::test::Expected;
  if (!kvpool::test::is_ours(txn)) return next(txn);
  Expected& expected = Expected::instance();
  expected.commit_starts(kvpool::test::state_in(txn));
  const int code = next(txn);
  kvpool::test::Disk::instance().moment();  // done, and nobody has been told
  expected.commit_ended(code == 0);
  return code;
}
