#include "cluster/puller.h"

#include <algorithm>

namespace kvpool {
namespace {

// Heat that another member names counts for so much at most: it fades within ten half-lives.
constexpr double kHeatMax = 1024;

}  // namespace

// A bucket that is as full as may be: the first piece is paid for before it is fetched.
Puller::Puller(std::shared_ptr<Node> node, const PullOptions& options, Time now)
    : node_(std::move(node)),
      options_(options),
      rate_(options.bytes_per_s),
      last_rate_(options.last_bytes_per_s) {
  rate_.admit(options.bytes_per_s, now);
  last_rate_.admit(options.last_bytes_per_s, now);
}

std::uint32_t Puller::count_here(const Namespace& space, std::span<const Hash128> keys) const {
  std::uint32_t here = 0;
  for (const Hash128& key : keys) here += node_->look(space, {&key, 1}, nullptr).present == 1;
  return here;
}

// No client of this node may have opened it yet.
Namespace* Puller::space_of(const PullHead& head) {
  if (Namespace* space = node_->find_namespace(head.space))
    return space->block_bytes == head.block_bytes ? space : nullptr;
  auto opened = node_->open_namespace(head.space, head.block_bytes);
  return opened ? *opened : nullptr;
}

// Under the lock. nullptr: this one is new; `state` says whether another of its sender is not.
Puller::PullPtr Puller::known(const PullHead& head, Pulling& state) {
  state = Pulling::over;
  for (const PullPtr& each : queue_) {
    if (each->from != head.from) continue;
    state = each->number == head.number ? Pulling::working : Pulling::busy;
    return each->number == head.number ? each : nullptr;
  }
  for (const PullPtr& each : over_)
    if (each->from == head.from && each->number == head.number) {
      state = each->ended;
      return each;
    }
  return nullptr;
}

PullAnswer Puller::ask(const PullHead& head, std::span<const Hash128> keys, bool are_last) {
  PullAnswer answer;
  Namespace* const space = space_of(head);
  if (space != nullptr) answer.here = count_here(*space, keys);
  const std::uint64_t missing = keys.size() - answer.here;
  // Both of these take the node's lock, so not under this one.
  const bool is_warm =
      space != nullptr && node_->is_warm_copy(*space, std::min(head.heat_milli / 1e3, kHeatMax));
  std::unique_lock lock(mutex_);
  ++counts_.asked;
  if (const PullPtr pull = known(head, answer.state)) {
    if (answer.state == Pulling::working) {
      answer.left = static_cast<std::uint32_t>(pull->keys.size() - pull->next);
    } else {
      // The last of it may have come since they were counted.
      lock.unlock();
      answer.here = count_here(*pull->space, keys);
    }
    return answer;
  }
  if (is_stopped_ || space == nullptr) {
    answer.state = Pulling::refused;
  } else if (answer.state == Pulling::over && missing > 0) {
    answer.left = static_cast<std::uint32_t>(missing);
    answer.state = is_busy(missing * space->block_bytes, are_last) ? Pulling::busy
                   : is_warm                                       ? Pulling::working
                                                                   : Pulling::too_cold;
    if (answer.state == Pulling::working) take_in(head, *space, keys, are_last);
  }
  counts_.busy += answer.state == Pulling::busy;
  counts_.too_cold += answer.state == Pulling::too_cold;
  counts_.refused += answer.state == Pulling::refused;
  return answer;
}

// Under the lock. One that is alone is taken in, however large.
bool Puller::is_busy(std::uint64_t bytes, bool are_last) const {
  if (queue_.size() >= kPullsMax) return true;
  const std::uint64_t rate = are_last ? options_.last_bytes_per_s : options_.bytes_per_s;
  return !queue_.empty() && rate > 0 &&
         static_cast<double>(queued_bytes_ + bytes) > static_cast<double>(rate) * kQueueSeconds;
}

// Under the lock.
void Puller::take_in(const PullHead& head, const Namespace& space, std::span<const Hash128> keys,
                     bool are_last) {
  auto pull = std::make_shared<Pull>();
  pull->from = head.from;
  pull->number = head.number;
  pull->space = &space;
  if (head.before != Hash128{}) pull->keys.push_back(head.before);
  pull->first = pull->next = pull->keys.size();
  pull->keys.insert(pull->keys.end(), keys.begin(), keys.end());
  pull->heat = std::min(head.heat_milli / 1e3, kHeatMax);
  pull->are_last = are_last;
  queued_bytes_ += keys.size() * space.block_bytes;
  queue_.push_back(std::move(pull));
  ++counts_.taken;
}

// Where the piece ends that begins with the next block that is not here; `bytes`: what it brings.
std::size_t Puller::next_piece(Pull& pull, std::uint64_t& bytes) const {
  bytes = 0;
  std::size_t at = pull.next;
  for (; at < pull.keys.size() && bytes < kPieceBytes; ++at) {
    const bool is_here = count_here(*pull.space, {&pull.keys[at], 1}) == 1;
    if (is_here && bytes > 0) break;
    if (!is_here) bytes += pull.space->block_bytes;
  }
  return at;
}

bool Puller::step(Time now) {
  std::deque<PullPtr> queue;
  {
    const std::lock_guard lock(mutex_);
    queue = queue_;
  }
  // Those of one budget may have to wait where those of the other need not.
  return std::ranges::any_of(queue, [&](const PullPtr& pull) { return step(pull, now); });
}

bool Puller::step(const PullPtr& pull, Time now) {
  std::uint64_t bytes = 0;
  const std::size_t until = next_piece(*pull, bytes);
  if (bytes > 0 && !(pull->are_last ? last_rate_ : rate_).admit(bytes, now)) return false;
  Miss why = Miss::none;
  std::size_t came = 0;
  if (bytes > 0)
    came = node_->pull({.space = *pull->space,
                        .keys = std::span(pull->keys).first(until),
                        .first = pull->next,
                        .heat = pull->heat,
                        .deadline = std::chrono::steady_clock::now() + options_.piece_max},
                       why);
  const std::lock_guard lock(mutex_);
  counts_.blocks += came;
  counts_.bytes += came * pull->space->block_bytes;
  pull->next = until;
  // What is behind one that does not come is of no use here.
  if (why != Miss::none) {
    counts_.missed += pull->keys.size() - until + bytes / pull->space->block_bytes - came;
    counts_.no_room += why == Miss::no_room;
    end(pull, why == Miss::no_room ? Pulling::no_room : Pulling::over);
  } else if (until == pull->keys.size()) {
    end(pull, Pulling::over);
  } else if (!queue_.empty() && queue_.front() == pull) {
    queue_.push_back(pull);  // the next piece is another's
    queue_.pop_front();
  }
  return true;
}

// Under the lock.
void Puller::end(const PullPtr& pull, Pulling how) {
  if (std::erase(queue_, pull) == 0) return;
  pull->ended = how;
  const std::uint64_t bytes = (pull->keys.size() - pull->first) * pull->space->block_bytes;
  queued_bytes_ -= bytes;
  // Only how it ended is kept, of the last of each member.
  std::erase_if(over_, [&](const PullPtr& each) { return each->from == pull->from; });
  pull->next = pull->first = 0;
  std::vector<Hash128>().swap(pull->keys);
  over_.push_back(pull);
  if (over_.size() > kOverKept) over_.pop_front();
}

void Puller::stop() {
  const std::lock_guard lock(mutex_);
  is_stopped_ = true;
  queue_.clear();
  over_.clear();
  queued_bytes_ = 0;
}

PullStats Puller::stats() const {
  const std::lock_guard lock(mutex_);
  PullStats stats = counts_;
  stats.queued = queue_.size();
  return stats;
}

}  // namespace kvpool
