// Blocks that only other members have.
//
//   choose keys that nobody fetches yet -> fetch, each into a slot of DRAM or, not being worth one,
//   into private memory -> commit, in chain order -> wake who waits for them -> deliver -> unpin
//
// A run of missing blocks is fetched in windows. Who wants a key of a window that another call
// fetches waits for that one, and then finds the blocks in DRAM, or in the window's own memory.
// A slot is reserved just before its bytes come, and while that lasts nothing is waited for but
// those bytes; so puts of the same key wait no longer than for another put.
#include <algorithm>

#include "node/node.h"

namespace kvpool {
namespace {

using std::chrono::steady_clock;

constexpr std::uint64_t kWindowBytes = 64 << 20;
constexpr std::size_t kWindowBlocks = 1024;
constexpr std::size_t kFarKeysMax = 1 << 16;  // being fetched at a time, by all calls
constexpr int kRoomAttempts = 64;             // of making room in pieces
constexpr std::size_t kPartsPerLock = 64;

std::size_t window_of(const Namespace& space, std::size_t keys) {
  const std::uint64_t slot_bytes = SlabPool::slot_bytes(space.block_bytes);
  return std::min(keys, std::clamp<std::size_t>(kWindowBytes / slot_bytes, 1, kWindowBlocks));
}

}  // namespace

// One window. The thread that made it writes; others look at it once it is over.
class Node::FarFetch final : public BlockSink {
 public:
  enum class At : std::uint8_t {
    nowhere,
    slot,   // reserved
    kept,   // resident and pinned by this fetch
    aside,  // in private memory
  };
  struct Part {
    std::byte* into = nullptr;
    BlockId record = kNoBlock;
    At at = At::nowhere;
    bool has_come = false;
    Hash128 sum;
  };
  FarFetch(Node& owner, const Namespace& of, bool all_into_dram)
      : node(owner),
        space(of),
        incarnation(of.incarnation.load(std::memory_order_acquire)),
        into_dram(all_into_dram) {}

  bool deliver(std::size_t, const IndexReader&, const Found&) override { return false; }
  bool deliver_whole(std::size_t, std::span<const std::byte>) override { return false; }
  std::byte* place(std::size_t index) override {
    Part& part = parts[index];
    if (part.into != nullptr || node.find_far_room(*this, index)) return part.into;
    bounces.push_back(node.bounces_.take(SlabPool::slot_bytes(space.block_bytes)));
    part.into = bounces.back().memory();
    if (part.into != nullptr) part.at = At::aside;
    return part.into;
  }
  void arrived(std::size_t index, const Hash128& sum) override {
    parts[index].has_come = true;
    parts[index].sum = sum;
    if (index != settled) return;
    Lock lock(node.mutex_);
    node.keep_far_leading(lock, *this);
  }
  std::size_t came() const {
    const auto gap = std::ranges::find(parts, false, &Part::has_come);
    return static_cast<std::size_t>(gap - parts.begin());
  }
  std::span<const std::byte> payload(std::size_t index) const {
    return {parts[index].into, space.block_bytes};
  }

