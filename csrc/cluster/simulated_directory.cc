#include "cluster/simulated_directory.h"

#include <algorithm>

namespace kvpool {
namespace {

// Node ids as good as any: 16 bytes that look drawn, the same in every run.
std::vector<Hash128> member_ids(std::uint32_t nodes) {
  std::vector<Hash128> ids;
  for (std::uint64_t node = 1; node <= nodes; ++node)
    ids.push_back({fingerprint_of(2 * node), fingerprint_of(2 * node + 1)});
  return ids;
}

OwnerTable table_of(const std::vector<Hash128>& ids) {
  std::vector<Voter> voters;
  for (const Hash128& id : ids) voters.push_back({id});
  return OwnerTable::build(voters);
}

// A trace's id stands for a block's key in the one namespace that there is.
DirectoryKey key_of(std::uint64_t id) {
  constexpr Hash128 kSpace{1, 2};
  return make_directory_key(kSpace, {fingerprint_of(id), fingerprint_of(~id)});
}

}  // namespace

SimulatedDirectory::SimulatedDirectory(std::uint32_t nodes, const BlockNames& names)
    : names_(names),
      table_(table_of(member_ids(nodes))),
      by_key_(Sharding::by_key, table_, member_ids(nodes)),
      by_run_(Sharding::by_run, table_, member_ids(nodes)) {}

void SimulatedDirectory::learn(std::span<const Name> chain) {
  if (entries_.size() < names_.size()) entries_.resize(names_.size());
  for (auto name = static_cast<Name>(keys_.size()); name < names_.size(); ++name)
    keys_.push_back(key_of(names_.id(name)));
  by_key_.learn(chain, keys_);
  by_run_.learn(chain, keys_);
}

void SimulatedDirectory::advance(Seconds now) {
  by_key_.advance(now);
  by_run_.advance(now);
}

void SimulatedDirectory::finish() {
  by_key_.finish();
  by_run_.finish();
}

void SimulatedDirectory::ask(std::uint32_t node, std::span<const Name> names) {
  by_key_.ask(node, names);
  by_run_.ask(node, names);
}

void SimulatedDirectory::came(std::uint32_t node, Name name, Seconds now) {
  Entry& entry = entries_[name];
  ++entry.copies;
  const auto place = std::ranges::find(entry.holders, kNobody);
  if (place != entry.holders.end())
    *place = static_cast<std::uint16_t>(node);
  else
    ++crowded_;
  by_key_.change(node, name, keys_[name], /*came=*/true, now);
  by_run_.change(node, name, keys_[name], /*came=*/true, now);
}

void SimulatedDirectory::went(std::uint32_t node, Name name, Seconds now) {
  Entry& entry = entries_[name];
  --entry.copies;
  std::ranges::replace(entry.holders, static_cast<std::uint16_t>(node), kNobody);
  by_key_.change(node, name, keys_[name], /*came=*/false, now);
  by_run_.change(node, name, keys_[name], /*came=*/false, now);
}

bool SimulatedDirectory::is_known(Name name) const {
  return std::ranges::any_of(entries_[name].holders,
                             [](std::uint16_t holder) { return holder != kNobody; });
}

}  // namespace kvpool
