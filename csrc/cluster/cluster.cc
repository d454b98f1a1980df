#include "cluster/cluster.h"

#include <algorithm>
#include <utility>

#include "cluster/far_gate.h"
#include "net/server.h"

namespace kvpool {
namespace {

using std::chrono::steady_clock;

// For all who are told that this node leaves.
constexpr auto kFarewellMax = std::chrono::milliseconds(1000);
// Above all that this life of the node can have told: what comes after it changes nothing.
constexpr std::uint64_t kLastSequence = ~std::uint64_t{0};
// How often whoever has copies made looks what is to be done.
constexpr auto kCopiesEvery = std::chrono::milliseconds(20);
constexpr auto kLoadEvery = std::chrono::seconds(1);

SlotSet slots_in(const MemberView::Snapshot& view, const Hash128& id) {
  if (view.owners.table == nullptr) return {};
  const std::uint16_t voter = view.owners.table->index_of(id);
  return voter == OwnerTable::kNobody ? SlotSet() : view.owners.table->slots_of(voter);
}

}  // namespace

// What calls of the node use. They hold it, so that it goes with the last of them.
struct Cluster::Shared {
  Shared(const std::shared_ptr<Node>& node, const ClusterOptions& options)
      : shard(std::make_shared<DirectoryShard>(options.directory)),
        puller(std::make_shared<Puller>(node, options.pulls, steady_clock::now())),
        desk(std::make_shared<PeerDesk>(shard, puller)),
        peers(options.peers),
        finder(members, peers, shard.get(), options.finder),
        gate(finder),
        wire(members, peers, *shard),
        replicator({*node, members, peers, shard.get()}, options.replicas) {}

  const std::shared_ptr<DirectoryShard> shard;  // these three with the requests of peers
  const std::shared_ptr<Puller> puller;
  const std::shared_ptr<PeerDesk> desk;
  MemberView members;
  PeerBook peers;
  Finder finder;
  FarGate gate;
  PeerWire wire;
  Replicator replicator;
};

Cluster::Cluster(std::shared_ptr<Node> node, const ClusterOptions& options,
                 std::shared_ptr<Shared> shared)
    : node_(std::move(node)), options_(options), shared_(std::move(shared)) {}

Cluster::~Cluster() { close(steady_clock::now()); }

Result<std::unique_ptr<Cluster>> Cluster::open(std::shared_ptr<Node> node,
                                               const ClusterOptions& options) {
  if (node->has_elsewhere()) return fail(Code::refused, "this node is in another cluster already");
  auto shared = std::make_shared<Shared>(node, options);
  return std::unique_ptr<Cluster>(new Cluster(std::move(node), options, std::move(shared)));
}

Result<void> Cluster::serve(std::shared_ptr<Server> server) {
  const std::lock_guard lock(mutex_);
  if (is_closed()) return fail(Code::refused, "the cluster is closed");
  server->set_directory(shared_->desk);
  std::erase_if(servers_, [](const auto& known) { return known.expired(); });
  servers_.push_back(server);
  return {};
}

// --- members -------------------------------------------------------------------------------------

Result<void> Cluster::set_members(std::span<const ClusterMember> members) {
  std::vector<MemberInfo> infos;
  infos.reserve(members.size());
  for (const ClusterMember& each : members)
    infos.push_back({.id = each.id,
                     .incarnation = each.id == id() ? options_.incarnation : each.incarnation,
                     .weight = each.weight,
                     .addresses = {},
                     .state = each.is_draining ? MemberState::draining : MemberState::up,
                     .is_self = each.id == id()});
  const std::lock_guard lock(views_mutex_);
  if (is_closed()) return fail(Code::refused, "the cluster is closed");
  if (!view_ && node_->has_elsewhere())
    return fail(Code::refused, "this node is in another cluster already");
  if (auto set = shared_->members.set(std::move(infos)); !set) return set;
  const SnapshotPtr now = shared_->members.now();
  shared_->peers.set_members(*now);
  take_over(view_, now);
  if (!view_ && begin_telling()) {
    node_->set_far_timeout(options_.fetch_max);
    node_->set_elsewhere(std::shared_ptr<Elsewhere>(shared_, &shared_->gate));
  }
  view_ = now;
  return {};
}

// Peers are there before anything is told to them.
void Cluster::take_over(const SnapshotPtr& before, const SnapshotPtr& now) {
  std::vector<HolderName> names;
  for (const auto& member : now->members)
    names.push_back({member.info.id, member.info.incarnation});
  shared_->shard->set_members(names);
  if (before) shared_->shard->forget_slots(slots_in(*before, id()) & ~slots_in(*now, id()));

  OwnerView view = now->owners;
  view.incarnations.clear();
  // While this node was no member, all have forgotten it: to it they are as in another life.
  times_back_ += before && before->self == kNoMember && now->self != kNoMember;
  for (const MemberHandle voter : view.handles)
    view.incarnations.push_back(now->by_handle(voter)->info.incarnation + times_back_);
  const std::lock_guard lock(mutex_);
  if (!publisher_)
    publisher_ = std::make_unique<Publisher>(
        Publisher::Parts{*node_,
                         *shared_->shard,
                         shared_->wire,
                         {.node = id(), .incarnation = options_.incarnation}},
        options_.publisher);
  publisher_->set_view(std::move(view));
}

bool Cluster::begin_telling() {
  const std::lock_guard lock(mutex_);
  if (stopping_) return !is_closed();  // it has left: it may still ask
  thread_ = std::thread([this] { run(); });
  copies_ = std::thread([this] { run_copies(); });
  return true;
}

// The publisher's own thread would leave nobody to sweep.
void Cluster::run() {
  std::unique_lock lock(mutex_);
  Publisher& publisher = *publisher_;
  while (!stopping_) {
    lock.unlock();
    bool is_more = publisher.turn(steady_clock::now());
    is_more |= shared_->shard->sweep();
    turns_.fetch_add(1, std::memory_order_release);
    lock.lock();
    if (!is_more) woken_.wait_for(lock, options_.publisher.linger, [this] { return stopping_; });
  }
}

void Cluster::stop_telling() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  woken_.notify_all();
  shared_->puller->stop();
  shared_->replicator.stop();
  shared_->wire.hold(true);  // what is under way ends by its time
  std::thread over, copies_over;
  {
    const std::lock_guard lock(mutex_);
    over.swap(thread_);
    copies_over.swap(copies_);
  }
  if (over.joinable()) over.join();
  if (copies_over.joinable()) copies_over.join();
}

