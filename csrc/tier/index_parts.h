// What the files of IndexStore share: one LMDB environment, its transactions, its error codes.
//
// Private to tier/index_store.cc and tier/index_apply.cc. LMDB's rules that are kept here: one
// open environment per file and process; a write transaction stays on its thread; nothing read
// from the map outlives its transaction, and values lie at odd addresses, so they are copied out.
#pragma once
#include <lmdb.h>

#include <atomic>
#include <cstring>
#include <string>

#include "tier/index_store.h"

namespace kvpool {

struct IndexStore::Parts {
  Parts() = default;
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;
  ~Parts() {
    if (env != nullptr) mdb_env_close(env);
  }

  std::string path;
  MDB_env* env = nullptr;
  MDB_dbi meta_db = 0, spaces_db = 0, classes_db = 0, blocks_db = 0;
  TierMeta meta;
  // Written by the writer, read by whoever shows figures.
  std::atomic<bool> is_broken{false};
  std::atomic<std::uint64_t> used_bytes{0}, written_bytes{0}, entries{0};

  Error error(int code, const std::string& doing) const;
  // Pages in use and entries, from the last commit; `committed`: its id, to count what it wrote,
  // 0 = none.
  void refresh_figures(std::size_t committed);
};

// Ends with its scope; what was not committed is undone.
class IndexTxn {
 public:
  IndexTxn(MDB_env* env, unsigned flags) { code_ = mdb_txn_begin(env, nullptr, flags, &txn_); }
  ~IndexTxn() {
    if (txn_ != nullptr) mdb_txn_abort(txn_);
  }
  IndexTxn(const IndexTxn&) = delete;
  IndexTxn& operator=(const IndexTxn&) = delete;

  int begin_code() const { return code_; }
  operator MDB_txn*() const { return txn_; }
  // Also the end of a read transaction that opened databases.
  int commit() {
    MDB_txn* txn = txn_;
    txn_ = nullptr;
    return mdb_txn_commit(txn);
  }

 private:
  MDB_txn* txn_ = nullptr;
  int code_ = 0;
};

template <typename T>
MDB_val value_of(const T& record) {
  return {sizeof(T), const_cast<T*>(&record)};
}
inline MDB_val value_of(const char* name) { return {std::strlen(name), const_cast<char*>(name)}; }

// False: the record has another size.
template <typename T>
bool copy_out(const MDB_val& value, T& record) {
  if (value.mv_size != sizeof(T)) return false;
  std::memcpy(&record, value.mv_data, sizeof(T));
  return true;
}

template <typename T>
int put(MDB_txn* txn, MDB_dbi db, MDB_val key, const T& record) {
  MDB_val value = value_of(record);
  return mdb_put(txn, db, &key, &value, 0);
}

inline constexpr const char* kMetaKey = "tier";

void seal(TierMeta& meta);
SpaceRecord space_record(const SsdSpace& space);

}  // namespace kvpool
