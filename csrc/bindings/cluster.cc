// A node's part in a cluster, for the daemon: it says who the members are, and dials them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <unistd.h>

#include <random>
#include <utility>

#include "bindings/bind.h"
#include "bindings/gil.h"
#include "bindings/handles.h"
#include "bindings/memory.h"
#include "cluster/cluster.h"
#include "net/server.h"

namespace kvpool {
namespace {

using nb::literals::operator""_a;

using ClusterHandle = std::shared_ptr<Cluster>;
using ServerHandle = std::shared_ptr<Server>;
using Facts = nb::typed<nb::dict, nb::str, nb::any>;
using Vote = nb::typed<nb::tuple, nb::bytes, nb::int_, nb::int_, nb::bool_>;
using Wanted = nb::typed<nb::tuple, nb::bytes, nb::int_>;
using Ids = nb::typed<nb::list, nb::bytes>;

constexpr std::uint64_t kAnyNumber = ~std::uint64_t{0};
constexpr std::uint64_t kDirectoryBytesMin = 64ull << 10, kDirectoryBytesMax = 1ull << 40;
constexpr std::uint64_t kStreamsMin = 2, kStreamsMax = 64;  // one of them for short requests
constexpr std::size_t kLocatedMax = 1 << 20;                // keys of one call

// --- arguments -----------------------------------------------------------------------------------

std::uint64_t number_of(nb::handle object, const std::string& name, std::uint64_t least,
                        std::uint64_t most) {
  if (!PyLong_Check(object.ptr()))
    raise_bad_type(name + " is " + Py_TYPE(object.ptr())->tp_name + "; it must be an int");
  const std::uint64_t value = PyLong_AsUnsignedLongLong(object.ptr());
  const bool is_out = PyErr_Occurred() != nullptr;
  if (is_out) PyErr_Clear();
  if (is_out || value < least || value > most)
    raise_bad_argument(name + " is " + nb::str(object).c_str() + "; it must be " +
                       std::to_string(least) + ".." + std::to_string(most));
  return value;
}

Hash128 id_in(nb::handle object, const std::string& name) {
  if (!PyBytes_Check(object.ptr()))
    raise_bad_type(name + " is " + Py_TYPE(object.ptr())->tp_name + "; it must be bytes");
  const auto size = static_cast<std::size_t>(PyBytes_GET_SIZE(object.ptr()));
  if (size != kHashBytes)
    raise_bad_argument(name + " has " + std::to_string(size) + " bytes; it must have 16");
  return Hash128::from_bytes(PyBytes_AS_STRING(object.ptr()));
}

std::chrono::milliseconds time_in(nb::handle seconds, const char* name) {
  const double value = PyFloat_AsDouble(seconds.ptr());
  if (value == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    raise_bad_type(std::string(name) + " is " + Py_TYPE(seconds.ptr())->tp_name +
                   "; it must be a number of seconds");
  }
  if (!(value >= 0.001 && value <= kTimeoutMaxSeconds))
    raise_bad_argument(std::string(name) + " is " + std::to_string(value) +
                       " s; it must be 0.001..86400");
  return std::chrono::milliseconds(static_cast<std::int64_t>(value * 1000));
}

nb::bytes bytes_of(const Hash128& id) {
  char packed[kHashBytes];
  id.to_bytes(packed);
  return nb::bytes(packed, sizeof packed);
}

ClusterMember member_in(nb::handle object, std::size_t index) {
  const std::string which = "members[" + std::to_string(index) + "]";
  if (!PyTuple_Check(object.ptr()))
    raise_bad_type(which + " is " + Py_TYPE(object.ptr())->tp_name + "; it must be a tuple");
  const auto parts = nb::borrow<nb::tuple>(object);
  if (parts.size() != 4)
    raise_bad_argument(which + " has " + std::to_string(parts.size()) +
                       " items; it must have 4: id, incarnation, weight, is_draining");
  if (!PyBool_Check(nb::handle(parts[3]).ptr()))
    raise_bad_type("is_draining of " + which + " is " +
                   Py_TYPE(nb::handle(parts[3]).ptr())->tp_name + "; it must be a bool");
  return {.id = id_in(parts[0], "the id of " + which),
          .incarnation = number_of(parts[1], "the incarnation of " + which, 1, kAnyNumber),
          .weight = static_cast<std::uint32_t>(
              number_of(parts[2], "the weight of " + which, 1, kWeightMax)),
          .is_draining = nb::handle(parts[3]).is(Py_True)};
}

// A socket that nobody has taken over yet.
struct Unused {
  int descriptor;
  ~Unused() {
    if (descriptor >= 0) ::close(descriptor);
  }
};

// --- calls ---------------------------------------------------------------------------------------

ClusterHandle open(const NodeHandle& node, nb::handle node_id, nb::handle incarnation,
                   nb::handle directory_bytes, nb::handle streams_per_peer,
                   nb::handle fetch_timeout_s, nb::handle locate_timeout_s, nb::handle max_replicas,
                   nb::handle replica_bytes_per_s) {
  usable(node);
  std::random_device random;
  ClusterOptions options;
  options.id = id_in(node_id, "node_id");
  options.incarnation = number_of(incarnation, "incarnation", 1, kAnyNumber);
  options.directory.bytes_max =
      number_of(directory_bytes, "directory_bytes", kDirectoryBytesMin, kDirectoryBytesMax);
  options.directory.salt = std::uint64_t{random()} << 32 | random();
  options.peers.streams = number_of(streams_per_peer, "streams_per_peer", kStreamsMin, kStreamsMax);
  options.fetch_max = time_in(fetch_timeout_s, "fetch_timeout_s");
  options.finder.locate_max = time_in(locate_timeout_s, "locate_timeout_s");
  options.replicas.max_replicas =
      static_cast<std::uint32_t>(number_of(max_replicas, "max_replicas", 1, kHoldersPerKey));
  options.replicas.bytes_per_s = options.pulls.bytes_per_s =
      number_of(replica_bytes_per_s, "replica_bytes_per_s", 1 << 20, 1ull << 40);
  auto cluster = value_or_raise([&] {
    const GilReleased released;
    return Cluster::open(node, options);
  }());
  // Its thread may hold a lock that a caller of Python waits for. In a child it has no threads.
  return {cluster.release(), [node](Cluster* c) {
            if (node->is_forked()) return;
            const GilReleased released;
            delete c;
          }};
}

void serve(const ClusterHandle& cluster, const ServerHandle& server) {
  value_or_raise(usable(cluster).serve(server));
}

void set_members(const ClusterHandle& cluster, const nb::typed<nb::list, Vote>& members) {
  Cluster& told = usable(cluster);
  std::vector<ClusterMember> view;
  view.reserve(members.size());
  for (std::size_t i = 0; i < members.size(); ++i) view.push_back(member_in(members[i], i));
  value_or_raise([&] {
    const GilReleased released;
    return told.set_members(view);
  }());
}

std::string open_ucx(const ClusterHandle& cluster, const std::string& transports,
                     const std::string& devices, const std::string& library,
                     const std::vector<std::pair<std::string, std::string>>& settings,
                     bool is_unchecked) {
  Cluster& told = usable(cluster);
  const UcxOptions options{.library = library,
                           .transports = transports,
                           .devices = devices,
                           .settings = settings,
                           .takes_unchecked = is_unchecked};
  return value_or_raise([&] {
    const GilReleased released;
    return told.open_lane(options);
  }());
}

nb::bytes ucx_address(const ClusterHandle& cluster) {
  const std::vector<std::byte> address = usable(cluster).lane_address();
  return nb::bytes(address.data(), address.size());
}

void add_stream(const ClusterHandle& cluster, nb::handle id, nb::handle incarnation, int descriptor,
                const nb::bytes& ucx) {
  if (descriptor < 0)
    raise_bad_argument("descriptor is " + std::to_string(descriptor) + "; it must be an open one");
  Unused unused{descriptor};
  Cluster& told = usable(cluster);
  const Hash128 member = id_in(id, "id");
  const std::uint64_t life = number_of(incarnation, "incarnation", 1, kAnyNumber);
  const int number = std::exchange(unused.descriptor, -1);
  const auto* const lane = static_cast<const std::byte*>(ucx.data());
  const std::vector<std::byte> address(lane, lane + ucx.size());
  value_or_raise([&] {
    const GilReleased released;
    return told.add_stream(member, life, number, address);
  }());
}

void note_failed(const ClusterHandle& cluster, nb::handle id, nb::handle incarnation) {
  const Hash128 member = id_in(id, "id");
  const std::uint64_t life = number_of(incarnation, "incarnation", 1, kAnyNumber);
  Cluster& told = usable(cluster);
  const GilReleased released;
  told.note_failed(member, life);
}

nb::typed<nb::list, Wanted> wait_wanted(const ClusterHandle& cluster, nb::handle timeout_s) {
  const auto deadline = deadline_after(timeout_s);
  std::vector<WantedStream> wanted;
  if (!cluster->is_forked()) {
    const GilReleased released;
    wanted = cluster->wait_wanted(deadline);
  }
  nb::typed<nb::list, Wanted> list;
  for (const WantedStream& each : wanted)
    list.append(nb::make_tuple(bytes_of(each.id), each.count));
  return list;
}

bool drain(const ClusterHandle& cluster, nb::handle timeout_s) {
  const auto deadline = deadline_after(timeout_s);
  Cluster& told = usable(cluster);
  const GilReleased released;
  return told.drain(deadline);
}

nb::typed<nb::list, Ids> locate(const ClusterHandle& cluster, nb::handle space_id,
                                nb::handle keys_object, nb::handle timeout_s) {
  Cluster& asked = usable(cluster);
  const Hash128 space = id_in(space_id, "space_id");
  const Keys keys(keys_object, Keys::Hold::copied);
  if (keys.count() > kLocatedMax)
    raise_bad_argument("keys are " + std::to_string(keys.count()) + "; there can be at most " +
                       std::to_string(kLocatedMax) + " in a call");
  const auto deadline = deadline_after(timeout_s);
  const Cluster::Holders found = [&] {
    const GilReleased released;
    return asked.locate(space, keys.span(), deadline);
  }();
  nb::typed<nb::list, Ids> list;
  for (const auto& holders : found.of) {
    Ids each;
    for (const Hash128& id : holders) each.append(bytes_of(id));
    list.append(each);
  }
  return list;
}

bool leave(const ClusterHandle& cluster, nb::handle timeout_s) {
  const auto deadline = deadline_after(timeout_s);
  Cluster& told = usable(cluster);
  const GilReleased released;
  return told.leave(deadline);
}

bool close(const ClusterHandle& cluster, nb::handle timeout_s) {
  const auto deadline = deadline_after(timeout_s);
  if (cluster->is_forked()) return true;
  const GilReleased released;
  return cluster->close(deadline);
}

// --- facts ---------------------------------------------------------------------------------------

void tell_shard(Facts& d, const ShardStats& shard) {
  d["directory_keys"] = shard.directory.entries;
  d["directory_bytes"] = shard.directory.bytes;
  d["directory_bytes_max"] = shard.directory.bytes_max;
  d["directory_bytes_per_key"] = shard.directory.bytes_per_key;
  d["directory_members"] = shard.members;
  d["directory_evicted"] = shard.directory.evicted;
  d["directory_crowded"] = shard.directory.crowded;
  d["directory_late"] = shard.directory.late;
  d["heard_published"] = shard.published;
  d["heard_withdrawn"] = shard.withdrawn;
  d["heard_located"] = shard.located;
  d["heard_batches"] = shard.batches;
  d["heard_repeated"] = shard.repeated;
  d["heard_gaps"] = shard.gaps;
  d["heard_stale"] = shard.stale;
  d["heard_full"] = shard.refused_full;
}

void tell_publisher(Facts& d, const PublisherStats& publisher, const WireStats& wire) {
  d["told_owners"] = publisher.owners;
  d["told_owners_anew"] = publisher.owners_anew;
  d["told_owners_paused"] = publisher.owners_paused;
  d["told_queued"] = publisher.queued;
  d["told_published"] = publisher.published;
  d["told_withdrawn"] = publisher.withdrawn;
  d["told_batches"] = publisher.batches;
  d["told_retries"] = publisher.retries;
  d["told_gaps"] = publisher.gaps;
  d["told_begun_anew"] = publisher.begun_anew;
  d["told_overflows"] = publisher.overflows;
  d["told_lost"] = publisher.lost;
  d["told_rounds"] = publisher.rounds;
  d["told_announced"] = publisher.announced;
  d["wire_batches"] = wire.batches;
  d["wire_keys"] = wire.keys;
  d["wire_bytes"] = wire.bytes;
  d["wire_unreached"] = wire.unreached;
  d["wire_refused"] = wire.refused;
}

void tell_copies(Facts& d, const ClusterStats& s) {
  d["replica_searches"] = s.replicas.searches;
  d["replica_hot"] = s.replicas.hot;
  d["replica_paused"] = s.replicas.paused;
  d["replica_under_way"] = s.replicas.under_way;
  d["replica_asked"] = s.replicas.asked;
  d["replica_asked_bytes"] = s.replicas.asked_bytes;
  d["replica_blocks"] = s.replicas.copied_blocks;
  d["replica_bytes"] = s.replicas.copied_bytes;
  d["replica_busy"] = s.replicas.busy;
  d["replica_too_cold"] = s.replicas.too_cold;
  d["replica_no_room"] = s.replicas.no_room;
  d["replica_refused"] = s.replicas.refused;
  d["replica_unanswered"] = s.replicas.unanswered;
  d["replica_given_up"] = s.replicas.given_up;
  d["pull_asked"] = s.pulls.asked;
  d["pull_taken"] = s.pulls.taken;
  d["pull_queued"] = s.pulls.queued;
  d["pull_busy"] = s.pulls.busy;
  d["pull_too_cold"] = s.pulls.too_cold;
  d["pull_no_room"] = s.pulls.no_room;
  d["pull_refused"] = s.pulls.refused;
  d["pull_blocks"] = s.pulls.blocks;
  d["pull_bytes"] = s.pulls.bytes;
  d["pull_missed"] = s.pulls.missed;
  d["drain_running"] = s.drain.is_running;
  d["drain_over"] = s.drain.is_over;
  d["drain_prefixes"] = s.drain.prefixes;
  d["drain_prefixes_left"] = s.drain.prefixes_left;
  d["drain_blocks"] = s.drain.moved_blocks;
  d["drain_bytes"] = s.drain.moved_bytes;
  d["drain_refused_blocks"] = s.drain.refused_blocks;
}

// Closed or not.
void require_parent(const ClusterHandle& cluster) {
  if (cluster->is_forked()) usable(cluster);
}

Facts stats(const ClusterHandle& cluster) {
  require_parent(cluster);
  const ClusterStats s = [&] {
    const GilReleased released;
    return cluster->stats();
  }();
  Facts d;
  d["views"] = s.views;
  d["members"] = s.members;
  d["voters"] = s.voters;
  d["slots_owned"] = s.slots_owned;
  d["owners"] = s.owners;
  d["is_member"] = s.is_member;
  d["has_left"] = s.has_left;
  d["is_told"] = s.is_told;
  d["is_closed"] = cluster->is_closed();
  d["turns"] = s.turns;
  d["calls_inside"] = s.calls_inside;
  d["streams_refused"] = s.streams_refused;
  tell_shard(d, s.shard);
  tell_publisher(d, s.publisher, s.wire);
  tell_copies(d, s);
  d["finds"] = s.finder.finds;
  d["fetches"] = s.finder.fetches;
  d["locate_rounds"] = s.finder.rounds;
  d["locate_keys"] = s.finder.round_keys;
  d["locate_late"] = s.finder.late_rounds;
  d["ucx_open"] = s.has_lane;
  d["ucx_whole"] = s.lane.whole;
  d["ucx_damaged"] = s.lane.damaged;
  d["ucx_failed"] = s.lane.failed;
  d["ucx_bytes"] = s.lane.bytes;
  d["ucx_late"] = s.lane.late;
  d["ucx_errors"] = s.lane.errors;
  d["ucx_used_bytes"] = s.lane_used;
  d["hints_kept"] = s.finder.cached_keys;
  d["hints_stale"] = s.finder.stale;
  return d;
}

const char* name_of(BreakerState state) {
  switch (state) {
    case BreakerState::closed:
      break;
    case BreakerState::open:
      return "open";
    case BreakerState::half_open:
      return "half_open";
  }
  return "closed";
}

const char* name_of(FarState state) {
  switch (state) {
    case FarState::none:
      break;
    case FarState::unused:
      return "unused";
    case FarState::open:
      return "open";
    case FarState::broken:
      return "broken";
  }
  return "none";
}

Facts facts_of(const ClusterPeer& peer) {
  const PeerStats& s = peer.stats;
  Facts d;
  d["id"] = bytes_of(s.id);
  d["incarnation"] = peer.incarnation;
  d["draining"] = peer.is_draining;
  d["streams"] = s.streams;
  d["breaker"] = name_of(s.breaker);
  d["latency_us"] = s.latency_s * 1e6;
  d["in_flight_bytes"] = s.in_flight_bytes;
  d["requests"] = s.requests;
  d["failed"] = s.failures;
  d["opened"] = s.opened;
  d["refused_open"] = s.refused_open;
  d["hurried"] = s.hurried;
  d["fetched_blocks"] = s.fetched_blocks;
  d["bytes_in"] = s.fetched_bytes;
  d["damaged"] = s.damaged;
  d["stale"] = s.stale;
  d["ucx"] = name_of(s.far.state);
  d["ucx_blocks"] = s.far.blocks;
  d["ucx_bytes"] = s.far.bytes;
  d["ucx_failed"] = s.far.failures;
  d["ucx_given_up"] = s.far.blocks_given_up;
  d["ucx_trouble"] = s.far.trouble;
  return d;
}

nb::typed<nb::list, Facts> peers(const ClusterHandle& cluster) {
  require_parent(cluster);
  const std::vector<ClusterPeer> all = [&] {
    const GilReleased released;
    return cluster->peers();
  }();
  nb::typed<nb::list, Facts> list;
  for (const ClusterPeer& peer : all) list.append(facts_of(peer));
  return list;
}

}  // namespace

void bind_cluster(nb::module_& m) {
  nb::class_<Cluster>(m, "Cluster",
                      "A node's part in a cluster: its shard of the directory, its peers, what it\n"
                      "tells them and fetches from them. Thread-safe; see cluster/cluster.h.")
      .def_static("open", &open, "node"_a, "node_id"_a, "incarnation"_a, nb::kw_only(),
                  "directory_bytes"_a = 64ull << 20, "streams_per_peer"_a = 4,
                  "fetch_timeout_s"_a = 1.0, "locate_timeout_s"_a = 0.25, "max_replicas"_a = 2,
                  "replica_bytes_per_s"_a = 64ull << 20,
                  "The node serves alone until set_members(). Raises BadArgument, BadType.")
      .def("serve", &serve, "server"_a,
           "The server's streams of peers are answered from this shard, until close().")
      .def("set_members", &set_members, "members"_a,
           "The whole view, in any order, this node included if it is a member: (id, incarnation,\n"
           "weight, is_draining) of each. Releases the GIL; some 0.5 ms for each member.")
      .def("open_ucx", &open_ucx, "transports"_a, "devices"_a, "library"_a, "settings"_a,
           "is_unchecked"_a,
           "Members may read out of this node's memory, and it out of theirs, where both have\n"
           "opened this; docs/ucx.md. Before set_members(). Returns which library it is. Raises\n"
           "TierRefused where UCX is missing, BadArgument for an arena that is not sealed and for\n"
           "transports that check no remote key, unless is_unchecked. Releases the GIL.")
      .def_prop_ro("ucx_address", &ucx_address,
                   "What a member needs to read out of this node's memory; empty: it cannot.")
      .def("add_stream", &add_stream, "id"_a, "incarnation"_a, "descriptor"_a,
           "ucx"_a = nb::bytes("", 0),
           "A connection to that member, which serves it as a peer's, and what it said of its\n"
           "memory. The socket is the cluster's from here on, also on failure. One more than is\n"
           "wanted is closed.")
      .def("note_failed", &note_failed, "id"_a, "incarnation"_a,
           "That member could not be reached: it is asked nothing for a while.")
      .def("wait_wanted", &wait_wanted, "timeout_s"_a,
           "Members that more connections are wanted to, and how many; [] at the end of the time,\n"
           "and at once when it is closed. Each wish is told once. Releases the GIL.")
      .def("locate", &locate, "space_id"_a, "keys"_a, "timeout_s"_a,
           "Ids of the members that say that they have it, for each key; what was not answered in\n"
           "time is empty. Hints: blocks may have left since. Releases the GIL.")
      .def("stats", &stats)
      .def("peers", &peers, "What is known of every other member, and was got from it.")
      .def("drain", &drain, "timeout_s"_a,
           "What is warm here and at no other member is fetched by others, hottest first; then\n"
           "leave(). stats() says how far it is. False: not all of it in time. Releases the GIL.")
      .def("leave", &leave, "timeout_s"_a,
           "All members forget what this node has told, and it tells nothing any more. False:\n"
           "some were not reached in time. Releases the GIL.")
      .def("close", &close, "timeout_s"_a,
           "The node serves alone again. False: calls that were under way had not ended in time;\n"
           "what they use stays until they have. Releases the GIL.")
      .def_prop_ro("is_closed", [](const ClusterHandle& c) { return c->is_closed(); });
}

}  // namespace kvpool
