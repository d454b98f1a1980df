// Trace replay for Python: many policies and capacities fed by one pass over the requests.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "bindings/gil.h"
#include "bindings/trace_batch.h"
#include "policy/policy.h"
#include "policy/simulator.h"

namespace nb = nanobind;

namespace kvpool {

namespace {

constexpr std::string_view kBelady = "belady";

std::vector<std::string> policy_names() {
  std::vector<std::string> names;
  for (const PolicyKind kind : kPolicyKinds) names.emplace_back(policy_name(kind));
  names.emplace_back(kBelady);
  return names;
}

using Runs = std::vector<std::pair<std::string, std::int64_t>>;

class Replay {
 public:
  Replay(const Runs& policies, double ghosts_factor, double tau_s) {
    if (!(ghosts_factor >= 0 && ghosts_factor <= 1e6)) {
      throw nb::value_error("ghosts_factor must be between 0 and 1e6");
    }
    if (!(tau_s >= 0 && std::isfinite(tau_s))) {
      throw nb::value_error(
          "tau_s must be 0 (follow the workload) or a positive number of seconds");
    }
    for (const auto& [name, capacity] : policies) add_run(name, capacity, ghosts_factor, tau_s);
  }

  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;

  template <typename Id>
  void feed(const TraceColumn<double>& times_s, const TraceColumn<std::uint32_t>& lengths,
            const TraceColumn<Id>& ids) {
    check_open();
    const std::span times(times_s.data(), times_s.size());
    const std::span counts(lengths.data(), lengths.size());
    check_trace_batch(times, counts, ids.size());
    const GilReleased released;
    intern_all(names_, std::span(ids.data(), ids.size()), blocks_);
    run_all(times, counts);
  }

  void finish() {
    check_open();
    is_finished_ = true;
    const GilReleased released;
    for (Run& run : runs_) {
      const Seconds begin = clock_.now();
      run.simulator->finish();
      run.seconds += clock_.now() - begin;
    }
  }

  nb::typed<nb::list, nb::typed<nb::dict, nb::str, nb::any>> results() const {
    if (!is_finished_) throw std::runtime_error("results() needs finish() first");
    nb::typed<nb::list, nb::typed<nb::dict, nb::str, nb::any>> rows;
    for (const Run& run : runs_) {
      const SimulatorReport report = run.simulator->report();
      nb::dict row;
      row["policy"] = run.policy;
      row["capacity_blocks"] = run.capacity_blocks;
      row["requests"] = report.requests;
      row["blocks"] = report.blocks;
      row["hit_blocks"] = report.hit_blocks;
      row["evictions"] = report.evictions;
      row["ghosts_peak"] = report.ghosts_peak;
      row["tau_s"] = report.tau_s;
      row["seconds"] = run.seconds;
      rows.append(row);
    }
    return rows;
  }

 private:
  struct Run {
    std::string policy;
    BlockId capacity_blocks;
    std::unique_ptr<Simulator> simulator;
    double seconds = 0;
  };

  void add_run(const std::string& name, std::int64_t capacity, double ghosts_factor, double tau_s) {
    SimulatorOptions options;
    options.policy = policy_kind(name);
    options.ghosts_factor = ghosts_factor;
    options.tau_s = tau_s;
    if (!options.policy && name != kBelady) {
      std::string known;
      for (const std::string& each : policy_names()) known += " " + each;
      throw nb::value_error(("no policy '" + name + "'; there are:" + known).c_str());
    }
    if (capacity < 1 || capacity > kBlocksMax) {
      throw nb::value_error(("capacity of " + std::to_string(capacity) +
                             " blocks; it must be between 1 and " + std::to_string(kBlocksMax))
                                .c_str());
    }
    options.capacity_blocks = static_cast<BlockId>(capacity);
    runs_.push_back({name, options.capacity_blocks, make_simulator(options, names_)});
  }

  void check_open() const {
    if (is_finished_) throw std::runtime_error("this replay is finished");
  }

  // One simulator after the other: each keeps the processor's caches to itself for a whole batch.
  void run_all(std::span<const double> times, std::span<const std::uint32_t> counts) {
    for (Run& run : runs_) {
      const Seconds begin = clock_.now();
      std::span<const BlockNames::Name> rest(blocks_);
      for (std::size_t i = 0; i < times.size(); ++i) {
        run.simulator->request(rest.first(counts[i]), times[i]);
        rest = rest.subspan(counts[i]);
      }
      run.seconds += clock_.now() - begin;
    }
  }

  SystemClock clock_;
  BlockNames names_;
  std::vector<BlockNames::Name> blocks_;  // of the batch being fed
  std::vector<Run> runs_;
  bool is_finished_ = false;
};

constexpr const char* kFeedDoc =
    "Replays a batch of requests, in order, in every simulator.\n\n"
    "times_s: float64[n], seconds; a time before the one preceding it counts as that one.\n"
    "lengths: uint32[n], blocks of each request. ids: uint64 or int64[sum(lengths)], head to\n"
    "tail, requests one after the other. Raises ValueError when they disagree, TypeError for "
    "other\n"
    "dtypes, RuntimeError after finish(). Releases the GIL; keeps 4 bytes a block for Belady only.";

}  // namespace

void bind_replay(nb::module_& m) {
  m.def("policy_names", &policy_names,
        "Names of the eviction policies; the last, 'belady', exists in Replay only.");
  nb::class_<Replay>(
      m, "Replay",
      "Replays block requests against policies, without payload.\n\n"
      "policies: (name, capacity in blocks) pairs; ghosts_factor: remembered blocks\n"
      "per block of capacity; tau_s: half-life of heat, 0 follows the workload.\n"
      "Raises ValueError for an unknown name or a value out of range.\n"
      "Not thread-safe: one caller at a time.")
      .def(nb::init<const Runs&, double, double>(), nb::arg("policies"),
           nb::arg("ghosts_factor") = 16.0, nb::arg("tau_s") = 0.0)
      .def("feed", &Replay::feed<std::uint64_t>, nb::arg("times_s").noconvert(),
           nb::arg("lengths").noconvert(), nb::arg("ids").noconvert(), kFeedDoc)
      .def("feed", &Replay::feed<std::int64_t>, nb::arg("times_s").noconvert(),
           nb::arg("lengths").noconvert(), nb::arg("ids").noconvert(), kFeedDoc)
      .def("finish", &Replay::finish,
           "Ends the trace. Belady replays it now; the other policies are already done.\n\n"
           "Releases the GIL. Raises RuntimeError when called twice.")
      .def("results", &Replay::results,
           "One dict for each (policy, capacity), in the order given.\n\n"
           "Keys: policy, capacity_blocks, requests, blocks, hit_blocks (leading resident blocks "
           "at\n"
           "arrival), evictions, ghosts_peak, tau_s (at the end), seconds (spent in this policy).\n"
           "Raises RuntimeError before finish().");
}

}  // namespace kvpool