// --- copies --------------------------------------------------------------------------------------

void Cluster::run_copies() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    lock.unlock();
    const bool is_more = copy_some(steady_clock::now());
    lock.lock();
    if (!is_more) woken_.wait_for(lock, kCopiesEvery, [this] { return stopping_; });
  }
}

// True: another piece may be fetched at once.
bool Cluster::copy_some(steady_clock::time_point now) {
  if (now - load_at_ >= kLoadEvery) tell_load(now);
  shared_->replicator.turn(now);
  return shared_->puller->step(now);
}

// What peers learn of how much there is to do here.
void Cluster::tell_load(steady_clock::time_point now) {
  std::uint64_t sent = 0;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& each : servers_)
      if (const auto server = each.lock()) {
        sent += server->stats().bytes_out;
        server->expire_far_leases(now);
      }
  }
  const double passed = std::chrono::duration<double>(now - load_at_).count();
  // A server that is gone takes what it sent along.
  const double rate = sent > sent_ ? static_cast<double>(sent - sent_) / passed : 0;
  sent_per_s_ = (sent_per_s_ + rate) / 2;
  sent_ = sent;
  load_at_ = now;
  const NodeStats stats = node_->stats();
  const double taken = std::min(1.0, static_cast<double>(stats.bytes_taken) /
                                         static_cast<double>(std::max(stats.bytes_limit, 1ul)));
  shared_->desk->set_load(
      {.served_kib_s = static_cast<std::uint32_t>(std::min(sent_per_s_ / 1024, 4e9)),
       .taken = static_cast<std::uint16_t>(taken * 65535),
       .is_told = 1});
}

