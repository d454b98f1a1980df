#include "cluster/finder.h"

#include <algorithm>

#include "cluster/remote_fetch.h"

namespace kvpool {
namespace {

using std::chrono::steady_clock;

constexpr auto kRelaxed = std::memory_order_relaxed;

std::vector<DirectoryKey> names_of(const Elsewhere::Ask& ask) {
  std::vector<DirectoryKey> names;
  names.reserve(ask.keys.size());
  for (const Hash128& key : ask.keys) names.push_back(make_directory_key(ask.space.id, key));
  return names;
}

bool is_nobody(const Holders& holders) {
  return std::ranges::all_of(holders, [](MemberHandle holder) { return holder == kNoMember; });
}

}  // namespace

Finder::Finder(const MemberView& members, const PeerBook& peers, DirectoryService* own,
               const Options& options)
    : members_(members), peers_(peers), own_(own), options_(options) {}

Miss Finder::find(const Ask& ask, std::span<std::uint8_t> has) {
  finds_.fetch_add(1, kRelaxed);
  std::vector<Whereabouts> where(ask.keys.size());
  const auto members = members_.now();
  const Miss why = locate(*members, names_of(ask), ask.deadline, where);
  // One that cannot be reached now has nothing for anybody.
  std::unordered_map<MemberHandle, bool> reached;
  const auto is_reached = [&](MemberHandle holder) {
    const auto [at, is_new] = reached.try_emplace(holder, false);
    if (is_new) {
      const auto peer = peers_.of(holder);
      at->second = peer != nullptr && !peer->is_open() && peer->streams() > 0;
    }
    return at->second;
  };
  for (std::size_t i = 0; i < where.size(); ++i)
    has[i] = std::ranges::any_of(where[i].holders, [&](MemberHandle holder) {
      return holder != kNoMember && is_reached(holder);
    });
  return why;
}

Miss Finder::fetch(const Ask& ask, BlockSink& sink) {
  fetches_.fetch_add(1, kRelaxed);
  const auto members = members_.now();
  const auto names = names_of(ask);
  std::vector<Whereabouts> where(ask.keys.size());
  Miss why = locate(*members, names, ask.deadline, where);
  // What is behind one that nobody has is of no use to anybody.
  std::size_t there = 0;
  while (there < where.size() && !is_nobody(where[there].holders)) ++there;
  if (there < where.size() && (why == Miss::none || where[there].is_known)) why = Miss::absent;
  if (there == 0) return why;
  RemoteFetch fetch({ask.space, ask.keys.first(there), ask.deadline}, std::span(where).first(there),
                    peers_, sink, [&](std::size_t index, MemberHandle holder) {
                      stale_.fetch_add(1, kRelaxed);
                      forget(names[index], holder);
                    });
  const Miss missed = fetch.run();
  if (missed != Miss::none) return missed;
  return there < where.size() ? why : Miss::none;
}

// --- who has it ----------------------------------------------------------------------------------

Miss Finder::locate(const MemberView::Snapshot& members, std::span<const DirectoryKey> keys,
                    Deadline deadline, std::span<Whereabouts> answers) {
  std::vector<DirectoryKey> unknown;
  std::vector<std::size_t> which;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (from_cache(keys[i], members.version, answers[i])) continue;
    unknown.push_back(keys[i]);
    which.push_back(i);
  }
  cached_keys_.fetch_add(keys.size() - unknown.size(), kRelaxed);
  // Half of the time is for what follows.
  const auto now = steady_clock::now();
  const Deadline until = std::min(now + (deadline - now) / 2, now + options_.locate_max);
  Miss why = Miss::none;
  for (std::size_t done = 0; done < unknown.size();) {
    const auto part = request_of(unknown, done);
    std::vector<Whereabouts> found(part.size());
    rounds_.fetch_add(1, kRelaxed);
    round_keys_.fetch_add(part.size(), kRelaxed);
    const Miss missing = LocateRound(members, peers_, own_).run(part, until, found);
    if (missing != Miss::none) why = missing;
    late_rounds_.fetch_add(missing == Miss::timed_out, kRelaxed);
    for (std::size_t i = 0; i < part.size(); ++i) {
      answers[which[done + i]] = found[i];
      if (found[i].is_known) into_cache(part[i], members.version, found[i]);
    }
    done += part.size();
  }
  return why;
}

bool Finder::from_cache(const DirectoryKey& key, std::uint64_t version, Whereabouts& answer) {
  const std::lock_guard lock(mutex_);
  for (const Cache* cache : {&young_, &old_}) {
    const auto found = cache->find(key);
    if (found == cache->end()) continue;
    const Kept& kept = found->second;
    if (kept.version != version || steady_clock::now() >= kept.until) return false;
    answer = kept.where;
    return true;
  }
  return false;
}

void Finder::into_cache(const DirectoryKey& key, std::uint64_t version, const Whereabouts& answer) {
  const auto keep = is_nobody(answer.holders) ? options_.keep_absent : options_.keep_found;
  Cache over;  // it ends behind the lock, which takes milliseconds
  const std::lock_guard lock(mutex_);
  if (young_.size() >= options_.cached_max / 2) {
    over.swap(old_);
    old_.swap(young_);
  }
  young_[key] = {.where = answer, .until = steady_clock::now() + keep, .version = version};
}

void Finder::forget(const DirectoryKey& key, MemberHandle holder) {
  const std::lock_guard lock(mutex_);
  for (Cache* cache : {&young_, &old_}) {
    const auto found = cache->find(key);
    if (found == cache->end()) continue;
    std::ranges::replace(found->second.where.holders, holder, kNoMember);
    // Until who said so has taken it back: who asks on and on has one try in that time.
    if (is_nobody(found->second.where.holders))
      found->second.until =
          std::min(found->second.until, steady_clock::now() + options_.keep_absent);
  }
}

FinderStats Finder::stats() const {
  return {.finds = finds_.load(kRelaxed),
          .fetches = fetches_.load(kRelaxed),
          .rounds = rounds_.load(kRelaxed),
          .round_keys = round_keys_.load(kRelaxed),
          .cached_keys = cached_keys_.load(kRelaxed),
          .stale = stale_.load(kRelaxed),
          .late_rounds = late_rounds_.load(kRelaxed)};
}

}  // namespace kvpool
