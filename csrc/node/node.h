// The pool of one host, in one object: a Store behind a lock, lock-free readers beside it, and one
// thread that evicts ahead, warms memory, sweeps and grows the index.
//
// put:  reserve -> copy -> commit            one block at a time, so that nobody ever waits for a
//                                            key while holding a reservation
// get:  lookup -> copy -> deliver            no lock; the generation decides
//       lookup -> acquire -> ... -> release  pinned
//       lookup -> fetch -> deliver           a block that lies on the SSD alone (node_fetch.cc), or
//                                            on other members alone (node_elsewhere.cc)
// ssd:  queue -> write -> commit -> announce the writer's thread, group by group (node_ssd.cc)
// Promises:  1. a get delivers the bytes that were put, or counts the block as missing;
//            2. when put answers stored, every reader of this node finds the block;
//            3. a pinned block keeps its bytes until it is released, whatever is removed, dropped
//               or resized meanwhile;
//            4. every wait has a deadline, and no lock is held while bytes are copied in or out;
//            5. a put never waits for the SSD, unless it was asked to be durable.
// Thread rule: every method from any thread. Not after fork: check is_forked() first.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/fault.h"
#include "base/fork_guard.h"
#include "node/bounce_pool.h"
#include "node/changes.h"
#include "node/client_page.h"
#include "node/elsewhere.h"
#include "node/hot_prefixes.h"
#include "node/index_reader.h"
#include "node/miss.h"
#include "node/page_traffic.h"
#include "node/put_status.h"
#include "node/resident_walk.h"
#include "node/store.h"
#include "node/touch_ring.h"
#include "node/traffic.h"

namespace kvpool {

enum class Prefault : std::uint8_t {
  off,    // pages come when a slab is first used
  ahead,  // some free memory is kept ready
  all,    // all of it, in the background
};

struct NodeOptions {
  StoreOptions store;
  Prefault prefault = Prefault::ahead;
  bool huge_pages = true;  // ask for them; ordinary pages where the machine refuses or is slow
  double evict_ahead = 0;  // share of the slots kept free on a full pool
  std::uint32_t warm_threads = 1;
  bool has_ssd = false;
  SsdOptions ssd;
  SsdAdmit ssd_admit = SsdAdmit::second_use;
  // A read of the SSD that takes longer is a miss; what it reads into stays taken until it ends.
  std::chrono::milliseconds ssd_timeout{5000};
  // Other members are asked for so long, and again for so long whenever something has come.
  std::chrono::milliseconds far_timeout{1000};
};

// Where the payload of a put comes from.
class BlockSource {
 public:
  virtual ~BlockSource() = default;
  // Writes block `index` of the call into the slot and returns the checksum of what it wrote.
  virtual bool fill(std::size_t index, std::byte* slot, Hash128& sum) = 0;
  // Where the payload lies as a whole, for a channel that sends it on; nullptr: only fill() has it.
  // Its owner may change it meanwhile.
  virtual const std::byte* place(std::size_t) const { return nullptr; }
  // The payloads come one after the other: that of a block that is there already is skipped.
  virtual bool is_stream() const { return false; }
  virtual void skip(std::size_t) {}
};

// Where the payload of a get goes.
class BlockSink {
 public:
  virtual ~BlockSink() = default;
  // Copies the block out, checking with still_there() that it is whole. False: it went away.
  virtual bool deliver(std::size_t index, const IndexReader& reader, const Found& found) = 0;
  // Copies from `payload`, which nobody changes meanwhile.
  virtual bool deliver_whole(std::size_t index, std::span<const std::byte> payload) = 0;
  // Where the payload goes as a whole, for a channel that receives it; nullptr: it cannot. What was
  // written there needs no deliver_whole().
  virtual std::byte* place(std::size_t) { return nullptr; }
  // What was written to that place is the whole block; with the checksum that was compared.
  virtual void arrived(std::size_t, const Hash128&) {}
  std::uint8_t from = kTierSsd;  // which tier what is given to deliver_whole() comes from
};

struct Lease {
  BlockId record = kNoBlock;
  std::uint32_t bytes = 0;
  std::uint64_t offset = 0;
  std::uint64_t generation = 0;
  Hash128 sum;  // of the payload
};

struct Ticket {  // a reservation
  BlockId record = kNoBlock;
  BlockId parent = kNoBlock;  // pinned until commit or abort
  std::uint64_t offset = 0;
  const Namespace* space = nullptr;
};

// What was fetched from other members.
struct FarCounters {
  std::uint64_t fetches = 0, joined = 0;    // windows of keys; calls that waited for another's
  std::uint64_t blocks = 0, bytes = 0;      // that came
  std::uint64_t kept = 0, aside = 0;        // of these: in DRAM; in private memory, for one call
  std::uint64_t too_cold = 0;               // of those aside: not worth their place
  std::uint64_t missed = 0, timed_out = 0;  // fetches that did not bring all; for lack of time
};

struct SpaceTraffic {
  const Namespace* space = nullptr;
  std::uint64_t blocks = 0;  // resident now
  TrafficTotals totals;
};

struct NodeStats {
  StoreCounters store;
  PolicyStats policy;
  std::uint64_t blocks = 0, blocks_limit = 0, reserved = 0, pinned = 0, zombies = 0, dead = 0;
  std::uint64_t bytes_limit = 0, bytes_max = 0, bytes_committed = 0, bytes_in_slabs = 0;
  std::uint64_t bytes_taken = 0, bytes_books = 0, bytes_arena = 0;
  std::uint64_t gets = 0, get_blocks = 0, get_bytes = 0, missed_absent = 0, missed_moved = 0,
                missed_fault = 0;
  std::uint64_t put_bytes = 0, not_stored = 0, touches_lost = 0, namespaces = 0;
  std::uint64_t clients = 0, clients_ended = 0, held_slots = 0, waiting = 0, views = 0,
                view_blocks = 0;
  std::uint64_t warm_units = 0, huge_units = 0, evicted_ahead = 0;
  // With an SSD tier.
  bool has_ssd = false, ssd_read_only = false;
  bool ssd_busy = false;  // the writer has work: blocks may leave the SSD or move
  std::string ssd_read_only_reason;
  SsdFacts ssd_facts;
  SsdCounters ssd;
  std::uint64_t ssd_blocks = 0, ssd_bytes_taken = 0, ssd_queued = 0, ssd_quarantined = 0,
                ssd_hits = 0, ssd_hit_bytes = 0, ssd_timeouts = 0, not_durable = 0;
  FarCounters far;
  std::uint64_t far_fetching = 0;  // keys
};

class Node {
 public:
  using Deadline = std::chrono::steady_clock::time_point;
  static constexpr std::size_t kWaitersMax = 4096;
  static constexpr auto kAskEvery = std::chrono::milliseconds(50);