bool Cluster::drain(Deadline deadline) {
  bool is_drained = false;
  {
    const FarGate::Visit visit(shared_->gate);
    if (!visit) return false;
    {
      const std::lock_guard lock(views_mutex_);
      if (!view_ || view_->self == kNoMember) return false;
    }
    shared_->puller->stop();
    is_drained = shared_->replicator.drain(deadline);
  }
  return leave(std::max(deadline, steady_clock::now() + kFarewellMax)) && is_drained;
}

bool Cluster::leave(Deadline deadline) {
  const std::lock_guard lock(views_mutex_);
  if (is_closed()) return false;
  stop_telling();
  shared_->wire.hold(false);
  {
    const std::lock_guard own_lock(mutex_);
    has_left_ = true;
  }
  const Batch farewell{.from = {id(), options_.incarnation, kLastSequence},
                       .is_withdraw = false,
                       .is_fresh = true,
                       .keys = {}};
  std::vector<Wire::Parcel> parcels;
  if (view_)
    for (const MemberHandle voter : view_->owners.handles)
      parcels.push_back({.to = voter, .batch = farewell});
  const auto until = std::min(deadline, steady_clock::now() + kFarewellMax);
  bool are_told = true;
  while (!parcels.empty()) {
    shared_->wire.send_all(parcels, until);
    const bool is_late = steady_clock::now() >= until;
    std::erase_if(parcels, [&](const Wire::Parcel& each) {
      if (each.sent == Sent::busy && !is_late) return false;
      // Who begins another life, or has left, has forgotten it anyway.
      are_told &= each.sent == Sent::ok || each.sent == Sent::gone;
      return true;
    });
  }
  return are_told;
}

// --- peers ---------------------------------------------------------------------------------------

bool Cluster::is_known(const Hash128& id, std::uint64_t incarnation) const {
  const SnapshotPtr now = shared_->members.now();
  const MemberView::Member* member = now->by_id(id);
  return member != nullptr && member->info.incarnation == incarnation;
}

Result<std::string> Cluster::open_lane(const UcxOptions& options) {
  const std::lock_guard views_lock(views_mutex_);
  if (is_closed() || view_) return fail(Code::refused, "it is too late for a lane");
  auto opened = UcxLane::open(node_->memory(), options);
  if (!opened) return std::unexpected(opened.error());
  const std::string library = (*opened)->library();
  // The arena stays for as long as anybody has the lane.
  std::shared_ptr<UcxLane> lane((*opened).release(),
                                [node = node_](UcxLane* over) { delete over; });
  const std::uint64_t number = lane->number();
  const std::lock_guard lock(mutex_);
  reads_ = {std::move(lane), std::make_shared<Staging>()};
  shared_->peers.set_reads(reads_);
  shared_->desk->set_lane(number);
  return library;
}

std::vector<std::byte> Cluster::lane_address() const {
  const std::lock_guard lock(mutex_);
  if (reads_.lane == nullptr) return {};
  const auto address = reads_.lane->address();
  return {address.begin(), address.end()};
}

Result<void> Cluster::add_stream(const Hash128& id, std::uint64_t incarnation, int descriptor,
                                 std::span<const std::byte> lane) {
  const auto peer = !is_closed() && is_known(id, incarnation) ? shared_->peers.of(id) : nullptr;
  if (peer) return peer->add_stream(descriptor, lane);
  const Descriptor refused(descriptor);
  if (is_closed()) return fail(Code::refused, "the cluster is closed");
  streams_refused_.fetch_add(1, std::memory_order_relaxed);
  return fail(Code::refused, "no other member has this id and incarnation (any more)");
}

void Cluster::note_failed(const Hash128& id, std::uint64_t incarnation) {
  if (!is_known(id, incarnation)) return;
  if (const auto peer = shared_->peers.of(id)) peer->dial_failed();
}

std::vector<WantedStream> Cluster::wait_wanted(Deadline deadline) {
  return is_closed() ? std::vector<WantedStream>() : shared_->peers.wanted().wait(deadline);
}

