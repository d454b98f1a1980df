// The node itself: opening, limits, facts, faults.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <thread>

#include "bindings/bind.h"
#include "bindings/gil.h"
#include "bindings/handles.h"
#include "bindings/memory.h"
#include "net/local_channel.h"

namespace kvpool {
namespace {

namespace nb = nanobind;
using nb::literals::operator""_a;

struct OpenRequest {
  std::uint64_t dram, dram_max, max_blocks;
  std::string policy, prefault;
  double tau_s, evict_ahead;
  bool huge_pages;
  std::uint64_t salt;
  bool sealed;
};

struct SsdRequest {
  std::string path;  // empty: no SSD
  std::uint64_t capacity, free_floor;
  std::string durability, admit;
  std::uint32_t io_threads;
  bool direct;
  double timeout_s;
};

template <typename Value>
Value chosen(const char* what, const std::string& name,
             std::initializer_list<std::pair<const char*, Value>> choices) {
  std::string known;
  for (const auto& [text, value] : choices) {
    if (name == text) return value;
    known += (known.empty() ? "" : ", ") + std::string(text);
  }
  raise_bad_argument(std::string(what) + " is '" + name + "'; it can be " + known);
}

void add_ssd(const SsdRequest& request, NodeOptions& options) {
  if (request.path.empty()) return;
  options.has_ssd = true;
  options.ssd.path = request.path;
  options.ssd.capacity_bytes = request.capacity;
  options.ssd.free_floor_bytes = request.free_floor;
  options.ssd.durability = chosen<Durability>("durability", request.durability,
                                              {{"async", Durability::async},
                                               {"durable", Durability::durable},
                                               {"relaxed", Durability::relaxed}});
  options.ssd_admit = chosen<SsdAdmit>(
      "ssd_admit", request.admit, {{"second_use", SsdAdmit::second_use}, {"all", SsdAdmit::all}});
  if (request.io_threads == 0 || request.io_threads > 256)
    raise_bad_argument("ssd_io_threads is " + std::to_string(request.io_threads) +
                       "; it must be 1..256");
  options.ssd.io_threads = request.io_threads;
  options.ssd.direct = request.direct;
  if (!(request.timeout_s > 0 && request.timeout_s <= 3600))
    raise_bad_argument("ssd_timeout is " + std::to_string(request.timeout_s) +
                       " s; it must be above 0 and at most 3600");
  options.ssd_timeout = std::chrono::milliseconds(
      std::max<std::int64_t>(1, static_cast<std::int64_t>(request.timeout_s * 1000)));
}

NodeOptions options_of(const OpenRequest& request) {
  NodeOptions options;
  options.store.bytes_limit = (request.dram + kUnitBytes - 1) / kUnitBytes * kUnitBytes;
  options.store.bytes_max = std::max(request.dram_max, options.store.bytes_limit);
  options.store.blocks_limit = request.max_blocks;
  options.store.tau_s = request.tau_s;
  options.store.salt = request.salt;
  options.evict_ahead = request.evict_ahead;
  options.huge_pages = request.huge_pages;
  options.store.sealed = request.sealed;
  options.warm_threads = std::clamp(std::thread::hardware_concurrency(), 1u, 8u);
  const auto kind = policy_kind(request.policy);
  if (!kind) raise_bad_argument("unknown policy '" + request.policy + "'");
  options.store.policy = *kind;
  if (request.prefault == "off")
    options.prefault = Prefault::off;
  else if (request.prefault == "ahead")
    options.prefault = Prefault::ahead;
  else if (request.prefault == "all")
    options.prefault = Prefault::all;
  else
    raise_bad_argument("prefault is '" + request.prefault + "'; it can be off, ahead, all");
  return options;
}

NodeHandle open_node(const OpenRequest& request, const SsdRequest& ssd,
                     std::shared_ptr<ManualClock> manual) {
  std::shared_ptr<const Clock> clock;
  if (manual)
    clock = std::move(manual);
  else
    clock = std::make_shared<SystemClock>();
  NodeOptions options = options_of(request);
  add_ssd(ssd, options);
  Result<std::unique_ptr<Node>> opened = [&] {
    const GilReleased released;  // a large SSD directory takes seconds to format or to read
    return Node::open(options, std::move(clock));
  }();
  auto node = value_or_raise(std::move(opened));
  // In a forked child the locks may be held and the threads are gone: leave everything as it is.
  return {node.release(), [](Node* n) {
            if (n->is_forked()) return;
            const GilReleased released;
            delete n;
          }};
}

// Beyond this, differences of a microsecond are lost in a double.
constexpr Seconds kClockMax = 1e12;

void set_clock(ManualClock& clock, double seconds) {
  if (!(seconds >= 0 && seconds <= kClockMax))
    raise_bad_argument("a time is 0 to 1e12 seconds, not " + std::to_string(seconds));
  clock.set(std::max(seconds, clock.now()));  // the GIL keeps others out in between
}

using Stats = nb::typed<nb::dict, nb::str, nb::any>;

void add_pool_stats(const NodeStats& s, Stats& d) {
  const auto add = [&](const char* name, std::uint64_t value) { d[name] = value; };
  add("blocks", s.blocks);
  add("blocks_limit", s.blocks_limit);
  add("blocks_reserved", s.reserved);
  add("blocks_pinned", s.pinned);
  add("blocks_removed_while_pinned", s.zombies);
  add("blocks_dropped_not_swept", s.dead);
  add("bytes_limit", s.bytes_limit);
  add("bytes_max", s.bytes_max);
  add("bytes_committed", s.bytes_committed);
  add("bytes_in_slabs", s.bytes_in_slabs);
  add("bytes_taken", s.bytes_taken);
  add("bytes_index_and_books", s.bytes_books);
  add("bytes_resident", s.bytes_arena);
  add("namespaces", s.namespaces);
  add("clients", s.clients);
  add("clients_waiting", s.waiting);
  add("clients_ended_for_pins", s.clients_ended);
  add("slots_held_for_views", s.held_slots);
  add("client_views", s.views);
  add("client_view_blocks", s.view_blocks);
  add("puts", s.store.puts);
  add("put_bytes", s.put_bytes);
  add("put_present", s.store.present);
  add("put_not_stored", s.not_stored);
  add("put_aborted", s.store.aborted);
  add("gets", s.gets);
  add("get_blocks", s.get_blocks);
  add("get_bytes", s.get_bytes);
  add("missed_absent", s.missed_absent);
  add("missed_moved", s.missed_moved);
  add("missed_fault", s.missed_fault);
  add("evictions", s.store.evictions);
  add("evicted_ahead", s.evicted_ahead);
  add("removed", s.store.removed);
  add("slabs_moved", s.store.slabs_moved);
  add("blocks_moved", s.store.blocks_moved);
  add("ghosts", s.policy.ghosts);
  add("ghost_hits", s.policy.ghost_hits);
  add("ghost_bytes", s.policy.ghost_bytes);
  add("touches_lost", s.touches_lost);
  add("units_warm", s.warm_units);
  add("units_huge", s.huge_units);
  d["tau_s"] = s.policy.tau_s;
}

// What other members of a cluster were asked for.
void add_far_stats(const NodeStats& s, Stats& d) {
  const auto add = [&](const char* name, std::uint64_t value) { d[name] = value; };
  add("far_fetches", s.far.fetches);
  add("far_joined", s.far.joined);
  add("far_blocks", s.far.blocks);
  add("far_bytes", s.far.bytes);
  add("far_kept", s.far.kept);
  add("far_aside", s.far.aside);
  add("far_too_cold", s.far.too_cold);
  add("far_missed", s.far.missed);
  add("far_timed_out", s.far.timed_out);
  add("far_fetching", s.far_fetching);
}

// The names are there without a tier too, so that a dashboard needs no case for it.
void add_ssd_stats(const NodeStats& s, Stats& d) {
  const auto add = [&](const char* name, std::uint64_t value) { d[name] = value; };
  add("demotions", s.store.demotions);
  add("evicted_unwritten", s.store.evicted_unwritten);
  add("promotions", s.store.promotions);
  add("not_durable", s.not_durable);
  add("ssd_blocks", s.ssd_blocks);
  add("ssd_capacity_bytes", s.ssd_facts.capacity_bytes);
  add("ssd_payload_bytes", s.ssd_facts.units * kUnitBytes);
  add("ssd_bytes_taken", s.ssd_bytes_taken);
  add("ssd_index_bytes", s.ssd_facts.index_bytes);
  add("ssd_index_used_bytes", s.ssd_facts.index_used_bytes);
  add("ssd_queue_blocks", s.ssd_queued);
  d["ssd_busy"] = s.ssd_busy;
  add("ssd_quarantined_blocks", s.ssd_quarantined);
  add("ssd_hits", s.ssd_hits);
  add("ssd_hit_bytes", s.ssd_hit_bytes);
  add("ssd_evictions", s.store.ssd_evictions);
  add("ssd_moved_blocks", s.store.ssd_moved);
  add("ssd_not_worth", s.store.not_worth);
  add("ssd_no_room", s.store.ssd_no_room);
  add("ssd_lost_blocks", s.store.ssd_lost);
  add("ssd_timeouts", s.ssd_timeouts);
  add("ssd_restored_blocks", s.store.restored);
  add("ssd_restored_orphans", s.store.restored_orphans);
  add("ssd_restored_hits", s.store.restored_hits);
  add("ssd_groups", s.ssd.groups);
  add("ssd_written_blocks", s.ssd.written_blocks);
  add("ssd_written_bytes", s.ssd.written_bytes);
  add("ssd_index_written_bytes", s.ssd.index_written_bytes);
  add("ssd_read_blocks", s.ssd.read_blocks);
  add("ssd_read_bytes", s.ssd.read_bytes);
  add("ssd_damaged", s.ssd.damaged);
  add("ssd_read_faults", s.ssd.read_faults);
  add("ssd_write_faults", s.ssd.write_faults);
  add("ssd_commit_faults", s.ssd.commit_faults);
  add("ssd_direct_refusals", s.ssd.direct_refusals);
  d["ssd_direct"] = s.ssd_facts.direct;
  d["ssd_buffered_reason"] = s.ssd_facts.why_not_direct;
  d["ssd_read_only"] = s.ssd_read_only;
  d["ssd_read_only_reason"] = s.ssd_read_only_reason;
}

// --- one function per method: check, let the GIL go, call --------------------------------------

void close(const NodeHandle& node, nb::handle flush_timeout_s) {
  if (node->is_forked()) return;
  const auto deadline = deadline_after(flush_timeout_s);
  const GilReleased released;
  node->close(deadline);
}

bool flush(const NodeHandle& node, nb::handle timeout_s) {
  Node& open = usable(node);
  const auto deadline = deadline_after(timeout_s);
  const GilReleased released;
  return open.flush(deadline);
}

std::uint64_t resize_ssd(const NodeHandle& node, std::uint64_t capacity, nb::handle timeout_s) {
  Node& open = usable(node);
  const auto deadline = deadline_after(timeout_s);
  const GilReleased released;
  return value_or_raise(open.resize_ssd(capacity, deadline));
}

Opened open_space(const NodeHandle& node, nb::bytes id, std::uint64_t block_bytes) {
  auto space = std::make_shared<Space>();
  if (id.size() != kHashBytes)
    raise_bad_argument("a namespace id has 16 bytes, not " + std::to_string(id.size()));
  space->id = Hash128::from_bytes(id.c_str());
  space->local = value_or_raise(usable(node).open_namespace(space->id, block_bytes));
  space->block_bytes = space->local->block_bytes;
  space->number = space->local->number;
  return {{std::make_shared<LocalChannel>(node), std::move(space)}};
}

// An index that takes longer than this to hear of a drop is not going to.
constexpr auto kDropTimeout = std::chrono::seconds(10);

Namespace& numbered(Node& node, std::uint32_t number) {
  Namespace* const space = node.space(number);
  if (space == nullptr)
    raise_bad_argument("there is no namespace of number " + std::to_string(number));
  return *space;
}

std::uint64_t drop(const NodeHandle& node, std::uint32_t number) {
  Node& open = usable(node);
  const GilReleased released;
  return value_or_raise(
      open.drop_namespace(numbered(open, number), std::chrono::steady_clock::now() + kDropTimeout));
}

std::optional<double> temperature(const NodeHandle& node, std::uint32_t number, nb::handle key) {
  Node& open = usable(node);
  const Hash128 name = one_key(key, "key");
  const GilReleased released;
  return open.temperature(numbered(open, number), name);
}

std::uintptr_t base_address(const NodeHandle& node) {
  return reinterpret_cast<std::uintptr_t>(usable(node).arena());
}

std::uint64_t resize(const NodeHandle& node, std::optional<std::uint64_t> dram,
                     std::optional<std::uint64_t> max_blocks, nb::handle timeout_s) {
  Node& open = usable(node);
  const auto deadline = deadline_after(timeout_s);
  const GilReleased released;
  return value_or_raise(open.resize(dram, max_blocks, deadline));
}

void trim(const NodeHandle& node) {
  Node& open = usable(node);
  const GilReleased released;
  open.trim();
}

Stats stats(const NodeHandle& node) {
  Node& open = usable(node);
  NodeStats stats;
  {
    const GilReleased released;
    stats = open.stats();
  }
  Stats d;
  add_pool_stats(stats, d);
  add_far_stats(stats, d);
  add_ssd_stats(stats, d);
  return d;
}

Stats traffic_of(const SpaceTraffic& space) {
  const TrafficTotals& t = space.totals;
  std::byte id[kHashBytes]{};
  if (space.space != nullptr) space.space->id.to_bytes(id);
  Stats d;
  d["number"] = space.space == nullptr ? ~std::uint32_t{0} : space.space->number;
  d["id"] = nb::bytes(reinterpret_cast<const char*>(id), sizeof id);
  d["block_bytes"] = space.space == nullptr ? 0 : space.space->block_bytes;
  d["blocks"] = space.blocks;
  d["lookups"] = t.lookups;
  d["lookup_blocks"] = t.lookup_blocks;
  d["lookup_dram"] = t.lookup_dram;
  d["lookup_ssd"] = t.lookup_ssd;
  d["lookup_remote"] = t.lookup_remote;
  d["lookup_missed"] = t.lookup_missed;
  d["lookup_behind"] = t.lookup_behind;
  d["gets"] = t.gets;
  d["get_blocks"] = t.get_blocks;
  d["loaded_dram"] = t.loaded_dram;
  d["loaded_ssd"] = t.loaded_ssd;
  d["loaded_remote"] = t.loaded_remote;
  d["views"] = t.views;
  d["view_blocks"] = t.view_blocks;
  d["missed"] = std::vector<std::uint64_t>(t.missed.begin(), t.missed.end());
  d["put_blocks"] = t.put_blocks;
  d["put_status"] = std::vector<std::uint64_t>(t.put_status.begin(), t.put_status.end());
  return d;
}

nb::typed<nb::list, Stats> traffic(const NodeHandle& node) {
  Node& open = usable(node);
  const std::vector<SpaceTraffic> all = [&] {
    const GilReleased released;
    return open.traffic();
  }();
  nb::typed<nb::list, Stats> list;
  for (const SpaceTraffic& space : all) list.append(traffic_of(space));
  return list;
}

bool settle(const NodeHandle& node, nb::handle timeout_s) {
  Node& open = usable(node);
  const auto deadline = deadline_after(timeout_s);
  const GilReleased released;
  return open.settle(deadline);
}

void check(const NodeHandle& node) {
  Node& open = usable(node);
  const GilReleased released;
  open.check_invariants();
}

// Each node has fault points of its own; see base/fault.h.
void bind_faults(nb::class_<Node>& type) {
  type.def(
          "fault_fail",
          [](const NodeHandle& node, std::string point, std::uint64_t times, std::uint64_t skip) {
            node->faults().fail(std::move(point), times, skip);
          },
          "point"_a, "times"_a = 1, "skip"_a = 0)
      .def(
          "fault_pause",
          [](const NodeHandle& node, std::string point, double at_most_s) {
            if (!(at_most_s >= 0 && at_most_s <= kTimeoutMaxSeconds))
              raise_bad_argument("at_most_s must be 0..86400");
            node->faults().pause(std::move(point),
                                 std::chrono::milliseconds(static_cast<long>(at_most_s * 1000)));
          },
          "point"_a, "at_most_s"_a = 30.0)
      .def(
          "fault_resume",
          [](const NodeHandle& node, const std::string& point) { node->faults().resume(point); },
          "point"_a)
      .def("fault_clear", [](const NodeHandle& node) { node->faults().clear(); })
      .def(
          "fault_hits",
          [](const NodeHandle& node, const std::string& point) {
            return node->faults().hits(point);
          },
          "point"_a)
      .def(
          "fault_waiting",
          [](const NodeHandle& node, const std::string& point) {
            return node->faults().waiting(point);
          },
          "point"_a);
}

}  // namespace

void bind_node(nb::module_& m) {
  nb::class_<ManualClock>(m, "ManualClock",
                          "Time that stands still until it is set: for replay and tests.")
      .def(nb::init<>())
      .def(
          "set", &set_clock, "seconds"_a,
          "Move the time forward; one before now() counts as now(). 0 to 1e12 s, else BadArgument.")
      .def("now", &ManualClock::now);
  nb::class_<Node> type(m, "Node",
                        "The pool of one process: tiers, index and policy. Thread-safe.");
  type.def_static(
          "open",
          [](std::uint64_t dram, std::uint64_t dram_max, std::uint64_t max_blocks,
             std::string policy, double tau_s, std::string prefault, double evict_ahead,
             bool huge_pages, std::uint64_t salt, std::shared_ptr<ManualClock> clock, bool sealed,
             std::string ssd, std::uint64_t ssd_capacity, std::string durability,
             std::string ssd_admit, std::uint64_t ssd_free_floor, std::uint32_t ssd_io_threads,
             bool ssd_direct, double ssd_timeout_s) {
            return open_node({dram, dram_max, max_blocks, std::move(policy), std::move(prefault),
                              tau_s, evict_ahead, huge_pages, salt, sealed},
                             {std::move(ssd), ssd_capacity, ssd_free_floor, std::move(durability),
                              std::move(ssd_admit), ssd_io_threads, ssd_direct, ssd_timeout_s},
                             std::move(clock));
          },
          "dram"_a, "dram_max"_a, "max_blocks"_a, "policy"_a, "tau_s"_a, "prefault"_a,
          "evict_ahead"_a, "huge_pages"_a, "salt"_a, "clock"_a.none(), "sealed"_a = false,
          "ssd"_a = "", "ssd_capacity"_a = 0, "durability"_a = "async",
          "ssd_admit"_a = "second_use", "ssd_free_floor"_a = 0, "ssd_io_threads"_a = 8,
          "ssd_direct"_a = true, "ssd_timeout_s"_a = 5.0)
      .def("close", &close, "flush_timeout_s"_a = 0.0)
      .def("flush", &flush, "timeout_s"_a)
      .def("resize_ssd", &resize_ssd, "capacity"_a, "timeout_s"_a)
      .def(
          "require_usable", [](const NodeHandle& node) { usable(node); },
          "Raise PoolClosed or ForkedProcess where no call can be made.")
      .def_prop_ro("is_closed", [](const NodeHandle& node) { return node->is_closed(); })
      .def_prop_ro("is_forked", [](const NodeHandle& node) { return node->is_forked(); })
      .def_prop_ro("base_address", &base_address)
      .def("open_space", &open_space, "id"_a, "block_bytes"_a)
      .def("drop", &drop, "number"_a,
           "Make every block of a namespace a miss, at once, and return how many there were.\n\n"
           "Their memory comes back in the background. With an SSD, returns once its index has\n"
           "been told; raises NoResource where that fails. Releases the GIL; O(1).")
      .def("temperature", &temperature, "number"_a, "key"_a.none())
      .def("resize", &resize, "dram"_a.none(), "max_blocks"_a.none(), "timeout_s"_a.none())
      .def("trim", &trim)
      .def("stats", &stats)
      .def("traffic", &traffic,
           "What was asked of each namespace and what became of it, through all channels; by\n"
           "number. Blocks: lookup_blocks = lookup_dram + lookup_ssd + lookup_remote +\n"
           "lookup_missed + lookup_behind; get_blocks = loaded_dram + loaded_ssd + loaded_remote\n"
           "+ sum(missed), by Miss, of gets and views; put_blocks = sum(put_status), by Reason\n"
           "(1: present). A drop leaves all as it is. Releases the GIL; about 1 us a namespace.")
      .def("settle", &settle, "timeout_s"_a.none(),
           "Wait until the node's thread has nothing left to do; False at the timeout.")
      .def("check", &check, "Abort the process if the books do not add up. For tests; O(blocks).");
  bind_faults(type);
}

}  // namespace kvpool
