// Replay in simulated clusters for Python: many of them fed by one pass over the requests.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cmath>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "bindings/bind.h"
#include "bindings/gil.h"
#include "bindings/trace_batch.h"
#include "cluster/cluster_simulator.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool {
namespace {

[[noreturn]] void refuse(const std::string& why) { throw nb::value_error(why.c_str()); }

std::uint64_t in_range(std::int64_t value, const char* name, std::uint64_t least,
                       std::uint64_t most) {
  if (value < 0 || static_cast<std::uint64_t>(value) < least ||
      static_cast<std::uint64_t>(value) > most)
    refuse(std::string(name) + " is " + std::to_string(value) + "; it must be between " +
           std::to_string(least) + " and " + std::to_string(most));
  return static_cast<std::uint64_t>(value);
}

double positive(double value, const char* name) {
  if (!(value >= 0 && std::isfinite(value)))
    refuse(std::string(name) + " must be 0 or a positive number");
  return value;
}

template <typename Choice, std::size_t kCount>
Choice chosen(const std::string& text, const char* name, const char* const (&choices)[kCount]) {
  std::string known;
  for (std::size_t i = 0; i < kCount; ++i) {
    if (text == choices[i]) return static_cast<Choice>(i);
    known += std::string(" ") + choices[i];
  }
  refuse(std::string(name) + " is '" + text + "'; there are:" + known);
}

// In the order of the enumerations.
constexpr const char* kRoutes[] = {"round-robin", "random", "prefix"};
constexpr const char* kKeeps[] = {"warm", "always", "never"};
constexpr const char* kPicks[] = {"load", "first"};

nb::dict facts_of(const ShardCounts& counts) {
  nb::dict facts;
  facts["asks"] = counts.asks;
  facts["asked_keys"] = counts.asked_keys;
  facts["asks_p99"] = counts.asks_p99;
  facts["asks_max"] = counts.asks_max;
  facts["publishes"] = counts.publishes;
  facts["withdraws"] = counts.withdraws;
  facts["told_keys"] = counts.told_keys;
  facts["busiest"] = counts.busiest;
  return facts;
}

nb::list list_of(const std::vector<std::uint64_t>& numbers) {
  nb::list list;
  for (const std::uint64_t number : numbers) list.append(number);
  return list;
}

class ClusterReplay {
 public:
  ClusterReplay() = default;
  ClusterReplay(const ClusterReplay&) = delete;
  ClusterReplay& operator=(const ClusterReplay&) = delete;

  void add(const ClusterOptions& options) {
    if (is_begun_) throw std::runtime_error("this replay has begun");
    runs_.push_back({std::make_unique<ClusterSimulator>(options, names_)});
  }