std::vector<ClusterPeer> Cluster::peers() const {
  const SnapshotPtr now = shared_->members.now();
  std::vector<ClusterPeer> peers;
  for (const PeerStats& stats : shared_->peers.stats()) {
    const MemberView::Member* member = now->by_id(stats.id);
    if (member != nullptr)
      peers.push_back(
          {member->info.incarnation, member->info.state == MemberState::draining, stats});
  }
  return peers;
}

// --- asking --------------------------------------------------------------------------------------

Cluster::Holders Cluster::locate(const Hash128& space, std::span<const Hash128> keys,
                                 Deadline deadline) {
  Holders found{.of = std::vector<std::vector<Hash128>>(keys.size()), .why = Miss::absent};
  const FarGate::Visit visit(shared_->gate);
  if (!visit) return found;
  std::vector<DirectoryKey> names;
  names.reserve(keys.size());
  for (const Hash128& key : keys) names.push_back(make_directory_key(space, key));
  const SnapshotPtr now = shared_->members.now();
  std::vector<Whereabouts> located(keys.size());
  LocateRound round(*now, shared_->peers, shared_->shard.get());
  found.why = Miss::none;
  for (std::size_t done = 0; done < names.size(); done += request_of(names, done).size()) {
    const std::size_t some = request_of(names, done).size();
    const Miss why = round.run(std::span(names).subspan(done, some), deadline,
                               std::span(located).subspan(done, some));
    if (why != Miss::none) found.why = why;
  }
  const Namespace* own = node_->find_namespace(space);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (own != nullptr && node_->look(*own, keys.subspan(i, 1), nullptr).present == 1)
      found.of[i].push_back(id());
    for (const MemberHandle holder : located[i].holders) {
      const MemberView::Member* member = now->by_handle(holder);
      if (member != nullptr) found.of[i].push_back(member->info.id);
    }
  }
  return found;
}

// --- facts, end ----------------------------------------------------------------------------------

ClusterStats Cluster::stats() const {
  const SnapshotPtr now = shared_->members.now();
  ClusterStats stats{.views = now->version,
                     .members = now->members.size(),
                     .voters = now->owners.handles.size(),
                     .slots_owned = slots_in(*now, id()).count(),
                     .owners = now->owners.table ? now->owners.table->fingerprint() : 0,
                     .is_member = now->self != kNoMember,
                     .turns = turns_.load(std::memory_order_acquire),
                     .calls_inside = shared_->gate.inside(),
                     .streams_refused = streams_refused_.load(std::memory_order_relaxed),
                     .shard = shared_->shard->stats(),
                     .finder = shared_->finder.stats(),
                     .publisher = {},
                     .wire = shared_->wire.stats(),
                     .replicas = shared_->replicator.stats(),
                     .pulls = shared_->puller->stats(),
                     .drain = shared_->replicator.drain_stats(),
                     .lane = {}};
  const std::lock_guard lock(mutex_);
  stats.has_lane = reads_.lane != nullptr;
  if (stats.has_lane) {
    stats.lane = reads_.lane->totals();
    stats.lane_used = reads_.staging->used();
  }
  stats.has_left = has_left_;
  if (publisher_) stats.publisher = publisher_->stats();
  stats.is_told = publisher_ && !has_left_ && publisher_->is_done();
  return stats;
}

bool Cluster::close(Deadline deadline) {
  {
    // A view that is being taken up is in force before it ends.
    const std::lock_guard lock(views_mutex_);
    const bool was_closed = closed_.exchange(true, std::memory_order_acq_rel);
    if (!was_closed && view_) node_->set_elsewhere(nullptr);
    shared_->gate.shut();
    std::vector<std::weak_ptr<Server>> servers;
    {
      const std::lock_guard own_lock(mutex_);
      servers.swap(servers_);
    }
    for (const auto& each : servers)
      if (const auto server = each.lock()) server->set_directory(nullptr);
    shared_->peers.close();
    stop_telling();
    shared_->desk->set_lane(0);
    std::unique_ptr<Publisher> over;
    FarReads reads;  // the lane closes behind the lock: what reads through it fails
    const std::lock_guard own_lock(mutex_);
    over.swap(publisher_);
    std::swap(reads, reads_);
  }
  return shared_->gate.wait_empty(deadline);
}

}  // namespace kvpool