  static Result<std::unique_ptr<Node>> open(const NodeOptions& options,
                                            std::shared_ptr<const Clock> clock);
  ~Node();
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  // Refuses new work, stops the threads, ends all waits. Leases stay good until released. Until the
  // deadline, what the SSD tier should have is written to it; a group under way is always ended.
  void close(Deadline flush_until);
  bool is_closed() const { return closed_.load(std::memory_order_acquire); }
  bool is_forked() const { return fork_guard_.is_child(); }

  Result<Namespace*> open_namespace(const Hash128& id, std::uint64_t block_bytes);
  // By Namespace::number; nullptr: there is none.
  Namespace* space(std::uint32_t number) const;
  Namespace* find_namespace(const Hash128& id) const;  // nullptr: there is none
  // An error: in force now, but the SSD's index could not be told, so that blocks of it may be
  // back after a restart.
  Result<std::uint64_t> drop_namespace(Namespace& space, Deadline deadline);

  struct PutRequest {
    Namespace& space;
    std::span<const Hash128> keys;    // in chain order
    const Hash128* parent = nullptr;  // key of the block before the first
    Deadline deadline;
    // Asked every kAskEvery at least while it waits, under the lock: whoever wanted this is gone.
    std::function<bool()> given_up = {};
    bool is_part = false;  // as below: counted by the caller
  };
  // Stores the keys in order; `statuses` has one place per key.
  void put(const PutRequest& request, BlockSource& source, PutStatus* statuses);
  // One reservation that the caller fills and commits or aborts.
  PutStatus reserve(const PutRequest& request, Ticket& ticket);
  PutStatus commit(const Ticket& ticket, const Hash128& sum, Deadline deadline);
  void abort(const Ticket& ticket);

