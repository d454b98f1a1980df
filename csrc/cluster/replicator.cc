#include "cluster/replicator.h"

#include <algorithm>

namespace kvpool {
namespace {

using std::chrono::steady_clock;

constexpr std::size_t kChainMax = kKeysPerRequest;
// What one request asks for, as part of a second of the budget.
constexpr std::uint64_t kBatchShareInverse = 4;
constexpr std::uint64_t kDrainBatchBytes = 32ull << 20;
constexpr double kRunCools = 4;  // within one run of blocks
constexpr int kRefusalsMax = 3;  // of one prefix, by whoever was asked, until it is left behind
constexpr std::chrono::milliseconds kBusyPauseOfDrain{50};
// A member of which nothing is known has so much of its memory free.
constexpr double kUnknownFree = 0.5;

bool is_up(const MemberView::Snapshot& members, MemberHandle handle) {
  const MemberView::Member* member = members.by_handle(handle);
  return member != nullptr && member->info.state == MemberState::up;
}

bool is_among(const Holders& holders, MemberHandle member) {
  return std::ranges::find(holders, member) != holders.end();
}

// Smaller is better: bytes served for each part of the memory that is free.
double score_of(MemberLoad load) {
  const double served = load.is_told != 0 ? load.served_kib_s : 0;
  const double free = load.is_told != 0 ? 1 - load.taken / 65535.0 : kUnknownFree;
  return (served + 1024) / (free + 1.0 / 64);
}

}  // namespace

// Numbers are never used again, also not by the next life of the node.
Replicator::Replicator(const Parts& parts, const ReplicaOptions& options)
    : parts_(parts),
      options_(options),
      rate_(options.bytes_per_s),
      next_number_(
          static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count())) {
}

bool Replicator::turn(Time now) {
  std::unique_lock turning(turning_, std::try_to_lock);
  if (!turning.owns_lock() || options_.max_replicas < 2) return false;
  if (!search_at_) search_at_ = now + options_.search_every;
  // Until all is told anew to those who keep the directory by a new view, few holders are known.
  const std::uint64_t version = parts_.members.now()->version;
  if (version_ != 0 && version != version_) search_at_ = now + 2 * options_.search_every;
  version_ = version;
  if (now >= *search_at_) search(now);
  advance(now);
  while (!wanted_.empty() && jobs_.size() < kJobsMax) {
    const Prefix prefix = wanted_.front();
    wanted_.pop_front();
    begin(prefix, now);
  }
  count([&] { counts_.under_way = jobs_.size(); });
  return !jobs_.empty();
}

// --- what is hot ---------------------------------------------------------------------------------

void Replicator::search(Time now) {
  const auto began = steady_clock::now();
  const std::vector<HotPrefix> hottest = parts_.node.hottest(options_.prefixes);
  const auto took = steady_clock::now() - began;
  search_at_ =
      now + std::max<steady_clock::duration>(options_.search_every, took * options_.search_share);
  decltype(known_) known;
  wanted_.clear();
  std::uint64_t hot = 0, paused = 0;
  for (const HotPrefix& each : hottest) {
    const Name name{each.number, each.key};
    const auto before = known_.find(name);
    Known& mine = known[name];
    if (before != known_.end()) mine = before->second;
    mine.is_hot = each.heat >= (mine.is_hot ? options_.heat_end : options_.heat_begin);
    hot += mine.is_hot;
    paused += now < mine.paused_until;
    if (mine.is_hot && now >= mine.paused_until)
      wanted_.push_back({.space = parts_.node.space(each.number), .last = each.key});
  }
  known_.swap(known);
  asked_before_.swap(asked_);
  asked_.clear();
  for (const Job& job : jobs_)
    for (const Hash128& key : job.keys)
      asked_.insert(make_directory_key(job.prefix.space->id, key));
  std::erase_if(resting_, [&](const auto& each) { return now >= each.second; });
  count([&] {
    ++counts_.searches;
    counts_.hot = hot;
    counts_.paused = paused;
  });
}

// As far as it is warm, and with who else has it.
Replicator::Chain Replicator::chain_of(const Prefix& prefix, const MemberView::Snapshot& members) {
  Chain chain;
  if (prefix.space == nullptr) return chain;
  chain.blocks = parts_.node.chain_of(*prefix.space, prefix.last, kChainMax);
  const double least = is_draining_ ? options_.heat_warm : options_.heat_end;
  while (!chain.blocks.empty() && chain.blocks.back().heat < least) chain.blocks.pop_back();
  std::vector<DirectoryKey> names;
  names.reserve(chain.blocks.size());
  for (const auto& block : chain.blocks)
    names.push_back(make_directory_key(prefix.space->id, block.key));
  chain.where.resize(names.size());
  if (!names.empty())
    LocateRound(members, parts_.peers, parts_.own)
        .run(names, steady_clock::now() + options_.ask_max, chain.where);
  // Who goes takes what is not known for what nobody else has.
  for (std::size_t i = 0; i < names.size(); ++i) {
    const bool is_asked = asked_.contains(names[i]) || asked_before_.contains(names[i]);
    chain.where[i].is_known = (chain.where[i].is_known || is_draining_) && !is_asked;
  }
  return chain;
}

