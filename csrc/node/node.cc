#include "node/node.h"

#include <algorithm>
#include <string>

namespace kvpool {
namespace {

using namespace std::chrono_literals;

constexpr auto kTendEvery = 50ms;
constexpr auto kTendBusyEvery = 5ms;  // clients fill half a ring of touches in less than the above
constexpr auto kPauseForOthers = 60us;
constexpr std::uint32_t kEvictionsPerTurn = 16;  // then the lock is let go
constexpr std::uint32_t kSweepPerTurn = 1024;
constexpr std::uint64_t kWarmAheadUnits = 16;  // 32 MiB: what a burst of puts finds ready
// Making one huge page takes 0.2 ms where they are free and over 5 ms where the kernel must move
// memory for them; ordinary pages cost 1.5 ms. After this many slow ones in a row, no more of them.
constexpr auto kHugeUnitSlow = 4ms;
constexpr int kSlowUnitsMax = 4;
// The SSD tier may be resized to so many times what it was opened with; costs addresses only.
constexpr std::uint64_t kSsdGrowthFactor = 4;

}  // namespace

Result<std::unique_ptr<Node>> Node::open(const NodeOptions& options,
                                         std::shared_ptr<const Clock> clock) {
  NodeOptions full = options;
  auto faults = std::make_unique<FaultPoints>();
  std::unique_ptr<Ssd> tier;
  if (options.has_ssd) {
    full.ssd.faults = faults.get();
    auto opened = Ssd::open(full.ssd);
    if (!opened) return std::unexpected(opened.error());
    tier = std::move(*opened);
    full.store.ssd_entries_max = tier->facts().entries_max * kSsdGrowthFactor;
  }
  auto store = Store::create(full.store);
  if (!store) return std::unexpected(store.error());
  auto node =
      std::unique_ptr<Node>(new Node(full, std::move(*store), std::move(clock), std::move(faults)));
  if (tier) {
    auto attached = node->attach(std::move(tier));
    if (!attached) return std::unexpected(attached.error());
  }
  node->start_threads();
  return node;
}

Node::Node(const NodeOptions& options, std::unique_ptr<Store> store,
           std::shared_ptr<const Clock> clock, std::unique_ptr<FaultPoints> faults)
    : options_(options),
      clock_(std::move(clock)),
      faults_(std::move(faults)),
      store_(std::move(store)),
      reader_(store_->view()) {}

void Node::start_threads() {
  threads_.emplace_back([this] { keep(); });
  if (options_.prefault == Prefault::all)
    for (std::uint32_t i = 1; i < options_.warm_threads; ++i)
      threads_.emplace_back([this] { warm_beside(); });
  if (tier_) writer_ = std::thread([this] { write_back(); });
}

Node::~Node() { close(Deadline{}); }

void Node::close(Deadline flush_until) {
  closed_.store(true, std::memory_order_release);
  std::vector<std::thread> threads;
  {
    Lock lock(mutex_);
    stopping_ = true;
    threads.swap(threads_);
  }
  work_.notify_all();
  settled_.notify_all();
  written_.notify_all();
  {
    Lock lock(mutex_);
    wake_waiters();
    wake_far();
  }
  for (std::thread& thread : threads) thread.join();
  close_ssd(flush_until);
  // A namespace or a view that is still held keeps this object, but not the memory of the pool.
  Lock lock(mutex_);
  while (store_->empty_step(clock_->now())) let_others_in(lock);
}

Result<Namespace*> Node::open_namespace(const Hash128& id, std::uint64_t block_bytes) {
  Lock lock(mutex_);
  return store_->open_namespace(id, block_bytes);
}

Result<std::uint64_t> Node::drop_namespace(Namespace& space, Deadline deadline) {
  Lock lock(mutex_);
  const std::uint64_t blocks = space.blocks;
  store_->drop(space);
  wake_waiters();
  kick();
  if (!tier_ || !store_->ssd().drops_pending()) return blocks;
  // Until the index knows, a restart would bring these blocks back.
  const Urgent urgent(*this);
  written_.wait_until(lock, deadline, [&] {
    return writer_ends_ || tier_->is_read_only() || !store_->ssd().drops_pending();
  });
  if (!store_->ssd().drops_pending()) return blocks;
  return fail(Code::no_resource,
              "the namespace is dropped, but the SSD tier could not be told (" +
                  (tier_->is_read_only() ? tier_->why_read_only() : std::string("no answer yet")) +
                  "): blocks of it may be back after a restart");
}

Result<std::uint64_t> Node::resize(std::optional<std::uint64_t> new_bytes,
                                   std::optional<std::uint64_t> blocks_limit, Deadline deadline) {
  Lock lock(mutex_);
  const std::uint64_t asked = new_bytes.value_or(store_->bytes_limit());
  const std::uint64_t bytes = (asked + kUnitBytes - 1) / kUnitBytes * kUnitBytes;
  if (options_.store.sealed && bytes != store_->bytes_limit())
    return fail(Code::bad_argument, "a pool with a sealed arena has one size, " +
                                        std::to_string(store_->bytes_limit()) + " bytes");
  if (bytes < kUnitBytes || bytes > store_->bytes_max())
    return fail(Code::bad_argument,
                "cannot resize to " + std::to_string(bytes) + " bytes: this pool was opened for " +
                    std::to_string(kUnitBytes) + ".." + std::to_string(store_->bytes_max()));
  store_->set_limit(bytes, blocks_limit.value_or(store_->blocks_limit()));
  while (!stopping_ && store_->shrink_step(clock_->now()) &&
         std::chrono::steady_clock::now() < deadline)
    let_others_in(lock);
  kick();
  return store_->bytes_committed();
}

void Node::trim() {
  Lock lock(mutex_);
  // As much as there is now: what the node's thread makes ahead of need meanwhile is its affair.
  for (std::uint32_t left = store_->warm_units(); left > 0 && !stopping_;) {
    const std::uint32_t given = store_->trim_step();
    if (given == 0) break;
    left -= std::min(left, given);
    let_others_in(lock);
  }
  store_->punch_strays();
}

std::optional<double> Node::temperature(const Namespace& space, const Hash128& key) {
  Lock lock(mutex_);
  drain_touches();
  drain_clients(lock);
  BlockId record = kNoBlock;
  if (!store_->find(space, key, record)) return std::nullopt;
  return store_->temperature(record);
}

void Node::check_invariants() {
  Lock lock(mutex_);
  store_->check_invariants();
}

NodeStats Node::stats() {
  NodeStats stats;
  Lock lock(mutex_);
  drain_touches();
  for (Attached& client : attached_) take_client_traffic(client);
  stats.store = store_->counters();
  stats.policy = store_->policy_stats();
  stats.blocks = store_->resident();
  stats.blocks_limit = store_->blocks_limit();
  stats.reserved = store_->reserved();
  stats.pinned = store_->pins();
  stats.zombies = store_->zombies();
  stats.dead = store_->dead();
  stats.bytes_limit = store_->bytes_limit();
  stats.bytes_max = store_->bytes_max();
  stats.bytes_committed = store_->bytes_committed();
  stats.bytes_in_slabs = store_->bytes_in_slabs();
  stats.bytes_taken = store_->bytes_taken();
  stats.bytes_books = store_->bytes_of_books();
  stats.bytes_arena = store_->arena().committed_bytes();
  stats.namespaces = store_->namespaces().count();
  stats.warm_units = store_->warm_units();
  stats.touches_lost = touches_lost_;
  stats.evicted_ahead = evicted_ahead_;
  stats.clients = attached_.size();
  stats.clients_ended = clients_ended_;
  stats.held_slots = store_->held_slots();
  stats.waiting = waiters_.size();
  stats.huge_units = huge_units_.load(std::memory_order_relaxed);
  stats.views = clients_read_.views;
  stats.view_blocks = clients_read_.view_blocks;
  stats.far = far_counters_;
  stats.far_fetching = far_.size();
  add_ssd_stats(stats);
  const std::vector<Namespace*> spaces = store_->namespaces().all();
  lock.unlock();
  add_traffic(stats, spaces);
  return stats;
}

// Between two pieces of a long job. A mutex is not fair: who waits is still waking up when the one
// who let go has it again, so that pause is given to it.
void Node::let_others_in(Lock& lock) {
  lock.unlock();
  std::this_thread::sleep_for(kPauseForOthers);
  lock.lock();
}

void Node::kick() {
  if (kicked_) return;
  kicked_ = true;
  work_.notify_one();
}

// --- the node's own thread -----------------------------------------------------------------------

void Node::keep() {
  Lock lock(mutex_);
  while (!stopping_) {
    kicked_ = false;
    if (tend(lock)) {
      // Work is left: let waiting callers in first.
      let_others_in(lock);
      continue;
    }
    idle_ = true;
    settled_.notify_all();
    work_.wait_for(lock, clients_busy_ ? kTendBusyEvery : kTendEvery,
                   [&] { return stopping_ || kicked_; });
    idle_ = false;
  }
}

// One bounded turn. True: more to do at once.
bool Node::tend(Lock& lock) {
  drain_touches();
  clients_busy_ = drain_clients(lock);
  const Seconds now = clock_->now();
  bool more = store_->poll_hazards();
  if (store_->index_busy()) {
    store_->step_index();
    more = true;
  }
  if (store_->dead() > 0) more |= store_->sweep(kSweepPerTurn, now);
  more |= store_->shrink_step(now);
  const std::uint32_t evicted = store_->evict_ahead(options_.evict_ahead, kEvictionsPerTurn, now);
  evicted_ahead_ += evicted;
  more |= evicted >= kEvictionsPerTurn;  // a slab that passes to another class takes more
  if (!more) store_->punch_strays();
  if (wants_warming()) more |= warm(lock);
  return more;
}

bool Node::wants_warming() const {
  if (options_.prefault == Prefault::off) return false;
  if (store_->bytes_committed() + warming_threads_ * kUnitBytes >= store_->bytes_limit())
    return false;
  return options_.prefault == Prefault::all || store_->warm_units() < kWarmAheadUnits;
}

// False: the machine has no memory for it now, so asking again at once would help nobody.
bool Node::warm(Lock& lock) {
  const auto unit = store_->start_warming();
  if (!unit) return false;
  ++warming_threads_;
  lock.unlock();
  bool ok = true;
  commit_units(std::uint64_t{*unit} * kUnitBytes, kUnitBytes, ok);
  lock.lock();
  --warming_threads_;
  store_->warmed(*unit, ok);
  settled_.notify_all();
  return ok;
}

// Helps to pre-fault a whole pool, then ends.
void Node::warm_beside() {
  Lock lock(mutex_);
  while (!stopping_ && wants_warming() && warm(lock)) {
  }
}

void Node::commit_units(std::uint64_t offset, std::uint64_t bytes, bool& ok) {
  Arena& arena = store_->arena();
  for (std::uint64_t at = offset; at < offset + bytes && ok; at += kUnitBytes) {
    const bool huge =
        options_.huge_pages && slow_units_.load(std::memory_order_relaxed) < kSlowUnitsMax;
    if (!huge) {
      ok = arena.commit(at, kUnitBytes);
      continue;
    }
    const auto before = std::chrono::steady_clock::now();
    const bool made = arena.commit_huge(at, kUnitBytes);
    const bool slow = !made || std::chrono::steady_clock::now() - before > kHugeUnitSlow;
    slow_units_.store(slow ? slow_units_.load(std::memory_order_relaxed) + 1 : 0,
                      std::memory_order_relaxed);
    if (made) huge_units_.fetch_add(1, std::memory_order_relaxed);
    if (!made) ok = arena.commit(at, kUnitBytes);
  }
}

bool Node::settle(Deadline deadline) {
  Lock lock(mutex_);
  kick();
  return settled_.wait_until(
      lock, deadline, [&] { return (idle_ && !kicked_ && warming_threads_ == 0) || stopping_; });
}

}  // namespace kvpool
