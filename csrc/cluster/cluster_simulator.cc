#include "cluster/cluster_simulator.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace kvpool {

namespace {

PolicyOptions policy_options(const ClusterOptions& options, std::uint32_t node) {
  const BlockId more = node < options.capacity_blocks % options.nodes;
  PolicyOptions made;
  made.blocks_max = options.capacity_blocks / options.nodes + more;
  made.ghosts_max =
      static_cast<std::uint64_t>(std::min(options.ghosts_factor * made.blocks_max, 0x1p32));
  made.tau_s = options.tau_s;
  return made;
}

const ClusterOptions& checked(const ClusterOptions& options) {
  KVP_CHECK(options.nodes > 0 && options.nodes <= kMembersMax);
  KVP_CHECK(options.capacity_blocks >= options.nodes && options.capacity_blocks <= kBlocksMax);
  KVP_CHECK(options.ghosts_factor >= 0 && options.route_blocks > 0);
  return options;
}

}  // namespace

// What may not go on a node: on the gateway, the blocks of the running request.
class ClusterSimulator::Guard final : public SimulatedNode::Guard {
 public:
  Guard(const ClusterSimulator& cluster, std::uint32_t node)
      : cluster_(cluster), is_gateway_(node == cluster.at_) {}
  bool is_pinned(Name name) const override {
    return is_gateway_ && cluster_.pinned_by_[name] == cluster_.report_.requests;
  }
  bool is_last_copy(Name name) const override { return cluster_.directory_.copies(name) == 1; }

 private:
  const ClusterSimulator& cluster_;
  const bool is_gateway_;
};

ClusterSimulator::ClusterSimulator(const ClusterOptions& options, const BlockNames& names)
    : options_(checked(options)),
      names_(names),
      directory_(options.nodes, names),
      source_of_(options.nodes),
      window_sent_(options.nodes) {
  for (std::uint32_t node = 0; node < options.nodes; ++node)
    nodes_.push_back(
        std::make_unique<SimulatedNode>(options.policy, policy_options(options, node), names));
  report_.routed.resize(options.nodes);
  report_.sent.resize(options.nodes);
}

void ClusterSimulator::request(std::span<const Name> blocks, Seconds now) {
  now_ = now;
  directory_.advance(now);
  learn(blocks);
  at_ = gateway(blocks);
  ++report_.routed[at_];
  ++report_.requests;
  report_.blocks += blocks.size();
  for (const Name name : blocks) pinned_by_[name] = report_.requests;
  const Hits hits = find(blocks);
  directory_.ask(at_, blocks.subspan(hits.local));
  use_local(blocks.first(hits.all));
  for (std::size_t i = hits.local; i < hits.all; ++i)
    if (nodes_[at_]->find(blocks[i]) == kNoBlock) fetch(blocks, i);
  put(blocks, hits.all);
  replicate_hot();
}

std::uint32_t ClusterSimulator::gateway(std::span<const Name> blocks) const {
  std::uint64_t number = report_.requests;
  if (options_.route == Route::random) number = fingerprint_of(number ^ mix64(options_.seed));
  if (options_.route == Route::prefix && !blocks.empty()) {
    // The name of a block is that of all that is before it, too.
    const std::size_t last = std::min<std::size_t>(blocks.size(), options_.route_blocks) - 1;
    number = fingerprint_of(names_.id(blocks[last]) ^ mix64(options_.seed));
  }
  return static_cast<std::uint32_t>(number % options_.nodes);
}

void ClusterSimulator::learn(std::span<const Name> blocks) {
  pinned_by_.resize(names_.size());
  parents_.resize(names_.size(), BlockNames::kNone);
  directory_.learn(blocks);
  for (std::size_t i = 0; i < blocks.size(); ++i)
    parents_[blocks[i]] = i > 0 ? blocks[i - 1] : BlockNames::kNone;
}

ClusterSimulator::Hits ClusterSimulator::find(std::span<const Name> blocks) const {
  const SimulatedNode& here = *nodes_[at_];
  Hits hits;
  while (hits.local < blocks.size() && here.find(blocks[hits.local]) != kNoBlock) ++hits.local;
  hits.all = hits.local;
  while (hits.all < blocks.size() &&
         (here.find(blocks[hits.all]) != kNoBlock || directory_.is_known(blocks[hits.all])))
    ++hits.all;
  return hits;
}

// Tail to head, so that a head is never older than what continues it.
void ClusterSimulator::use_local(std::span<const Name> hits) {
  SimulatedNode& here = *nodes_[at_];
  for (std::size_t i = hits.size(); i-- > 0;) {
    const BlockId record = here.find(hits[i]);
    if (record == kNoBlock) continue;
    ++report_.local_hits;
    here.touch(record, now_);
    note_use(at_, hits[i]);
  }
}