  // Leading blocks present, here or (kTierRemote) on another member; does not pin, does not heat.
  // `why`: of the first that is missing, here and below; may be nullptr.
  std::size_t lookup(const Namespace& space, std::span<const Hash128> keys, std::uint8_t* tiers,
                     const Reach& reach = {}, Miss* why = nullptr) const;
  // Delivers the leading blocks that are whole and returns how many.
  std::size_t get(const Namespace& space, std::span<const Hash128> keys, BlockSink& sink,
                  Miss* why = nullptr, const Reach& reach = {});
  std::size_t acquire(const Namespace& space, std::span<const Hash128> keys, Lease* leases,
                      Miss* why = nullptr, const Reach& reach = {});
  void release(std::span<const Lease> leases);
  // As those above, for whoever carries out a call in several of these: nothing is added to the
  // traffic of the namespace, which is counted once, by the caller.
  // look(): on this node alone.
  Looked look(const Namespace& space, std::span<const Hash128> keys, std::uint8_t* tiers) const;
  Looked look_far(const Namespace& space, std::span<const Hash128> keys, std::uint8_t* tiers,
                  const Reach& reach, Miss& why) const;
  std::size_t get_part(const Namespace& space, std::span<const Hash128> keys, BlockSink& sink,
                       Loaded& loaded, const Reach& reach = {});
  std::size_t acquire_part(const Namespace& space, std::span<const Hash128> keys, Lease* leases,
                           Loaded& loaded, const Reach& reach = {});
  // Takes the keys away; those pinned keep their bytes until released. Returns how many there were.
  std::size_t remove(const Namespace& space, std::span<const Hash128> keys);

  // Sleeps until all keys are present, the deadline has come, the pool closes or `given_up` says so
  // (asked every kAskEvery at least); woken by commits. Returns how many leading ones are present.
  // At most kWaitersMax wait at a time; one more gets its answer at once.
  std::size_t wait(const Namespace& space, std::span<const Hash128> keys, Deadline deadline,
                   const std::function<bool()>& given_up);

  // Who is asked for what is not here; nullptr: nobody. Calls under way go on with the one before,
  // until their deadline. Clients of this host see whether there is one.
  void set_elsewhere(std::shared_ptr<Elsewhere> elsewhere);
  // In place of NodeOptions::far_timeout.
  void set_far_timeout(std::chrono::milliseconds timeout) { far_timeout_ = timeout; }
  bool has_elsewhere() const { return has_elsewhere_.load(std::memory_order_acquire); }

  // Clients of this host that read index and arena themselves. From attach() until detach() what
  // the page names is pinned and what it reports is counted; the page must outlive that.
  Result<int> open_arena() const { return store_->arena().open_read_only(); }
  Result<int> open_index() const { return store_->index_memory().open_read_only(); }
  std::uint64_t index_bytes() const { return store_->index_memory().bytes(); }
  void attach(ClientPage& page, ClientLimit limit = {});
  void detach(ClientPage& page);
  // What an attached client has read by itself until now.
  ClientTotals client_totals(const ClientPage& page);

  // New limits; growing is at once, shrinking evicts. Returns the memory committed when it is done
  // or the deadline has come; the node's thread goes on after that.
  // nullopt leaves a limit as it is.
  Result<std::uint64_t> resize(std::optional<std::uint64_t> bytes,
                               std::optional<std::uint64_t> blocks_limit, Deadline deadline);
  // Gives free memory back to the system now.
  void trim();
  // Another capacity of the SSD tier, in bytes of all its files. Growing takes the room at once;
  // shrinking moves and evicts, and goes on after the deadline. Returns the capacity now.
  Result<std::uint64_t> resize_ssd(std::uint64_t capacity_bytes, Deadline deadline);
  // True: everything the SSD tier should have, it has; what could not be written before is tried
  // again. False: the deadline came first, something could not be written, or the tier takes no
  // more writes.
  bool flush(Deadline deadline);

  const std::byte* arena() const { return store_->arena().base(); }
  std::uint64_t arena_bytes() const { return store_->arena().bytes(); }
  const Arena& memory() const { return store_->arena(); }
  std::byte* slot(const Ticket& ticket) { return store_->arena().base() + ticket.offset; }
  NodeStats stats();
  // Of every namespace there ever was, by number.
  std::vector<SpaceTraffic> traffic();