// Nothing is asked for of which it is not known who has it.
bool Replicator::is_wanted(const Whereabouts& where, const MemberView::Snapshot& members) const {
  if (!where.is_known) return false;
  std::uint32_t others = 0;
  bool is_first = true;
  const MemberView::Member* self = members.by_handle(members.self);
  for (const MemberHandle holder : where.holders) {
    if (holder == kNoMember || !is_up(members, holder)) continue;
    ++others;
    is_first &= self != nullptr && self->info.id < members.by_handle(holder)->info.id;
  }
  if (is_draining_) return others == 0;
  return others + 1 < options_.max_replicas && is_first;
}

Replicator::Run Replicator::wanted_run(const Chain& chain, const Prefix& prefix,
                                       const MemberView::Snapshot& members) {
  Run run;
  std::vector<Hash128> last;
  for (std::size_t i = 0; i < chain.where.size(); ++i) {
    const Whereabouts& where = chain.where[i];
    if (where.is_known && where.holders == kNoHolders) last.push_back(chain.blocks[i].key);
  }
  if (!is_draining_ && !last.empty()) parts_.node.be_last(*prefix.space, last);
  while (run.from < chain.where.size() && !is_wanted(chain.where[run.from], members)) ++run.from;
  // Blocks much colder than its first would have all of it refused.
  run.to = run.from;
  while (run.to < chain.where.size() && is_wanted(chain.where[run.to], members) &&
         chain.blocks[run.to].heat * kRunCools >= chain.blocks[run.from].heat)
    ++run.to;
  return run;
}

// --- whom to ask ---------------------------------------------------------------------------------

bool Replicator::may_ask(const MemberView::Member& member, const MemberView::Snapshot& members,
                         Time now) const {
  if (member.handle == members.self || member.info.state != MemberState::up) return false;
  if (const auto rests = resting_.find(member.handle);
      rests != resting_.end() && now < rests->second)
    return false;
  if (std::ranges::any_of(jobs_, [&](const Job& job) { return job.target == member.handle; }))
    return false;
  const auto peer = parts_.peers.of(member.handle);
  return peer != nullptr && !peer->is_open() && peer->streams() > 0;
}

// Who has the block before goes on with the chain; else the one with the least to do.
std::optional<MemberHandle> Replicator::choose(const Chain& chain, std::size_t first,
                                               const MemberView::Snapshot& members, Time now) {
  std::optional<MemberHandle> best;
  double least = 0;
  for (const MemberView::Member& member : members.members) {
    if (is_among(chain.where[first].holders, member.handle) || !may_ask(member, members, now))
      continue;
    if (first > 0 && is_among(chain.where[first - 1].holders, member.handle)) return member.handle;
    const double score = score_of(parts_.peers.of(member.handle)->load());
    if (best && score >= least) continue;
    best = member.handle;
    least = score;
  }
  return best;
}

// False: there is nothing to do for it, or nobody to ask now.
bool Replicator::begin(const Prefix& prefix, Time now) {
  const auto members = parts_.members.now();
  const Chain chain = chain_of(prefix, *members);
  const Run run = wanted_run(chain, prefix, *members);
  if (run.from == run.to) return false;
  const auto target = choose(chain, run.from, *members, now);
  if (!target) return false;
  Job job{.prefix = prefix, .target = *target, .keys = {}, .before = {}, .moved = now};
  if (run.from > 0) job.before = chain.blocks[run.from - 1].key;
  job.heat = chain.blocks[run.from].heat;
  for (std::size_t i = run.from; i < run.to; ++i) {
    job.keys.push_back(chain.blocks[i].key);
    job.heat = std::min(job.heat, chain.blocks[i].heat);
    asked_.insert(make_directory_key(prefix.space->id, chain.blocks[i].key));
  }
  if (advance(job, now)) jobs_.push_back(std::move(job));
  return true;
}

// --- asking --------------------------------------------------------------------------------------

void Replicator::advance(Time now) {
  std::vector<Job> jobs;
  jobs.swap(jobs_);  // whom a job that is over leaves free is not free before the next turn
  for (Job& job : jobs)
    if (advance(job, now)) jobs_.push_back(std::move(job));
}