  Node& node;
  const Namespace& space;
  const std::uint32_t incarnation;
  const bool into_dram;
  std::vector<Hash128> keys;      // its own: those who wait may outlast the call
  std::optional<Hash128> before;  // the key before the first
  std::vector<Part> parts;
  std::vector<Bounce> bounces;
  double heat = 0;          // where the blocks come from; 0: not known
  std::size_t settled = 0;  // parts before it have their place for good
  Miss why = Miss::none;
  bool is_over = false;
  std::condition_variable over;
};

bool Node::FarCall::is_late() const { return steady_clock::now() >= deadline; }

void Node::set_elsewhere(std::shared_ptr<Elsewhere> elsewhere) {
  Lock lock(mutex_);
  elsewhere_.swap(elsewhere);
  has_elsewhere_.store(elsewhere_ != nullptr, std::memory_order_release);
  store_->view().header().asks_elsewhere.store(elsewhere_ != nullptr, std::memory_order_release);
  lock.unlock();  // the one before ends outside
}

std::shared_ptr<Elsewhere> Node::elsewhere() const {
  if (!has_elsewhere()) return nullptr;
  Lock lock(mutex_);
  return stopping_ ? nullptr : elsewhere_;
}

Node::Deadline Node::far_deadline(const Reach& reach) const {
  const Deadline most = steady_clock::now() + far_timeout_.load();
  return std::min(reach.until.value_or(most), most);
}

// Whether there is somebody to ask; from the first time on the call has a deadline.
bool Node::may_go_far(FarCall& call) const {
  if (!call.reach.is_far) return false;
  if (call.elsewhere != nullptr) return true;
  call.elsewhere = elsewhere();
  call.deadline = far_deadline(call.reach);
  return call.elsewhere != nullptr;
}

// --- looking -------------------------------------------------------------------------------------

Looked Node::look_far(const Namespace& space, std::span<const Hash128> keys, std::uint8_t* tiers,
                      const Reach& reach, Miss& why) const {
  Looked looked = look(space, keys, tiers);
  why = looked.present < keys.size() ? Miss::absent : Miss::none;
  const auto elsewhere = why == Miss::none || !reach.is_far ? nullptr : this->elsewhere();
  if (elsewhere == nullptr) return looked;
  const auto rest = keys.subspan(looked.present);
  std::vector<std::uint8_t> has(rest.size());
  const Miss unknown = elsewhere->find({space, rest, far_deadline(reach)}, has);
  const std::uint32_t incarnation = space.incarnation.load(std::memory_order_acquire);
  Found found;
  for (std::size_t i = 0; i < rest.size(); ++i) {
    const bool is_here = reader_.find(rest[i], incarnation, found);
    if (!is_here && has[i] == 0) {
      why = unknown == Miss::none ? Miss::absent : unknown;
      return looked;
    }
    const bool is_in_dram = is_here && (found.tier & kTierDram) != 0;
    looked.remote += !is_here;
    looked.on_ssd += is_here && !is_in_dram;
    if (tiers != nullptr)
      tiers[looked.present] = is_in_dram ? std::uint8_t{kTierDram}
                              : is_here  ? std::uint8_t{kTierSsd}
                                         : kTierRemote;
    ++looked.present;
  }
  why = Miss::none;
  return looked;
}

// --- fetching ------------------------------------------------------------------------------------

// Leading keys that are not here and that nobody fetches, up to a window; they are this fetch's
// until it is settled. Under the lock.
bool Node::choose_far_keys(const std::shared_ptr<FarFetch>& fetch, std::span<const Hash128> keys) {
  for (const Hash128& key : keys.first(window_of(fetch->space, keys.size()))) {
    BlockId record = kNoBlock;
    if (store_->find(fetch->space, key, record) || far_.size() >= kFarKeysMax) break;
    if (!far_.emplace(FarKey{key, fetch->incarnation}, fetch).second) break;
    fetch->keys.push_back(key);
  }
  fetch->parts.resize(fetch->keys.size());
  return !fetch->keys.empty();
}

// The window that has key `done` of the call, over; none: `why`, or look again. It is this call's
// own, or one that it has waited for, which is there to be read.
Node::FarWindow Node::far_fetch(FarCall& call, std::size_t done, bool into_dram, Miss& why) {
  auto fetch = std::make_shared<FarFetch>(*this, call.space, into_dram);
  const auto keys = call.keys.subspan(done);
  const std::size_t most = window_of(call.space, keys.size());
  fetch->keys.reserve(most);
  fetch->parts.reserve(most);
  if (done > 0) fetch->before = call.keys[done - 1];
  fetch->heat = call.heat;
  why = call.is_late() ? Miss::timed_out : Miss::none;
  Lock lock(mutex_);
  if (stopping_) why = Miss::absent;
  if (why != Miss::none) return {};
  if (const auto found = far_.find({keys[0], fetch->incarnation}); found != far_.end())
    return join_far(lock, call, found->second, keys[0], why);
  if (!choose_far_keys(fetch, keys)) {
    // It came meanwhile; or so much is being fetched that this has to wait for another time.
    if (far_.size() >= kFarKeysMax) why = Miss::no_room;
    return {};
  }
  ++far_counters_.fetches;
  lock.unlock();
  try {
    fetch->why = call.elsewhere->fetch({call.space, fetch->keys, call.deadline}, *fetch);
  } catch (const std::bad_alloc&) {
    fetch->why = Miss::no_room;
  }
  settle_far(*fetch);
  return {.fetch = std::move(fetch), .is_own = true};
}

Node::FarWindow Node::join_far(Lock& lock, const FarCall& call, std::shared_ptr<FarFetch> fetch,
                               const Hash128& key, Miss& why) {
  ++far_counters_.joined;
  fetch->over.wait_until(lock, call.deadline, [&] { return fetch->is_over || stopping_; });
  if (!fetch->is_over) {
    why = stopping_ ? Miss::absent : Miss::timed_out;
    return {};
  }
  const auto at = std::ranges::find(fetch->keys, key) - fetch->keys.begin();
  return {.fetch = std::move(fetch), .first = static_cast<std::size_t>(at)};
}

// A slot for that part. False: it goes aside.
bool Node::find_far_room(FarFetch& fetch, std::size_t index) {
  using Outcome = Store::Reserved::Outcome;
  FarFetch::Part& part = fetch.parts[index];
  const Hash128& key = fetch.keys[index];
  Lock lock(mutex_);
  BlockId present = kNoBlock;
  const bool is_gone = fetch.space.incarnation.load(std::memory_order_relaxed) != fetch.incarnation;
  if (stopping_ || is_gone || store_->find(fetch.space, key, present)) return false;
  if (!fetch.into_dram && !store_->is_worth_a_copy(fetch.space, key, clock_->now())) {
    ++far_counters_.too_cold;
    return false;
  }
  auto room = store_->reserve(fetch.space, key, clock_->now());
  for (int left = kRoomAttempts; left > 0 && room.outcome == Outcome::again; --left) {
    let_others_in(lock);
    if (stopping_) return false;
    room = store_->reserve(fetch.space, key, clock_->now());
  }
  if (room.outcome != Outcome::reserved) return false;
  part.record = room.record;
  part.at = FarFetch::At::slot;
  part.into = store_->arena().base() + room.offset;
  if (room.pages_bytes == 0) return true;
  lock.unlock();
  const bool backed = back_with_pages(room);
  lock.lock();
  if (room.makes_slab) store_->pages_made(room.record, backed);
  if (backed) return true;
  store_->abandon_copy(room.record);
  settled_.notify_all();
  part = {};
  return false;
}

// In the order of the chain, so that each block knows the one before it. Lets others in between.
void Node::keep_far_leading(Lock& lock, FarFetch& fetch) {
  for (std::size_t i = 0; fetch.settled < fetch.parts.size(); ++i) {
    if (!fetch.parts[fetch.settled].has_come) break;
    if (i % kPartsPerLock == kPartsPerLock - 1) let_others_in(lock);
    keep_far_part(fetch, fetch.settled++);
  }
}

void Node::keep_far_part(FarFetch& fetch, std::size_t index) {
  using At = FarFetch::At;
  FarFetch::Part& part = fetch.parts[index];
  if (part.at != At::slot) return;
  BlockId parent = kNoBlock;
  if (index > 0 && fetch.parts[index - 1].at == At::kept)
    parent = fetch.parts[index - 1].record;
  else if (index > 0 || fetch.before)
    store_->find(fetch.space, index > 0 ? fetch.keys[index - 1] : *fetch.before, parent);
  const auto committed =
      store_->commit_copy(part.record, part.sum, parent, fetch.heat, clock_->now());
  settled_.notify_all();
  if (committed != Store::Committed::stored) {
    part = {};  // dropped meanwhile, or the index is full: its bytes went with its slot
    return;
  }
  store_->pin(part.record);
  part.at = At::kept;
  announce(fetch.space, fetch.keys[index]);
}

// What came has its place, the rest gives its own back; whoever waits is woken, once.
void Node::settle_far(FarFetch& fetch) {
  using At = FarFetch::At;
  Lock lock(mutex_);
  std::uint64_t came = 0;
  std::size_t changed = 0;
  for (std::size_t i = 0; i < fetch.parts.size(); ++i) {
    FarFetch::Part& part = fetch.parts[i];
    if (part.at == At::slot && ++changed % kPartsPerLock == 0) let_others_in(lock);
    if (part.at == At::slot && part.has_come) keep_far_part(fetch, i);
    if (part.at == At::slot) {
      store_->abandon_copy(part.record);
      part = {};
    }
    came += part.has_come;
    far_counters_.kept += part.has_come && part.at == At::kept;
    far_counters_.aside += part.has_come && part.at == At::aside;
  }
  for (const Hash128& key : fetch.keys) far_.erase({key, fetch.incarnation});
  far_counters_.blocks += came;
  far_counters_.bytes += came * fetch.space.block_bytes;
  far_counters_.missed += came < fetch.parts.size();
  far_counters_.timed_out += fetch.why == Miss::timed_out;
  fetch.settled = fetch.parts.size();
  fetch.is_over = true;
  settled_.notify_all();
  fetch.over.notify_all();
  if (tier_) wake_writer();
}

// The pool closes: nobody waits for another's fetch any more. Under the lock.
void Node::wake_far() {
  for (const auto& [key, fetch] : far_) fetch->over.notify_all();
}

// `leased`: so many leading parts stay pinned, for the caller.
void Node::release_far(FarFetch& fetch, std::size_t leased) {
  Lock lock(mutex_);
  for (std::size_t i = leased; i < fetch.parts.size(); ++i)
    if (fetch.parts[i].at == FarFetch::At::kept) store_->unpin(fetch.parts[i].record);
  if (store_->bytes_committed() > store_->bytes_limit()) kick();  // a shrink waits for pins
}

// --- unasked -------------------------------------------------------------------------------------

std::size_t Node::pull(const PullRequest& request, Miss& why) {
  const Reach reach = Reach::by(request.deadline);
  FarCall call{.space = request.space, .keys = request.keys, .reach = reach, .heat = request.heat};
  std::size_t came = 0;
  why = may_go_far(call) ? Miss::none : Miss::absent;
  for (std::size_t at = request.first; at < request.keys.size() && why == Miss::none;) {
    if (look(request.space, request.keys.subspan(at, 1), nullptr).present == 1) {
      ++at;
      continue;
    }
    const FarWindow window = far_fetch(call, at, /*into_dram=*/true, why);
    std::size_t part = window.first;
    const std::size_t before = part;
    while (window.fetch && part < window.fetch->parts.size() &&
           window.fetch->parts[part].at == FarFetch::At::kept)
      ++part;
    const bool is_short = window.fetch && part < window.fetch->parts.size();
    const bool has_come = is_short && window.fetch->parts[part].has_come;
    // What a reader's fetch brought and did not keep is fetched once more.
    if (is_short && why == Miss::none && (window.is_own || !has_come))
      why = has_come ? Miss::no_room : why_not(call, window, part);
    if (window.is_own) {
      came += part - before;
      release_far(*window.fetch, 0);
    }
    if (part == before && why == Miss::none && --call.tries == 0) why = Miss::moved;
    at += part - before;
  }
  return came;
}

// --- delivering ----------------------------------------------------------------------------------

// Why a block of a window that is over did not come; none: worth asking for it anew.
Miss Node::why_not(const FarCall& call, const FarWindow& window, std::size_t part) const {
  const FarFetch& fetch = *window.fetch;
  const bool is_first = part == fetch.came();  // of those behind it nobody knows
  if (window.is_own) return fetch.why == Miss::none ? Miss::moved : fetch.why;
  if (!is_first || (fetch.why == Miss::timed_out && !call.is_late())) return Miss::none;
  return fetch.why;
}

bool Node::get_if_here(const FarCall& call, std::size_t index, BlockSink& sink) {
  Found found;
  const std::uint32_t incarnation = call.space.incarnation.load(std::memory_order_acquire);
  if (!reader_.find(call.keys[index], incarnation, found)) return false;
  if ((found.tier & kTierDram) == 0 || !sink.deliver(index, reader_, found)) return false;
  report_touches({&found, 1});
  return true;
}

std::size_t Node::get_from_elsewhere(FarCall& call, std::size_t done, BlockSink& sink, Miss& why) {
  using At = FarFetch::At;
  const FarWindow window = far_fetch(call, done, false, why);
  std::size_t part = window.first;
  for (; window.fetch && part < window.fetch->parts.size(); ++part) {
    const std::size_t index = done + part - window.first;
    const FarFetch::Part& here = window.fetch->parts[part];
    const bool is_wanted = index < call.keys.size() && window.fetch->keys[part] == call.keys[index];
    if (!is_wanted || !here.has_come) break;
    // What another call's window has kept is read like all that is here.
    if (here.at == At::kept && !window.is_own) {
      if (!get_if_here(call, index, sink)) break;
      continue;
    }
    sink.from = kTierRemote;
    if (faults_->fires("get.deliver") || !sink.deliver_whole(index, window.fetch->payload(part))) {
      why = Miss::moved;
      break;
    }
  }
  const std::size_t delivered = part - window.first;
  const bool is_short =
      window.fetch && part < window.fetch->parts.size() && !window.fetch->parts[part].has_come;
  if (is_short && why == Miss::none && (window.is_own || delivered == 0))
    why = why_not(call, window, part);
  if (window.is_own) release_far(*window.fetch, 0);
  if (delivered == 0 && why == Miss::none && --call.tries == 0) why = Miss::moved;
  return delivered;
}

std::size_t Node::lease_from_elsewhere(FarCall& call, std::size_t done, Lease* leases, Miss& why) {
  using At = FarFetch::At;
  const FarWindow window = far_fetch(call, done, true, why);
  std::size_t count = 0;
  if (window.is_own) {
    const auto& parts = window.fetch->parts;
    Lock lock(mutex_);
    for (; count < parts.size() && parts[count].at == At::kept; ++count) {
      const auto at = static_cast<std::uint64_t>(parts[count].into - store_->arena().base());
      leases[done + count] = leased(parts[count].record, call.space.block_bytes, at);
    }
    lock.unlock();
    if (count < parts.size())  // one that came and is not kept lies aside
      why = parts[count].has_come ? Miss::no_room : why_not(call, window, count);
    release_far(*window.fetch, count);
  } else if (window.fetch && !window.fetch->parts[window.first].has_come) {
    why = why_not(call, window, window.first);
  }
  if (count == 0 && why == Miss::none && --call.tries == 0) why = Miss::no_room;
  return count;
}

}  // namespace kvpool