  // --- for those who ask about blocks; node_observe.cc ---
  struct Explained {
    Store::Explained block;
    double ago_s = 0;  // since it left, where `block.gone` says so
  };
  // One per key. Changes nothing: neither heat nor order. The lock is let go between pieces.
  std::vector<Explained> explain(const Namespace& space, std::span<const Hash128> keys);
  // Heat of the block in DRAM that would leave next; nullopt: nothing can.
  std::optional<double> coldest_heat();
  // The ends of prefixes in use, hottest first, at most kHottestMax; see node/hot_prefixes.h. Takes
  // some 0.3 us a block, in pieces under 1 ms each, and 4 bytes a block meanwhile.
  static constexpr std::size_t kHottestMax = 1000;
  std::vector<HotPrefix> hottest(std::size_t count) { return ends(std::min(count, kHottestMax)); }
  // The same, as many as there are or so many.
  std::vector<HotPrefix> ends(std::size_t count);
  struct ReuseCurves {
    ReuseCurve all;
    std::vector<std::pair<std::uint32_t, ReuseCurve>> spaces;  // by Namespace::number
    std::uint64_t bytes = 0;                                   // memory that this takes
  };
  ReuseCurves reuse();

  // --- for those who tell others what is here; node_changes.cc ---
  // From now on changes are noted for one listener more, at most so many between two takes. It is
  // the node's until stop_listening(), and for these calls alone. nullptr: Listeners::kMax listen.
  Changes* listen(std::size_t changes_max, Hears hears = Hears::blocks);
  void stop_listening(Changes* listener);
  // What changed since the last take. False: some is lost, and only a walk tells what is here.
  bool take_changes(Changes* listener, std::vector<Change>& changes);
  // Another node came for it in vain. If it is not here indeed, that is noted once more: the one
  // that keeps the directory thinks otherwise, or did a moment ago.
  void deny(const Namespace& space, const Hash128& key);
  // A piece of the walk; the lock is held for it. False: that was the last.
  bool walk(ResidentWalk& walk, std::vector<Resident>& found);

  // --- for those who see to it that others have copies, and are asked to; node_copies.cc ---
  struct ChainBlock {
    Hash128 key;
    double heat = 0;
  };
  // The blocks that lead to this one, in the order of the chain, as far as they are here; the
  // leading ones of them, if they are more.
  std::vector<ChainBlock> chain_of(const Namespace& space, const Hash128& last, std::size_t most);
  // What a block that comes unasked would find.
  bool is_warm_copy(const Namespace& space, double heat);
  struct PullRequest {
    const Namespace& space;
    std::span<const Hash128> keys;  // in chain order
    std::size_t first = 0;          // those before it only say what comes before
    double heat = 0;                // where they come from
    Deadline deadline;
  };
  // Fetches what is not here, as nobody's use of it. Returns how many came to stay; `why`: not all
  // are here now.
  std::size_t pull(const PullRequest& request, Miss& why);
  // Nobody else has these any more, as far as is known.
  void be_last(const Namespace& space, std::span<const Hash128> keys);

  std::optional<double> temperature(const Namespace& space, const Hash128& key);
  void check_invariants();
  FaultPoints& faults() { return *faults_; }
  // Waits until the node's thread has nothing left to do. For tests and benches.
  bool settle(Deadline deadline);

 private:
  struct Call;
  struct Fetch;
  class FarFetch;
  // One call that may have to ask other members.
  struct FarCall {
    const Namespace& space;
    std::span<const Hash128> keys;  // of the whole call
    const Reach& reach;
    std::shared_ptr<Elsewhere> elsewhere{};
    Deadline deadline{};
    int tries = kFarTries;  // that bring nothing, others being quicker
    double heat = 0;        // of the blocks where they come from; 0: not known
    bool is_late() const;
  };
  struct FarWindow {
    std::shared_ptr<FarFetch> fetch{};
    std::size_t first = 0;  // the part that was asked for
    bool is_own = false;
  };
  struct Attached;
  struct Waiter;
  using Lock = std::unique_lock<std::mutex>;
  using GivenUp = std::function<bool()>;
  static constexpr int kFarTries = 16;
  // From so many bytes on a group goes out at once; smaller ones wait kLinger for company.
  static constexpr std::uint64_t kGroupBytes = 16ull << 20;
  // Of a put that will wait for it: the disk starts while the rest is being copied.
  static constexpr std::uint64_t kDurableGroupBytes = 4ull << 20;

  Node(const NodeOptions& options, std::unique_ptr<Store> store, std::shared_ptr<const Clock> clock,
       std::unique_ptr<FaultPoints> faults);
  void start_threads();

