// The node itself: opening, limits, facts, faults.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <string>
#include <thread>

#include "bindings/bind.h"
#include "bindings/gil.h"
#include "bindings/handles.h"

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
};

NodeOptions options_of(const OpenRequest& request) {
  NodeOptions options;
  options.store.bytes_limit = (request.dram + kUnitBytes - 1) / kUnitBytes * kUnitBytes;
  options.store.bytes_max = std::max(request.dram_max, options.store.bytes_limit);
  options.store.blocks_limit = request.max_blocks;
  options.store.tau_s = request.tau_s;
  options.store.salt = request.salt;
  options.evict_ahead = request.evict_ahead;
  options.huge_pages = request.huge_pages;
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

NodeHandle open_node(const OpenRequest& request, std::shared_ptr<ManualClock> manual) {
  std::shared_ptr<const Clock> clock;
  if (manual)
    clock = std::move(manual);
  else
    clock = std::make_shared<SystemClock>();
  auto node = value_or_raise(Node::open(options_of(request), std::move(clock)));
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

nb::typed<nb::dict, nb::str, nb::any> stats_dict(const NodeStats& s) {
  nb::typed<nb::dict, nb::str, nb::any> d;
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
  return d;
}

// --- one function per method: check, let the GIL go, call --------------------------------------

void close(const NodeHandle& node) {
  if (node->is_forked()) return;
  const GilReleased released;
  node->close();
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

nb::typed<nb::dict, nb::str, nb::any> stats(const NodeHandle& node) {
  Node& open = usable(node);
  NodeStats stats;
  {
    const GilReleased released;
    stats = open.stats();
  }
  return stats_dict(stats);
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
             bool huge_pages, std::uint64_t salt, std::shared_ptr<ManualClock> clock) {
            return open_node({dram, dram_max, max_blocks, std::move(policy), std::move(prefault),
                              tau_s, evict_ahead, huge_pages, salt},
                             std::move(clock));
          },
          "dram"_a, "dram_max"_a, "max_blocks"_a, "policy"_a, "tau_s"_a, "prefault"_a,
          "evict_ahead"_a, "huge_pages"_a, "salt"_a, "clock"_a.none())
      .def("close", &close)
      .def(
          "require_usable", [](const NodeHandle& node) { usable(node); },
          "Raise PoolClosed or ForkedProcess where no call can be made.")
      .def_prop_ro("is_closed", [](const NodeHandle& node) { return node->is_closed(); })
      .def_prop_ro("is_forked", [](const NodeHandle& node) { return node->is_forked(); })
      .def_prop_ro("base_address", &base_address)
      .def("resize", &resize, "dram"_a.none(), "max_blocks"_a.none(), "timeout_s"_a.none())
      .def("trim", &trim)
      .def("stats", &stats)
      .def("settle", &settle, "timeout_s"_a.none(),
           "Wait until the node's thread has nothing left to do; False at the timeout.")
      .def("check", &check, "Abort the process if the books do not add up. For tests; O(blocks).");
  bind_faults(type);
}

}  // namespace kvpool
