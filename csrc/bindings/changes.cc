// What came to a node and what left it, for whoever publishes that: the events over ZMQ.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include <memory>
#include <string>
#include <vector>

#include "bindings/bind.h"
#include "bindings/gil.h"
#include "bindings/handles.h"
#include "node/node.h"

namespace kvpool {
namespace {

namespace nb = nanobind;
using nb::literals::operator""_a;

using Taken = nb::typed<nb::tuple, nb::bool_, nb::bytes>;

constexpr std::uint64_t kChangesMin = 64, kChangesMax = 1 << 22;

// One row as Python sees it; all of it is written, so that no stray byte is told.
struct Row {
  std::uint8_t space[kHashBytes], key[kHashBytes], parent[kHashBytes];
  std::uint32_t number;  // of the namespace
  std::uint8_t before, after;
  std::uint8_t reserved[2];
};
static_assert(sizeof(Row) == 56);

void append(std::string& rows, const Namespace& space, const Change& change) {
  Row row{};
  row.number = space.number;
  space.id.to_bytes(row.space);
  row.before = change.before;
  row.after = change.after;
  change.key.to_bytes(row.key);
  change.parent.to_bytes(row.parent);
  rows.append(reinterpret_cast<const char*>(&row), sizeof row);
}

// Listens as long as it lives. One thread at a time; a walk is its own.
class ChangeFeed {
 public:
  ChangeFeed(NodeHandle node, std::size_t changes_max) : node_(std::move(node)) {
    const GilReleased released;
    listener_ = node_->listen(changes_max, Hears::moves);
  }
  ~ChangeFeed() {
    if (listener_ == nullptr || node_->is_forked()) return;
    const GilReleased released;
    node_->stop_listening(listener_);
  }
  ChangeFeed(const ChangeFeed&) = delete;
  ChangeFeed& operator=(const ChangeFeed&) = delete;

  bool is_listening() const { return listener_ != nullptr; }
  Taken take() {
    Node& node = usable(node_);
    std::string rows;
    bool is_whole = false;
    {
      const GilReleased released;
      is_whole = node.take_changes(listener_, changes_);
      rows.reserve(changes_.size() * sizeof(Row));
      for (const Change& each : changes_) append(rows, *each.space, each);
    }
    return nb::make_tuple(is_whole, nb::bytes(rows.data(), rows.size()));
  }
  const NodeHandle& node() const { return node_; }

 private:
  const NodeHandle node_;
  Changes* listener_ = nullptr;
  std::vector<Change> changes_;
};

// What is here, in pieces.
class ChangeWalk {
 public:
  explicit ChangeWalk(NodeHandle node) : node_(std::move(node)) {}

  Taken step() {
    Node& node = usable(node_);
    std::string rows;
    bool is_more = false;
    {
      const GilReleased released;
      found_.clear();
      is_more = node.walk(walk_, found_);
      rows.reserve(found_.size() * sizeof(Row));
      for (const Resident& each : found_)
        append(rows, *each.space, {each.space, each.key, each.parent, 0, each.tiers});
    }
    return nb::make_tuple(is_more, nb::bytes(rows.data(), rows.size()));
  }

 private:
  const NodeHandle node_;
  ResidentWalk walk_{Hears::moves};
  std::vector<Resident> found_;
};

std::shared_ptr<ChangeFeed> open_feed(const NodeHandle& node, std::uint64_t changes_max) {
  usable(node);
  if (changes_max < kChangesMin || changes_max > kChangesMax)
    raise_bad_argument("changes_max is " + std::to_string(changes_max) + "; it must be " +
                       std::to_string(kChangesMin) + ".." + std::to_string(kChangesMax));
  auto feed = std::make_shared<ChangeFeed>(node, changes_max);
  if (!feed->is_listening())
    throw Raised("NoResource",
                 "at most " + std::to_string(Listeners::kMax) + " listen to the changes of a node");
  return feed;
}

std::shared_ptr<ChangeWalk> walk(const ChangeFeed& feed) {
  return std::make_shared<ChangeWalk>(feed.node());
}

}  // namespace

void bind_changes(nb::module_& m) {
  nb::class_<ChangeFeed>(
      m, "ChangeFeed",
      "What came to a node, what left it and what changed its tier, from here on.\n\n"
      "Rows of 56 bytes: uint8[16] id of the namespace, uint8[16] key, uint8[16] the key before "
      "it\n"
      "in its chain (zero: none is known), uint32 number of the namespace, uint8 tiers before and\n"
      "after (1 = DRAM, 2 = SSD, 0 = nowhere), two bytes of zero. Little-endian. Listens until it\n"
      "is gone. For one thread at a time.")
      .def_static("open", &open_feed, "node"_a, "changes_max"_a,
                  "changes_max: noted between two takes, 64..4194304; 96 bytes each. Raises\n"
                  "BadArgument, NoResource if several listen already.")
      .def("take", &ChangeFeed::take,
           "(whole, rows): what changed since the last take, in its order. Not whole: some is "
           "lost,\n"
           "as before the first take, and only a walk tells what is here. Releases the GIL.")
      .def("walk", &walk, "A walk over what is here, from its beginning.");
  nb::class_<ChangeWalk>(
      m, "ChangeWalk",
      "What a node has, in pieces. A block that is here throughout is in one of them, once.")
      .def(
          "step", &ChangeWalk::step,
          "(more, rows) of the next piece, as ChangeFeed.take(); `before` is 0. Releases the GIL;\n"
          "holds the node up for under 1 ms.");
}

}  // namespace kvpool