  PutStatus reserve_locked(Lock& lock, const PutRequest& request, const Hash128& key,
                           Store::Reserved& reserved);
  PutStatus try_reserve(const PutRequest& request, Ticket& ticket);
  PutStatus try_commit(const Ticket& ticket, const Hash128& sum, Deadline deadline);
  PutStatus store_block(Lock& lock, Call& call, std::size_t index, BlockSource& source);
  void note_refused(const PutRequest& request, std::size_t from, const PutStatus* statuses);
  bool back_with_pages(const Store::Reserved& reserved);
  enum class Got : std::uint8_t { whole, missing, on_ssd };
  Got get_one(const Namespace& space, const Hash128& key, std::size_t index, BlockSink& sink,
              Found& found, Miss& why);
  bool get_pinned(const Namespace& space, const Hash128& key, std::size_t index, BlockSink& sink,
                  Found& found);
  // node_fetch.cc
  // `why`: Miss::none = in DRAM by now, or gone: look again.
  std::size_t get_from_ssd(const Namespace& space, std::span<const Hash128> keys, std::size_t index,
                           BlockSink& sink, Miss& why);
  std::size_t lease_from_ssd(const Namespace& space, std::span<const Hash128> keys, Lease* leases,
                             Miss& why);
  Lease leased(BlockId record, std::uint32_t bytes, std::uint64_t offset) const;
  std::shared_ptr<Fetch> start_fetch(const Namespace& space, std::span<const Hash128> keys,
                                     std::size_t index, bool into_dram);
  void choose_parts(Fetch& fetch, const Namespace& space, std::span<const Hash128> keys);
  void find_places(Lock& lock, Fetch& fetch, bool into_dram);
  bool end_fetch(const std::shared_ptr<Fetch>& fetch);
  void settle_fetch(Fetch& fetch);
  void release_fetch(Fetch& fetch, std::size_t leased);

  // node_elsewhere.cc
  std::shared_ptr<Elsewhere> elsewhere() const;
  Deadline far_deadline(const Reach& reach) const;
  // `why`: Miss::none = here by now: look again.
  std::size_t get_from_elsewhere(FarCall& call, std::size_t done, BlockSink& sink, Miss& why);
  std::size_t lease_from_elsewhere(FarCall& call, std::size_t done, Lease* leases, Miss& why);
  bool may_go_far(FarCall& call) const;
  FarWindow far_fetch(FarCall& call, std::size_t done, bool into_dram, Miss& why);
  FarWindow join_far(Lock& lock, const FarCall& call, std::shared_ptr<FarFetch> fetch,
                     const Hash128& key, Miss& why);
  bool choose_far_keys(const std::shared_ptr<FarFetch>& fetch, std::span<const Hash128> keys);
  bool get_if_here(const FarCall& call, std::size_t index, BlockSink& sink);
  Miss why_not(const FarCall& call, const FarWindow& window, std::size_t part) const;
  bool find_far_room(FarFetch& fetch, std::size_t index);
  void keep_far_leading(Lock& lock, FarFetch& fetch);
  void keep_far_part(FarFetch& fetch, std::size_t index);
  void settle_far(FarFetch& fetch);
  void wake_far();
  void release_far(FarFetch& fetch, std::size_t leased);

  // node_ssd.cc
  Result<void> attach(std::unique_ptr<Ssd> tier);
  void write_back();
  void delete_forgotten();
  bool write_group(Lock& lock);
  void make_group(Lock& lock, WriteBack& batch);
  Store::GroupLimits group_limits() const;
  void prepare_payload(WriteBack& batch, std::vector<Bounce>& bounces);
  void carry_out_resize(Lock& lock);
  void sync_index(Lock& lock);
  bool write_queued(Lock& lock, Deadline deadline);
  void write_last_stamps(Lock& lock);
  // When whoever waits looks again whether it should.
  static Deadline next_look(Deadline deadline, const GivenUp& given_up) {
    if (!given_up) return deadline;
    return std::min(deadline, std::chrono::steady_clock::now() + kAskEvery);
  }
  void wait_until_durable(Lock& lock, std::span<const BlockId> records, Deadline deadline,
                          const GivenUp& given_up, PutStatus* statuses);
  void close_ssd(Deadline flush_until);
  void add_ssd_stats(NodeStats& stats);
  void take_client_traffic(Attached& client);
  void add_traffic(NodeStats& stats, std::span<Namespace* const> spaces) const;
  bool is_durable() const {
    return tier_ != nullptr && options_.ssd.durability == Durability::durable;
  }
  void wake_writer() { write_work_.notify_one(); }
  // Under the lock: what is queued goes out at once. Until it is gone, so does the tier not go.
  class Urgent {
   public:
    explicit Urgent(Node& node) : node_(node) {
      ++node_.urgent_;
      node_.wake_writer();
    }
    ~Urgent() {
      --node_.urgent_;
      if (node_.writer_ends_) node_.written_.notify_all();
    }
    Urgent(const Urgent&) = delete;
    Urgent& operator=(const Urgent&) = delete;