void ClusterSimulator::fetch(std::span<const Name> blocks, std::size_t at) {
  const Name name = blocks[at];
  ++report_.remote_hits;
  const std::uint32_t holder = pick_holder(name);
  nodes_[holder]->touch(nodes_[holder]->find(name), now_);
  note_sent(holder);
  report_.sources += source_of_[holder] != report_.requests;
  source_of_[holder] = report_.requests;
  const bool is_kept =
      options_.keep == KeepCopies::always ||
      (options_.keep == KeepCopies::warm && nodes_[at_]->is_worth_a_copy(name, now_));
  if (is_kept && insert(at_, name))
    ++report_.kept;
  else
    ++report_.aside;
  note_use(holder, name);
}

void ClusterSimulator::put(std::span<const Name> blocks, std::size_t from) {
  SimulatedNode& here = *nodes_[at_];
  if (from < blocks.size()) report_.hidden += directory_.copies(blocks[from]) > 0;
  for (const Name name : blocks.subspan(from)) {
    const BlockId record = here.find(name);
    if (record != kNoBlock)
      here.touch(record, now_);
    else if (!insert(at_, name))
      return;
  }
}

std::uint32_t ClusterSimulator::pick_holder(Name name) const {
  std::uint32_t picked = SimulatedDirectory::kNobody;
  for (const std::uint16_t holder : directory_.holders(name)) {
    if (holder == SimulatedDirectory::kNobody) continue;
    const bool is_better =
        picked == SimulatedDirectory::kNobody ||
        (options_.pick == PickHolder::load && report_.sent[holder] < report_.sent[picked]);
    if (is_better) picked = holder;
  }
  return picked;
}

bool ClusterSimulator::insert(std::uint32_t node, Name name) {
  SimulatedNode& there = *nodes_[node];
  Name gone = BlockNames::kNone;
  const BlockId record =
      there.make_room(Guard(*this, node), options_.nodes > 1 ? options_.spare_last : 0, gone, now_);
  if (gone != BlockNames::kNone) {
    ++report_.evictions;
    report_.last_evicted += directory_.copies(gone) == 1;
    directory_.went(node, gone, now_);
  }
  if (record == kNoBlock) return false;
  const Name parent = parents_[name];
  there.insert(record, name, parent == BlockNames::kNone ? kNoBlock : there.find(parent), now_);
  directory_.came(node, name, now_);
  return true;
}

// --- replicas ------------------------------------------------------------------------------------

void ClusterSimulator::note_use(std::uint32_t node, Name name) {
  if (options_.replicate_above > 0 && directory_.copies(name) <= options_.replicas_max)
    used_.push_back({node, name});
}

// Once the request is served: what has to go for a replica is nothing that it was promised.
void ClusterSimulator::replicate_hot() {
  for (const Use& use : used_) {
    const SimulatedNode& holder = *nodes_[use.node];
    const BlockId record = holder.find(use.name);
    if (record == kNoBlock || holder.heat(record, now_) < options_.replicate_above) continue;
    if (directory_.copies(use.name) > options_.replicas_max) continue;
    const std::uint32_t to = least_loaded_without(use.name);
    if (to == options_.nodes || !insert(to, use.name)) continue;
    ++report_.replicas;
    note_sent(use.node);
  }
  used_.clear();
}

// options_.nodes: all have it.
std::uint32_t ClusterSimulator::least_loaded_without(Name name) const {
  std::uint32_t least = options_.nodes;
  // Not always the same ones first where all are as good.
  const auto start = static_cast<std::uint32_t>(fingerprint_of(name) % options_.nodes);
  for (std::uint32_t i = 0; i < options_.nodes; ++i) {
    const std::uint32_t node = (start + i) % options_.nodes;
    if (nodes_[node]->find(name) != kNoBlock) continue;
    if (least == options_.nodes || report_.sent[node] < report_.sent[least]) least = node;
  }
  return least;
}

// --- books ---------------------------------------------------------------------------------------

void ClusterSimulator::note_sent(std::uint32_t node) {
  ++report_.sent[node];
  const double window = std::floor(now_ / kWindow);
  if (window != window_) std::ranges::fill(window_sent_, 0);
  window_ = window;
  report_.busiest_window = std::max(report_.busiest_window, ++window_sent_[node]);
}

ClusterReport ClusterSimulator::report() const {
  ClusterReport report = report_;
  report.crowded = directory_.crowded();
  report.tau_s = nodes_[0]->tau_s();
  report.by_key = directory_.by_key().counts();
  report.by_run = directory_.by_run().counts();
  return report;
}

void ClusterSimulator::check_invariants() const {
  std::uint64_t copies = 0, resident = 0;
  for (Name name = 0; name < pinned_by_.size(); ++name) {
    copies += directory_.copies(name);
    for (const std::uint16_t holder : directory_.holders(name))
      KVP_CHECK(holder == SimulatedDirectory::kNobody || nodes_[holder]->find(name) != kNoBlock);
  }
  for (const auto& node : nodes_) {
    node->check_invariants();
    resident += node->resident();
  }
  KVP_CHECK(copies == resident);
}

}  // namespace kvpool
