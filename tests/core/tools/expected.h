// What an image may hold: the states of the index that were committed, and the payload of each
// block, by its checksum.
//
// States are read from LMDB at the moment of each commit (expected.cc stands in front of
// mdb_txn_commit), so they are known whoever decides what a group does: a test's own driver, or the
// node. A commit counts as acknowledged when mdb_txn_commit() has returned.
#pragma once
#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>

#include "tier/ssd.h"

namespace kvpool::test {

using KeyBytes = std::array<std::uint8_t, sizeof(BlockKey)>;

inline KeyBytes bytes_of(const BlockKey& key) {
  KeyBytes bytes;
  std::memcpy(bytes.data(), &key, sizeof key);
  return bytes;
}

struct IndexState {
  std::map<KeyBytes, BlockEntry> entries;
  // Entries of namespaces that were dropped: not shown, deleted by and by.
  std::uint64_t hidden = 0;
  std::map<std::uint32_t, std::pair<Hash128, std::uint64_t>> spaces;  // id, block bytes
  std::map<std::uint64_t, std::uint64_t> classes;
  std::uint64_t next_space = 0, groups = 0;
  double tau_s = 0;
};
// `groups` is not compared: an opened tier does not show it.
bool is_same(const IndexState& a, const IndexState& b);

struct KnownPayload {
  Hash128 hash;  // of the key it was put under
  std::uint64_t seed = 0;
  std::uint32_t bytes = 0;
};
// Bytes that only this seed makes.
void fill_payload(std::uint64_t seed, std::span<std::byte> into);

class Expected {
 public:
  static Expected& instance();

  // Before it is written anywhere.
  void note_payload(const Hash128& sum, const KnownPayload& payload);

  // Of the directory's index; others are not followed.
  void follow(const std::string& index_path);
  bool follows(const std::string& index_path) const { return index_path == path_; }
  void commit_starts(IndexState next);
  void commit_ended(bool committed);

  // What is acknowledged now is never to be lost, not even by `relaxed`.
  void promise_newest();
  IndexState newest();  // acknowledged
  bool was_committed(const Hash128& hash);
  std::uint64_t recycled();  // entries in an extent that another entry had before

  // Held while an image is judged: nothing below changes.
  std::unique_lock<std::mutex> hold() { return std::unique_lock(mutex_); }
  // Under hold(). How many acknowledged commits an image with this content has lost; -1: it has
  // the commit that was under way. nullopt: it is none of the last kStates states.
  std::optional<int> commits_lost(const IndexState& found) const;
  bool is_promised(int commits_lost) const { return commits_lost <= since_promise_; }
  const KnownPayload* payload_of(const Hash128& sum) const;
  bool is_committing() const { return is_committing_; }

 private:
  static constexpr std::size_t kStates = 64;

  std::mutex mutex_;
  std::string path_;
  std::map<Hash128, KnownPayload> payloads_;
  std::deque<IndexState> states_;  // newest last
  bool is_committing_ = false;     // the last one is not acknowledged yet
  int since_promise_ = 0;          // commits
  std::set<Hash128> committed_;
  std::map<std::uint64_t, Hash128> extents_;  // offset -> checksum of the last entry there
  std::uint64_t recycled_ = 0;
};

}  // namespace kvpool::test