  template <typename Id>
  void feed(const TraceColumn<double>& times_s, const TraceColumn<std::uint32_t>& lengths,
            const TraceColumn<Id>& ids) {
    if (is_finished_) throw std::runtime_error("this replay is finished");
    const std::span times(times_s.data(), times_s.size());
    const std::span counts(lengths.data(), lengths.size());
    check_trace_batch(times, counts, ids.size());
    is_begun_ = true;
    const GilReleased released;
    intern_all(names_, std::span(ids.data(), ids.size()), blocks_);
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

  void finish() {
    if (is_finished_) throw std::runtime_error("this replay is finished");
    is_finished_ = true;
    const GilReleased released;
    for (Run& run : runs_) run.simulator->finish();
  }

  nb::typed<nb::list, nb::typed<nb::dict, nb::str, nb::any>> results() const {
    if (!is_finished_) throw std::runtime_error("results() needs finish() first");
    nb::typed<nb::list, nb::typed<nb::dict, nb::str, nb::any>> rows;
    for (const Run& run : runs_) rows.append(row_of(run.simulator->report(), run.seconds));
    return rows;
  }

 private:
  struct Run {
    std::unique_ptr<ClusterSimulator> simulator;
    double seconds = 0;
  };

  static nb::dict row_of(const ClusterReport& report, double seconds) {
    nb::dict row;
    row["requests"] = report.requests;
    row["blocks"] = report.blocks;
    row["local_hits"] = report.local_hits;
    row["remote_hits"] = report.remote_hits;
    row["kept"] = report.kept;
    row["aside"] = report.aside;
    row["replicas"] = report.replicas;
    row["evictions"] = report.evictions;
    row["last_evicted"] = report.last_evicted;
    row["hidden"] = report.hidden;
    row["crowded"] = report.crowded;
    row["sources"] = report.sources;
    row["busiest_window"] = report.busiest_window;
    row["tau_s"] = report.tau_s;
    row["routed"] = list_of(report.routed);
    row["sent"] = list_of(report.sent);
    row["by_key"] = facts_of(report.by_key);
    row["by_run"] = facts_of(report.by_run);
    row["seconds"] = seconds;
    return row;
  }

  SystemClock clock_;
  BlockNames names_;
  std::vector<BlockNames::Name> blocks_;  // of the batch being fed
  std::vector<Run> runs_;
  bool is_begun_ = false, is_finished_ = false;
};

// What a caller may leave out has the default of ClusterOptions.
void add(ClusterReplay& replay, std::int64_t nodes, std::int64_t capacity_blocks,
         const nb::kwargs& more) {
  ClusterOptions options;
  options.nodes = static_cast<std::uint32_t>(in_range(nodes, "nodes", 1, kMembersMax));
  options.capacity_blocks =
      static_cast<BlockId>(in_range(capacity_blocks, "capacity_blocks", options.nodes, kBlocksMax));
  constexpr std::uint64_t kAny = std::numeric_limits<std::uint32_t>::max();
  for (const auto& [key, value] : more) {
    const std::string name = nb::cast<std::string>(key);
    const auto text = [&] { return nb::cast<std::string>(value); };
    const auto number = [&](std::uint64_t least) {
      return static_cast<std::uint32_t>(
          in_range(nb::cast<std::int64_t>(value), name.c_str(), least, kAny));
    };
    const auto real = [&] { return positive(nb::cast<double>(value), name.c_str()); };
    if (name == "policy") {
      const auto policy = policy_kind(text());
      if (!policy) refuse("no policy '" + text() + "' for a node");
      options.policy = *policy;
    } else if (name == "ghosts_factor") {
      options.ghosts_factor = real();
    } else if (name == "tau_s") {
      options.tau_s = real();
    } else if (name == "route") {
      options.route = chosen<Route>(text(), "route", kRoutes);
    } else if (name == "route_blocks") {
      options.route_blocks = number(1);
    } else if (name == "seed") {
      options.seed = number(0);
    } else if (name == "keep") {
      options.keep = chosen<KeepCopies>(text(), "keep", kKeeps);
    } else if (name == "pick") {
      options.pick = chosen<PickHolder>(text(), "pick", kPicks);
    } else if (name == "replicate_above") {
      options.replicate_above = real();
    } else if (name == "replicas_max") {
      options.replicas_max = number(0);
    } else if (name == "spare_last") {
      options.spare_last = number(0);
    } else {
      throw nb::type_error(("no option '" + name + "'").c_str());
    }
  }
  replay.add(options);
}

constexpr const char* kFeedDoc =
    "Replays a batch of requests in every cluster; as Replay.feed(). Releases the GIL.";

}  // namespace

void bind_cluster_replay(nb::module_& m) {
  nb::class_<ClusterReplay>(
      m, "ClusterReplay",
      "Replays block requests against simulated clusters, without payload.\n\n"
      "Not thread-safe: one caller at a time.")
      .def(nb::init<>())
      .def("add", &add, "nodes"_a, "capacity_blocks"_a, "options"_a,
           nb::sig("def add(self, nodes: int, capacity_blocks: int, **options: Any) -> None"),
           "One more cluster, of so many nodes and so many blocks in all; before the first "
           "feed().\n\n"
           "Options: policy, ghosts_factor, tau_s; route ('round-robin', 'random', 'prefix'),\n"
           "route_blocks, seed; keep ('warm', 'always', 'never'); pick ('load', 'first');\n"
           "replicate_above (heat; 0 never), replicas_max, spare_last. Raises ValueError for a\n"
           "value out of range, TypeError for an unknown option.")
      .def("feed", &ClusterReplay::feed<std::uint64_t>, "times_s"_a.noconvert(),
           "lengths"_a.noconvert(), "ids"_a.noconvert(), kFeedDoc)
      .def("feed", &ClusterReplay::feed<std::int64_t>, "times_s"_a.noconvert(),
           "lengths"_a.noconvert(), "ids"_a.noconvert(), kFeedDoc)
      .def("finish", &ClusterReplay::finish, "Ends the trace. Releases the GIL.")
      .def("results", &ClusterReplay::results,
           "One dict for each cluster, in the order added. Raises RuntimeError before finish().");
}

}  // namespace kvpool
