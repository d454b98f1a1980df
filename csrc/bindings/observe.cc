// What people ask of a pool: why a block is missing, which prefixes are hot, and what hit rate
// another size would give. Also the reuse distances by themselves, for traces.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cmath>
#include <string>
#include <string_view>

#include "bindings/bind.h"
#include "bindings/gil.h"
#include "bindings/handles.h"
#include "bindings/memory.h"
#include "policy/reuse.h"

namespace kvpool {
namespace {

namespace nb = nanobind;
using nb::literals::operator""_a;

using Dict = nb::typed<nb::dict, nb::str, nb::any>;
using Dicts = nb::typed<nb::list, Dict>;

constexpr std::array<const char*, kGoneReasons> kGoneNames{
    "evicted", "not_worth", "evicted_ssd", "removed", "dropped", "lost", "refused"};

// None where there is nothing.
template <typename Value>
nb::object or_none(const std::optional<Value>& value) {
  return value ? nb::cast(*value) : nb::none();
}

nb::bytes key_bytes(const Hash128& key) {
  std::array<char, kHashBytes> bytes;
  key.to_bytes(bytes.data());
  return nb::bytes(bytes.data(), bytes.size());
}

Namespace& numbered(Node& node, std::uint32_t number) {
  Namespace* const space = node.space(number);
  if (space == nullptr)
    raise_bad_argument("there is no namespace of number " + std::to_string(number));
  return *space;
}

// --- blocks --------------------------------------------------------------------------------------

nb::object gone(const Node::Explained& answer) {
  if (!answer.block.gone) return nb::none();
  const Departure& departure = *answer.block.gone;
  Dict row;
  row["why"] = kGoneNames[static_cast<std::size_t>(departure.why)];
  row["ago_s"] = answer.ago_s;
  row["heat"] = static_cast<double>(departure.heat);
  row["ssd"] = departure.was_on_ssd;
  row["status"] =
      departure.why == Gone::refused ? nb::cast(unsigned{departure.status}) : nb::none();
  return row;
}

Dicts explain(const NodeHandle& node, std::uint32_t number, nb::handle keys_object) {
  Node& open = usable(node);
  const Keys keys(keys_object, Keys::Hold::copied);
  const Namespace& space = numbered(open, number);
  std::vector<Node::Explained> answers;
  {
    const GilReleased released;
    answers = open.explain(space, keys.span());
  }
  Dicts rows;
  for (const Node::Explained& answer : answers) {
    const Store::Explained& block = answer.block;
    Dict row;
    row["tiers"] = block.tiers;
    row["heat"] = block.heat;
    row["temperature"] = block.temperature;
    row["idle_s"] = or_none(block.idle_s);
    row["pins"] = block.pins;
    row["gone"] = gone(answer);
    row["ghost_heat"] = or_none(block.ghost_heat);
    rows.append(row);
  }
  return rows;
}

nb::bytes tiers(const NodeHandle& node, std::uint32_t number, nb::handle keys_object) {
  Node& open = usable(node);
  const Keys keys(keys_object, Keys::Hold::copied);
  const Namespace& space = numbered(open, number);
  std::string found;
  {
    const GilReleased released;
    for (const Node::Explained& answer : open.explain(space, keys.span()))
      found.push_back(static_cast<char>(answer.block.tiers));
  }
  return nb::bytes(found.data(), found.size());
}

std::optional<double> coldest_heat(const NodeHandle& node) {
  Node& open = usable(node);
  const GilReleased released;
  return open.coldest_heat();
}

Dicts hottest(const NodeHandle& node, std::size_t count) {
  Node& open = usable(node);
  if (count == 0 || count > Node::kHottestMax)
    raise_bad_argument("count is " + std::to_string(count) + "; it must be 1.." +
                       std::to_string(Node::kHottestMax));
  std::vector<HotPrefix> found;
  {
    const GilReleased released;
    found = open.hottest(count);
  }
  Dicts rows;
  for (const HotPrefix& prefix : found) {
    Dict row;
    row["number"] = prefix.number;
    row["key"] = key_bytes(prefix.key);
    row["depth"] = prefix.depth;
    row["heat"] = prefix.heat;
    row["idle_s"] = or_none(prefix.idle_s);
    row["tiers"] = prefix.tiers;
    row["children"] = prefix.children;
    rows.append(row);
  }
  return rows;
}

// --- reuse distances -----------------------------------------------------------------------------

Dict as_dict(const ReuseCurve& curve) {
  Dict row;
  row["references"] = curve.references;
  row["sampled"] = curve.sampled;
  row["samples"] = curve.samples;
  row["rate"] = curve.rate;
  row["seen_bytes"] = curve.seen_bytes;
  row["cold"] = curve.cold;
  row["bounds_bytes"] = curve.bounds_bytes;
  row["counts"] = curve.counts;
  return row;
}

Dict reuse(const NodeHandle& node) {
  Node& open = usable(node);
  Node::ReuseCurves curves;
  {
    const GilReleased released;
    curves = open.reuse();
  }
  nb::dict spaces;
  for (const auto& [number, curve] : curves.spaces) spaces[nb::int_(number)] = as_dict(curve);
  Dict row;
  row["all"] = as_dict(curves.all);
  row["spaces"] = spaces;
  row["bytes"] = curves.bytes;
  return row;
}

template <typename T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Ids are names: only their equality counts, so a signed one is taken by its bits.
template <typename Id>
void add_uses(Reuse& reuse, const Column<Id>& ids, std::uint64_t block_bytes, double now) {
  if (block_bytes == 0 || block_bytes > kBlockBytesMax)
    raise_bad_argument("block_bytes is " + std::to_string(block_bytes) + "; it must be 1.." +
                       std::to_string(kBlockBytesMax));
  if (!std::isfinite(now)) raise_bad_argument("now must be a finite number of seconds");
  for (const Id id : std::span(ids.data(), ids.size()))
    reuse.add(mix64(static_cast<std::uint64_t>(id)), static_cast<std::uint32_t>(block_bytes), now);
}

void make_reuse(Reuse* place, std::uint32_t samples, bool exact, double half_life_s,
                std::uint64_t reach_bytes, std::uint64_t salt) {
  if (samples < 64 || samples > (1u << 24) || !std::has_single_bit(samples))
    raise_bad_argument("samples is " + std::to_string(samples) +
                       "; it must be a power of two, 64..16777216");
  if (!(half_life_s >= 0 && std::isfinite(half_life_s)))
    raise_bad_argument("half_life_s must be 0 (nothing fades) or a positive number of seconds");
  new (place) Reuse({.samples_max = exact ? 0 : samples,
                     .reach_bytes = reach_bytes,
                     .half_life_s = half_life_s,
                     .salt = salt});
}

constexpr const char* kAddDoc =
    "Uses of blocks, in order, all at the time `now` in seconds.\n\n"
    "ids: uint64[n] or int64[n], equal for uses of one block; block_bytes: size of each. Raises\n"
    "TypeError for other dtypes, BadArgument for a value out of range. Keeps the GIL: 3 ns a use\n"
    "that is not sampled, 0.3 us one that is.";

void bind_reuse(nb::module_& m) {
  nb::class_<Reuse>(
      m, "Reuse",
      "Reuse distances in bytes of a stream of uses: the LRU hit rate at every size.\n\n"
      "samples: blocks followed at a time, a power of two; 44 bytes each. exact: follow all, with\n"
      "memory that grows with their number. half_life_s: of what is counted; 0 keeps it.\n"
      "reach_bytes: the largest size that will be asked for, 0 = any. Not thread-safe.")
      .def("__init__", &make_reuse, nb::kw_only(), "samples"_a = 1u << 14, "exact"_a = false,
           "half_life_s"_a = 0.0, "reach_bytes"_a = 0, "salt"_a = 0)
      .def("add", &add_uses<std::uint64_t>, "ids"_a.noconvert(), "block_bytes"_a, "now"_a = 0.0,
           kAddDoc)
      .def("add", &add_uses<std::int64_t>, "ids"_a.noconvert(), "block_bytes"_a, "now"_a = 0.0,
           kAddDoc)
      .def(
          "curve", [](const Reuse& reuse, double now) { return as_dict(reuse.curve(now)); },
          "now"_a = 0.0, "What has been counted, as of `now`; a dict as in Node.reuse(). O(bins).")
      .def_prop_ro("bytes", &Reuse::bytes, "Memory that this takes.");
}

}  // namespace

void bind_observe(nb::module_& m) {
  bind_reuse(m);
  nb::borrow<nb::class_<Node>>(m.attr("Node"))
      .def(
          "explain", &explain, "number"_a, "keys"_a.none(),
          "One dict per key: where its block is, or why it is not.\n\n"
          "tiers: 1 = DRAM, 2 = SSD, 3 = both, 0 = nowhere; heat; temperature; idle_s (None where\n"
          "the policy keeps no times); pins; gone: None where nothing is known, or why, ago_s,\n"
          "heat, ssd (it had a copy there), status (of the put; of `refused` only); ghost_heat:\n"
          "what it would go on from. why: evicted, not_worth, evicted_ssd, removed, dropped, lost\n"
          "or refused. Changes nothing. Raises BadArgument for a number that is no namespace's.\n"
          "Releases the GIL; O(1) a key.")
      .def(
          "tiers", &tiers, "number"_a, "keys"_a.none(),
          "One byte per key, as `tiers` of explain(), also of those behind a missing one. Neither\n"
          "counts nor heats. Releases the GIL.")
      .def("coldest_heat", &coldest_heat,
           "Of the block in DRAM that would leave next; None where nothing can.")
      .def("hottest", &hottest, "count"_a,
           "The ends of prefixes in use, hottest first, one dict each.\n\n"
           "number (of the namespace), key (of the last block), depth (blocks up to and with it),\n"
           "heat, idle_s, tiers, children (resident blocks that go on from it). An end is a block\n"
           "whose hottest child has less than half its heat. count: 1..1000, else BadArgument.\n"
           "Releases the GIL; O(blocks), in pieces that hold nobody up for 1 ms.")
      .def("reuse", &reuse,
           "Sampled reuse distances: `all`, `spaces` by number, and the `bytes` they take.\n\n"
           "A curve has references (uses, faded with a half-life of an hour), sampled (of these,\n"
           "by blocks that are followed), samples (those blocks), rate (their share), seen_bytes "
           "(of\n"
           "all blocks, about: of larger sizes nothing is known), cold (first uses), bounds_bytes "
           "and\n"
           "counts: so many uses lie at distances up to that bound and above the one before; with\n"
           "cold they add up to references. Releases the GIL; O(bins).");
}

}  // namespace kvpool
