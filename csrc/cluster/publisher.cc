#include "cluster/publisher.h"

#include <algorithm>
#include <utility>

namespace kvpool {
namespace {

// To each owner in a turn; then changes are taken again.
constexpr int kRoundsPerTurn = 8;

Sent sent(Told told) {
  switch (told) {
    case Told::ok:
      break;
    case Told::gap:
      return Sent::gap;
    case Told::stale:
      return Sent::gone;
    case Told::full:
      return Sent::retry;
  }
  return Sent::ok;
}

PublisherOptions with_bounds(PublisherOptions options) {
  options.keys_queued_max =
      std::max<std::size_t>(options.keys_queued_max, 2 * ResidentWalk::kRecordsPerPiece);
  return options;
}

}  // namespace

Publisher::Publisher(const Parts& parts, const PublisherOptions& options)
    : parts_(parts),
      options_(with_bounds(options)),
      announcer_(parts.node, options.announced_per_s) {
  parts_.node.listen(options_.changes_max);
}

Publisher::~Publisher() {
  stop();
  parts_.node.stop_listening();
}

void Publisher::start() {
  thread_ = std::thread([this] { run(); });
}

void Publisher::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  woken_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Publisher::run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    lock.unlock();
    const bool is_more = turn(std::chrono::steady_clock::now());
    lock.lock();
    if (!is_more)
      woken_.wait_for(lock, options_.linger, [&] { return stopping_ || new_view_.has_value(); });
  }
}

void Publisher::set_view(OwnerView view) {
  {
    const std::lock_guard lock(mutex_);
    new_view_ = std::move(view);
  }
  woken_.notify_all();
}

// Changes are taken before a piece of a walk and after it. So what is told last of a key is what
// became of it last: a change before the piece is in it, one behind it comes later.
bool Publisher::turn(Time now) {
  take_view();
  take_changes(now);
  bool is_more = announce(now);
  is_more |= tell(now);
  note_stats();
  return is_more;
}

// --- the view ------------------------------------------------------------------------------------

void Publisher::take_view() {
  OwnerView view;
  {
    const std::lock_guard lock(mutex_);
    if (!new_view_) return;
    view = std::move(*new_view_);
    new_view_.reset();
  }
  const std::vector<Voter>& voters = view.table->voters();
  std::map<MemberHandle, Owner> owners;
  for (std::size_t i = 0; i < voters.size(); ++i) {
    if (voters[i].weight == 0) continue;
    const MemberHandle handle = view.handles[i];
    auto known = owners_.extract(handle);
    if (known.empty() || known.mapped().incarnation != view.incarnations[i] ||
        known.mapped().is_gone)
      owners.emplace(handle, options_.keys_queued_max);
    else
      owners.insert(std::move(known));
    Owner& owner = owners.at(handle);
    owner.voter = static_cast<std::uint16_t>(i);
    owner.incarnation = view.incarnations[i];
    if (owner.queue.size() > 0) owner.queue.keep(view.table->slots_of(owner.voter));
  }
  owners_.swap(owners);
  // Those who begin anew are told all that is theirs anyway.
  if (view_.table) announcer_.ask(moved(*view_.table, *view.table));
  view_ = std::move(view);
}

// --- what is to be told --------------------------------------------------------------------------

void Publisher::take_changes(Time now) {
  if (!parts_.node.take_changes(changes_)) {
    // What was here before this began to listen is lost to nobody: all begin anew.
    counts_.lost += std::ranges::any_of(
        owners_, [](const auto& each) { return !each.second.is_anew && !each.second.is_gone; });
    for (auto& [handle, owner] : owners_) begin_anew(owner);
    return;
  }
  for (const Change& each : changes_)
    push(make_directory_key(each.space->id, each.key), each.came, now);
}

void Publisher::push(const DirectoryKey& key, bool came, Time now) {
  if (!view_.table) return;
  const std::uint16_t voter = view_.table->owner_of(key);
  if (voter == OwnerTable::kNobody) return;
  const auto found = owners_.find(view_.handles[voter]);
  if (found == owners_.end() || found->second.is_anew || found->second.is_gone) return;
  if (found->second.queue.push(key, came, now)) return;
  ++counts_.overflows;
  begin_anew(found->second);
}

bool Publisher::announce(Time now) {
  if (next_announcement_ == Time{}) next_announcement_ = now + options_.announce_every;
  if (now >= next_announcement_) {
    next_announcement_ = now + options_.announce_every;
    announcer_.ask(SlotSet().set());
  }
  if (!make_room(now)) return !announcer_.is_idle();
  return announcer_.step(now, [&](const DirectoryKey& key) { push(key, true, now); });
}

// A piece may be all for one owner. Who takes nothing just now does not hold up the others: it is
// told anew when it does.
bool Publisher::make_room(Time now) {
  bool has_room = true;
  for (auto& [handle, owner] : owners_) {
    if (owner.queue.size() <= owner.queue.keys_max() / 2) continue;
    if (now >= owner.not_before) {
      has_room = false;
    } else if (!announcer_.is_idle()) {
      ++counts_.overflows;
      begin_anew(owner);
    }
  }
  return has_room;
}

void Publisher::begin_anew(Owner& owner) {
  owner.is_anew = true;
  owner.queue.clear();
  owner.unanswered.clear();
}