// False: the budget does not allow it yet.
bool Replicator::next_batch(Job& job, Time now) {
  const std::uint64_t block_bytes = job.prefix.space->block_bytes;
  const std::uint64_t most =
      is_draining_ ? kDrainBatchBytes : std::max(options_.bytes_per_s / kBatchShareInverse, 1ul);
  const std::size_t count_max = std::clamp<std::uint64_t>(most / block_bytes, 1, kKeysPerRequest);
  const std::size_t some = std::min(job.keys.size() - job.to, count_max);
  if (!is_draining_ && !rate_.admit(some * block_bytes, now)) return false;
  job.from = job.to;
  job.to += some;
  job.number = ++next_number_;
  job.here_first.reset();
  job.here = 0;
  job.moved = now;
  count([&] {
    ++counts_.asked;
    counts_.asked_blocks += some;
    counts_.asked_bytes += some * block_bytes;
  });
  return true;
}

std::optional<PullAnswer> Replicator::ask(const Job& job) {
  const auto peer = parts_.peers.of(job.target);
  if (!peer || !peer->may_ask()) return std::nullopt;
  const auto members = parts_.members.now();
  const MemberView::Member* self = members->by_handle(members->self);
  const auto began = steady_clock::now();
  const Deadline deadline = began + options_.ask_max;
  bool late = false;
  const StreamPool::Loan loan = peer->borrow_short(deadline, late);
  if (loan.empty() || self == nullptr) {
    peer->not_asked();
    return std::nullopt;
  }
  const PullHead head{.space = job.prefix.space->id,
                      .from = self->info.id,
                      .before = job.from > 0 ? job.keys[job.from - 1] : job.before,
                      .number = job.number,
                      .block_bytes = job.prefix.space->block_bytes,
                      .heat_milli = static_cast<std::uint32_t>(std::min(job.heat * 1e3, 1e9))};
  PullAnswer answer;
  const auto reply =
      loan.one().request({.op = Op::pull,
                          .keys = std::span(job.keys).subspan(job.from, job.to - job.from),
                          .deadline = deadline,
                          .pull = &head,
                          .are_last = is_draining_},
                         std::as_writable_bytes(std::span(&answer, 1)));
  if (reply.how != Io::done) {
    peer->failed(reply.trouble());
    return std::nullopt;
  }
  peer->succeeded(steady_clock::now() - began);
  peer->note_load(reply.load);
  if (!reply.is_good() || reply.body_bytes != sizeof answer) answer = {.state = Pulling::refused};
  return answer;
}

// False: it is over, one way or the other.
bool Replicator::advance(Job& job, Time now) {
  if (job.from == job.to && !next_batch(job, now)) return true;
  const auto answer = ask(job);
  if (!answer) {
    count([&] { ++counts_.unanswered; });
    pause(job.prefix, job.target, now + options_.busy_pause, now + options_.busy_pause);
    try_again(job, /*is_refused=*/false);
    return false;
  }
  return take(job, *answer, now);
}

bool Replicator::take(Job& job, const PullAnswer& answer, Time now) {
  if (answer.state != Pulling::over && answer.state != Pulling::working) {
    refused(job, answer.state, now);
    return false;
  }
  const std::uint32_t here = std::max(answer.here, job.here);
  if (!job.here_first) job.here_first = answer.here;
  if (here > job.here) job.moved = now;
  job.here = here;
  if (answer.state == Pulling::working) {
    if (now - job.moved < options_.stuck_max) return true;
    give_up(job, now + options_.busy_pause, now);
    return false;
  }
  const std::uint64_t came = here - *job.here_first, bytes = came * job.prefix.space->block_bytes;
  count([&] {
    counts_.copied_blocks += came;
    counts_.copied_bytes += bytes;
    if (!is_draining_) return;
    drain_.moved_blocks += came;
    drain_.moved_bytes += bytes;
  });
  const bool is_whole = here == job.to - job.from;
  if (!is_whole) {
    give_up(job, now, now);
    return false;
  }
  job.from = job.to;
  if (const auto known = known_.find({job.prefix.space->number, job.prefix.last});
      known != known_.end())
    known->second.pause = {};
  if (job.to < job.keys.size()) return true;
  if (is_draining_) wanted_.push_front(job.prefix);  // there may be another run
  return false;
}

void Replicator::refused(const Job& job, Pulling how, Time now) {
  count([&] {
    counts_.busy += how == Pulling::busy;
    counts_.too_cold += how == Pulling::too_cold;
    counts_.no_room += how == Pulling::no_room;
    counts_.refused += how >= Pulling::refused;
  });
  const Time soon = now + (is_draining_ ? kBusyPauseOfDrain : options_.busy_pause);
  const Time later = is_draining_ ? soon : now + options_.refused_pause;
  switch (how) {
    case Pulling::busy:
      pause(job.prefix, job.target, soon, soon);
      break;
    case Pulling::too_cold:
      pause(job.prefix, job.target, later, now);
      break;
    default:
      pause(job.prefix, job.target, later, later);
  }
  try_again(job, how != Pulling::busy);
}