   private:
    Node& node_;
  };

  void report_touches(std::span<const Found> found);
  void drain_touches();
  bool drain_clients(Lock& lock);
  void hold_to_limit(Attached& client);
  void announce(const Namespace& space, const Hash128& key);
  void wake_waiters();
  bool sleep_until_due(Lock& lock, Waiter& waiter, Deadline deadline, const GivenUp& given_up);

  void let_others_in(Lock& lock);
  void kick();  // under the lock
  void keep();
  bool tend(Lock& lock);
  bool wants_warming() const;
  bool warm(Lock& lock);
  void warm_beside();
  void commit_units(std::uint64_t offset, std::uint64_t bytes, bool& ok);

  const NodeOptions options_;
  const std::shared_ptr<const Clock> clock_;
  ForkGuard fork_guard_;
  const std::unique_ptr<FaultPoints> faults_;

  mutable std::mutex mutex_;  // guards store_ (but for what readers map) and the fields below
  std::unique_ptr<Store> store_;
  std::condition_variable settled_;  // a reservation ended, or a resize made progress
  std::condition_variable work_;     // wakes the node's thread
  bool stopping_ = false, kicked_ = false, idle_ = false, clients_busy_ = false;
  std::uint32_t warming_threads_ = 0;
  std::uint64_t touches_lost_ = 0, evicted_ahead_ = 0;

  std::vector<std::unique_ptr<Changes>> listening_;

  std::unique_ptr<Ssd> tier_;
  std::condition_variable write_work_;  // wakes the writer
  std::condition_variable written_;     // a group ended, the tier closed, or a fetch did
  bool ssd_open_ = false, writer_ends_ = false, group_under_way_ = false;
  std::uint64_t settled_before_ = 1;  // ticket of the queue: what came before is written, or not
  std::uint32_t urgent_ = 0;          // who waits for a commit
  std::uint64_t queued_bytes_ = 0;    // since the last group, about
  std::uint64_t resize_ssd_to_ = 0;
  std::uint64_t syncs_asked_ = 0, syncs_done_ = 0;  // of the index, in order
  std::optional<Result<void>> ssd_resized_;
  std::uint32_t fetches_ = 0;
  std::uint64_t ssd_stale_reads_ = 0;  // took a slot for damaged that was another block's by then
  std::thread writer_;
  BouncePool bounces_;

  // What is being fetched from other members, by key: once at a time.
  struct FarKey {
    Hash128 key;
    std::uint32_t incarnation;
    friend bool operator==(const FarKey&, const FarKey&) = default;
  };
  struct FarHash {
    std::size_t operator()(const FarKey& k) const { return fingerprint(k.incarnation, k.key); }
  };
  std::unordered_map<FarKey, std::shared_ptr<FarFetch>, FarHash> far_;
  std::shared_ptr<Elsewhere> elsewhere_;
  std::atomic<bool> has_elsewhere_{false};  // as elsewhere_, for those without the lock
  std::atomic<std::chrono::milliseconds> far_timeout_{options_.far_timeout};
  FarCounters far_counters_;

  // Who sleeps in wait(), by the key of the first block that it misses.
  struct Waiter {
    std::condition_variable came;
    bool is_due = false;
  };
  std::unordered_multimap<std::uint64_t, Waiter*> waiters_;
  struct Attached {
    ClientPage* page = nullptr;
    ClientLimit limit;
    std::optional<Deadline> over_since;  // it names more than it may
    std::unique_ptr<PageTraffic> traffic = std::make_unique<PageTraffic>();
    ClientTotals totals;
  };
  std::vector<Attached> attached_;
  std::uint64_t clients_ended_ = 0;  // for naming too much
  ClientTotals clients_read_;        // all that ever were
  Traffic nameless_;                 // of clients, in namespaces that they had no row for

  IndexReader reader_;
  TouchRing touches_;
  std::atomic<bool> closed_{false};
  std::atomic<int> slow_units_{0};  // huge pages that took too long, in a row
  std::atomic<std::uint64_t> huge_units_{0};
  std::atomic<std::uint64_t> ssd_hits_{0}, ssd_hit_bytes_{0}, ssd_timeouts_{0}, not_durable_{0};
  std::vector<std::thread> threads_;
};

}  // namespace kvpool
