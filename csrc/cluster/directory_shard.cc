#include "cluster/directory_shard.h"

#include <algorithm>

namespace kvpool {
namespace {

void count(std::atomic<std::uint64_t>& counter, std::uint64_t more = 1) {
  counter.fetch_add(more, std::memory_order_relaxed);
}
std::uint64_t read(const std::atomic<std::uint64_t>& counter) {
  return counter.load(std::memory_order_relaxed);
}

}  // namespace

DirectoryShard::DirectoryShard(const DirectoryOptions& options)
    : directory_(options), names_(HolderLives::kNumbers) {}

Told DirectoryShard::publish(const Announcement& from, std::span<const Hash128> keys,
                             bool is_fresh) {
  return tell(from, keys, is_fresh, /*is_withdraw=*/false);
}

Told DirectoryShard::withdraw(const Announcement& from, std::span<const Hash128> keys) {
  return tell(from, keys, /*is_fresh=*/false, /*is_withdraw=*/true);
}

// nullptr: nobody of this id has told anything yet, and only who begins anew may; or it is full.
DirectoryShard::MemberPtr DirectoryShard::member_of(const Announcement& from, bool may_make) {
  const std::lock_guard lock(mutex_);
  const auto known = members_.find(from.node);
  if (known != members_.end()) return known->second;
  if (!may_make || members_.size() >= kMembersMax) return nullptr;
  return members_.emplace(from.node, std::make_shared<Member>()).first->second;
}

Told DirectoryShard::tell(const Announcement& from, std::span<const Hash128> keys, bool is_fresh,
                          bool is_withdraw) {
  count(batches_);
  const MemberPtr member = member_of(from, is_fresh);
  if (!member) {
    count(is_fresh ? refused_full_ : gaps_);
    return is_fresh ? Told::full : Told::gap;
  }
  const std::lock_guard lock(member->mutex);
  bool is_new = false;
  const Told told = admit(*member, from, is_fresh, is_new);
  if (told == Told::gap) count(gaps_);
  if (told == Told::stale) count(stale_);
  if (told == Told::full) count(refused_full_);
  if (told != Told::ok) return told;
  if (!is_new) {
    count(repeated_);
    return Told::ok;
  }
  if (is_withdraw)
    directory_.remove(keys, member->holder);
  else
    directory_.add(keys, member->holder);
  count(is_withdraw ? withdrawn_ : published_, keys.size());
  return Told::ok;
}

// ok: to be carried out if it is new, else a repetition.
Told DirectoryShard::admit(Member& member, const Announcement& from, bool is_fresh, bool& is_new) {
  if (member.is_gone) return Told::gap;  // it left while this waited
  if (from.incarnation < member.incarnation) return Told::stale;
  // One that came before, even one that began anew: what came behind it holds.
  is_new = from.incarnation > member.incarnation || from.sequence > member.sequence;
  if (!is_new) return Told::ok;
  if (is_fresh) return begin_anew(member, from);
  const bool is_next =
      from.incarnation == member.incarnation && from.sequence == member.sequence + 1;
  if (member.holder.number == 0 || !is_next) return Told::gap;
  member.sequence = from.sequence;
  return Told::ok;
}

Told DirectoryShard::begin_anew(Member& member, const Announcement& from) {
  const bool is_known = member.incarnation != 0;
  end_life(member);
  // Who begins anew again and again leaves numbers for the others.
  if (is_known && directory_.is_behind()) return Told::full;
  const auto holder = directory_.take_holder();
  if (!holder) return Told::full;  // until some are swept
  {
    const std::lock_guard lock(mutex_);
    names_[holder->number] = {from.node, from.incarnation};
  }
  member.holder = *holder;
  member.incarnation = from.incarnation;
  member.sequence = from.sequence;
  return Told::ok;
}

void DirectoryShard::end_life(Member& member) {
  if (member.holder.number != 0) directory_.drop_holder(member.holder);
  member.holder = {};
}

void DirectoryShard::locate(std::span<const Hash128> keys, Located& found) {
  std::vector<Directory::Numbers> numbers(keys.size());
  directory_.find(keys, numbers);
  count(located_, keys.size());
  found.names.clear();
  found.holders.resize(keys.size());
  std::vector<std::uint16_t> index_of(HolderLives::kNumbers, kNoHolder);
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    found.holders[i].fill(kNoHolder);
    for (std::size_t k = 0; k < kHoldersPerKey && numbers[i][k] != 0; ++k) {
      std::uint16_t& index = index_of[numbers[i][k]];
      if (index == kNoHolder) {
        index = static_cast<std::uint16_t>(found.names.size());
        found.names.push_back(names_[numbers[i][k]]);
      }
      found.holders[i][k] = index;
    }
  }
}

void DirectoryShard::set_members(std::span<const HolderName> members) {
  std::unordered_map<Hash128, std::uint64_t, IdHash> present;
  for (const HolderName& each : members) present.emplace(each.id, each.incarnation);
  std::vector<MemberPtr> left;
  std::vector<std::pair<MemberPtr, std::uint64_t>> stay;
  {
    const std::lock_guard lock(mutex_);
    for (auto it = members_.begin(); it != members_.end();) {
      const auto seen = present.find(it->first);
      const bool leaves = seen == present.end() && it->second->has_met_a_view;
      it->second->has_met_a_view = true;
      if (leaves) {
        left.push_back(it->second);
      } else if (seen != present.end()) {
        stay.emplace_back(it->second, seen->second);
      }
      it = leaves ? members_.erase(it) : std::next(it);
    }
  }
  for (const MemberPtr& each : left) {
    const std::lock_guard lock(each->mutex);
    end_life(*each);
    each->is_gone = true;
  }
  for (const auto& [each, incarnation] : stay) {
    const std::lock_guard lock(each->mutex);
    if (each->incarnation < incarnation) end_life(*each);  // its next one has not told yet
  }
}

ShardStats DirectoryShard::stats() const {
  ShardStats stats{.directory = directory_.stats(),
                   .published = read(published_),
                   .withdrawn = read(withdrawn_),
                   .located = read(located_),
                   .batches = read(batches_),
                   .repeated = read(repeated_),
                   .gaps = read(gaps_),
                   .stale = read(stale_),
                   .refused_full = read(refused_full_)};
  const std::lock_guard lock(mutex_);
  stats.members = members_.size();
  return stats;
}

}  // namespace kvpool