void Replicator::forget(const Job& job, std::size_t from) {
  for (std::size_t i = from; i < job.keys.size(); ++i)
    asked_.erase(make_directory_key(job.prefix.space->id, job.keys[i]));
}

// What is only hot is found by the next search; what would be lost is asked for again.
void Replicator::try_again(const Job& job, bool is_refused) {
  forget(job, job.from);
  if (!is_draining_) return;
  Prefix again = job.prefix;
  again.refusals += is_refused;
  if (again.refusals < kRefusalsMax)
    wanted_.push_back(again);
  else
    count_refused(again);
}

// It was wanted, and did not come: the directory may not have been told yet who has it, or it went
// meanwhile. Each time in a row it is left alone for longer.
void Replicator::give_up(const Job& job, Time target_until, Time now) {
  count([&] { ++counts_.given_up; });
  Known& known = known_[{job.prefix.space->number, job.prefix.last}];
  known.pause = std::clamp(known.pause * 2, options_.busy_pause, options_.refused_pause);
  pause(job.prefix, job.target, now + known.pause, target_until);
  try_again(job, /*is_refused=*/true);
}

void Replicator::pause(const Prefix& prefix, MemberHandle target, Time prefix_until,
                       Time target_until) {
  known_[{prefix.space->number, prefix.last}].paused_until = prefix_until;
  resting_[target] = target_until;
}

// --- leaving -------------------------------------------------------------------------------------

void Replicator::count_refused(const Prefix& prefix) {
  const auto members = parts_.members.now();
  const Chain chain = chain_of(prefix, *members);
  std::uint64_t blocks = 0;
  for (std::size_t i = 0; i < chain.where.size(); ++i) {
    if (!is_wanted(chain.where[i], *members)) continue;
    ++blocks;
    asked_.insert(make_directory_key(prefix.space->id, chain.blocks[i].key));  // counted once
  }
  count([&] { drain_.refused_blocks += blocks; });
}

bool Replicator::drain(Deadline deadline) {
  const std::unique_lock turning(turning_, deadline);
  if (!turning.owns_lock()) return false;
  is_draining_ = true;
  jobs_.clear();
  wanted_.clear();
  resting_.clear();
  asked_.clear();
  asked_before_.clear();
  count([&] { drain_ = {.is_running = true}; });
  // What is put meanwhile is seen by a later pass.
  bool is_done = false;
  for (int pass = 0; pass < 3 && !is_done; ++pass) {
    const std::uint64_t before = drain_stats().moved_blocks;
    if (!drain_pass(deadline)) break;
    is_done = pass > 0 && drain_stats().moved_blocks == before;
    is_done |= pass == 2;
  }
  jobs_.clear();
  wanted_.clear();
  asked_.clear();
  is_draining_ = false;
  count([&] {
    drain_.is_running = false;
    drain_.is_over = is_done;
  });
  return is_done;
}

bool Replicator::has_others(const MemberView::Snapshot& members) {
  return std::ranges::any_of(members.members, [&](const MemberView::Member& member) {
    return member.handle != members.self && member.info.state == MemberState::up;
  });
}

// False: the deadline came first, or stop(), or there is nobody.
bool Replicator::drain_pass(Deadline deadline) {
  for (const HotPrefix& each : parts_.node.ends(kEndsMax))
    wanted_.push_back({.space = parts_.node.space(each.number), .last = each.key});
  count([&] { drain_.prefixes = std::max<std::uint64_t>(drain_.prefixes, wanted_.size()); });
  for (;;) {
    const Time now = steady_clock::now();
    advance(now);
    for (std::size_t left = wanted_.size(); left > 0 && now < deadline; --left) {
      const auto members = parts_.members.now();
      const bool is_anybody = std::ranges::any_of(
          members->members, [&](const auto& member) { return may_ask(member, *members, now); });
      if (!is_anybody) break;
      const Prefix prefix = wanted_.front();
      wanted_.pop_front();
      begin(prefix, now);
    }
    const bool is_alone = !has_others(*parts_.members.now());
    std::unique_lock lock(mutex_);
    drain_.prefixes_left = wanted_.size() + jobs_.size();
    if (wanted_.empty() && jobs_.empty()) return true;
    if (is_stopped_ || is_alone || now >= deadline) return false;
    if (stopped_.wait_for(lock, std::chrono::milliseconds(2), [this] { return is_stopped_; }))
      return false;
  }
}

void Replicator::stop() {
  {
    const std::lock_guard lock(mutex_);
    is_stopped_ = true;
  }
  stopped_.notify_all();
}

ReplicaStats Replicator::stats() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

DrainStats Replicator::drain_stats() const {
  const std::lock_guard lock(mutex_);
  return drain_;
}

}  // namespace kvpool