// --- telling it ----------------------------------------------------------------------------------

// A batch to each at a time. True: there is more for somebody.
bool Publisher::tell(Time now) {
  for (auto& [handle, owner] : owners_) owner.is_busy = false;
  for (int round = 0; round < kRoundsPerTurn; ++round) {
    parcels_.clear();
    bool is_told = false;
    for (auto& [handle, owner] : owners_) {
      const Unanswered* next = next_for(owner, now);
      if (next == nullptr) continue;
      ++counts_.batches;
      is_told = true;
      const Batch batch{next->from, next->is_withdraw, next->is_fresh, next->keys};
      if (handle == view_.self)
        heard(owner, tell_own(batch), now);
      else
        parcels_.push_back({.to = handle, .batch = batch});
    }
    if (!is_told) return false;
    if (parcels_.empty()) continue;
    parts_.wire.send_all(parcels_, std::chrono::steady_clock::now() + options_.timeout);
    for (const Wire::Parcel& each : parcels_) heard(owners_.at(each.to), each.sent, now);
  }
  return std::ranges::any_of(owners_, [&](const auto& each) {
    const Owner& owner = each.second;
    return may_tell(owner, now) &&
           (owner.is_anew || !owner.unanswered.empty() || owner.queue.is_due(now, options_.linger));
  });
}

const Publisher::Unanswered* Publisher::next_for(Owner& owner, Time now) {
  if (!may_tell(owner, now)) return nullptr;
  if (owner.unanswered.empty()) next_batch(owner, now);
  return owner.unanswered.empty() ? nullptr : &owner.unanswered.front();
}

void Publisher::next_batch(Owner& owner, Time now) {
  const auto add = [&](bool is_withdraw, bool is_fresh, std::vector<DirectoryKey> keys) {
    Unanswered next{parts_.self, is_withdraw, is_fresh, std::move(keys)};
    next.from.sequence = ++owner.sequence;
    owner.unanswered.push_back(std::move(next));
  };
  if (owner.is_anew) {
    // Above all that it may have heard from us, in whichever order it hears them.
    owner.sequence = ++times_anew_ << 32;
    ++counts_.begun_anew;
    add(/*is_withdraw=*/false, /*is_fresh=*/true, {});
    return;
  }
  if (!owner.queue.is_due(now, options_.linger)) {
    if (owner.queue.size() == 0 && now - owner.heard_at >= options_.check_every)
      add(/*is_withdraw=*/false, /*is_fresh=*/false, {});
    return;
  }
  OwnerQueue::Keys keys = owner.queue.take_batch(now);
  if (!keys.went.empty()) add(/*is_withdraw=*/true, /*is_fresh=*/false, std::move(keys.went));
  if (!keys.came.empty()) add(/*is_withdraw=*/false, /*is_fresh=*/false, std::move(keys.came));
}

// What became of the first that is unanswered.
void Publisher::heard(Owner& owner, Sent sent, Time now) {
  const Unanswered& first = owner.unanswered.front();
  const bool is_fresh = first.is_fresh;
  switch (sent) {
    case Sent::ok:
      (first.is_withdraw ? counts_.withdrawn : counts_.published) += first.keys.size();
      owner.unanswered.pop_front();
      owner.pause = {};
      owner.heard_at = now;
      if (!is_fresh) break;
      owner.is_anew = false;
      announcer_.ask(view_.table->slots_of(owner.voter));
      break;
    case Sent::retry:
      ++counts_.retries;
      pause(owner, now);
      break;
    case Sent::busy:
      owner.is_busy = true;
      break;
    case Sent::gap:
      ++counts_.gaps;
      begin_anew(owner);
      if (is_fresh) pause(owner, now);  // it keeps no directory yet
      break;
    case Sent::gone:
      begin_anew(owner);
      owner.is_gone = true;
      break;
  }
}

void Publisher::pause(Owner& owner, Time now) {
  owner.pause = std::clamp(owner.pause * 2, options_.pause_min, options_.pause_max);
  owner.not_before = now + owner.pause;
}

Sent Publisher::tell_own(const Batch& batch) {
  return sent(batch.is_withdraw ? parts_.own_shard.withdraw(batch.from, batch.keys)
                                : parts_.own_shard.publish(batch.from, batch.keys, batch.is_fresh));
}

// --- facts ---------------------------------------------------------------------------------------

void Publisher::note_stats() {
  PublisherStats stats = counts_;
  bool is_done = announcer_.is_idle();
  for (const auto& [handle, owner] : owners_) {
    ++stats.owners;
    stats.owners_anew += owner.is_anew;
    stats.owners_paused += owner.pause.count() > 0;
    stats.queued += owner.queue.size();
    is_done &=
        owner.is_gone || (!owner.is_anew && owner.queue.size() == 0 && owner.unanswered.empty());
  }
  stats.rounds = announcer_.rounds();
  stats.announced = announcer_.told();
  const std::lock_guard lock(mutex_);
  stats_ = stats;
  is_done_ = is_done && !new_view_;
}

bool Publisher::is_done() const {
  const std::lock_guard lock(mutex_);
  return is_done_;
}

PublisherStats Publisher::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

}  // namespace kvpool
