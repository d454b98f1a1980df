#include "policy/chain_order.h"

#include <algorithm>

#include "base/check.h"

namespace kvpool {

namespace {
// Four children share one cache line of ids, and their ranks are fetched side by side.
constexpr std::uint32_t kArity = 4;
}  // namespace

ChainOrder::ChainOrder(BlockId blocks_max) : nodes_(blocks_max) {
  KVP_CHECK(blocks_max <= kBlocksMax);
}

void ChainOrder::insert(BlockId id, BlockId parent, Group group, std::uint64_t rank) {
  KVP_CHECK(id < nodes_.length_max() && group < kGroupsMax * 2);
  (void)heap_of(group & 0xfff);  // may find no memory: then nothing has changed yet
  nodes_.reach(id + std::size_t{1});
  Node& node = nodes_[id];
  KVP_CHECK(state(node) == kAbsent);
  node.rank = rank;
  node.epoch = epoch_ & kEpochMax;
  node.depth = 0;
  node.group = group & 0xfff;
  node.is_marked = 0;
  node.parent = parent;
  if (parent != kNoBlock) {
    KVP_CHECK(is_resident(parent));
    node.depth = std::min<std::uint64_t>(nodes_[parent].depth + 1u, kDepthMax) & kDepthMax;
    add_child(parent);
  }
  is_epoch_used_ = true;
  ++resident_;
  push(id);
}

void ChainOrder::erase(BlockId id) {
  KVP_CHECK(is_resident(id));
  Node& node = nodes_[id];
  if (state(node) == kOrdered) {
    pull(id);
  } else if (node.place > 0 && is_epoch_used_ && epoch_ < kEpochMax) {
    ++epoch_;  // The children left behind must not take the id's next owner for their parent.
    is_epoch_used_ = false;
  }
  const BlockId parent = parent_of(node);
  settle(node, kAbsent, 0);
  --resident_;
  if (parent != kNoBlock) drop_child(parent);
}

void ChainOrder::let_go(BlockId id) {
  KVP_CHECK(is_resident(id));
  Node& node = nodes_[id];
  if (state(node) == kOrdered || node.place == 0 || epoch_ >= kEpochMax) return;
  // Younger than its children, it is no parent of theirs. A parent that had let go of this one
  // before must not seem an older one now.
  if (parent_of(node) == kNoBlock) node.parent = kNoBlock;
  node.epoch = ++epoch_ & kEpochMax;
  is_epoch_used_ = true;
  if (state(node) == kInner)
    push(id);
  else
    settle(node, kTaken, 0);
}

void ChainOrder::set_rank(BlockId id, std::uint64_t rank) {
  KVP_CHECK(is_resident(id));
  Node& node = nodes_[id];
  const bool is_later = rank >= node.rank;
  node.rank = rank;
  if (state(node) != kOrdered) return;
  Heap& heap = heaps_[node.group];
  if (is_later) {
    sift_down(heap, node.place, id);
  } else {
    sift_up(heap, node.place, id);
  }
}

void ChainOrder::set_group(BlockId id, Group group) {
  KVP_CHECK(is_resident(id) && group < kGroupsMax * 2);
  const bool is_ordered = state(nodes_[id]) == kOrdered;
  if (is_ordered) pull(id);
  nodes_[id].group = group & 0xfff;
  if (is_ordered) push(id);
}

BlockId ChainOrder::first(Group group) const {
  return group < heaps_.size() && heaps_[group].size > 0 ? heaps_[group].ids[0] : kNoBlock;
}

BlockId ChainOrder::take_first(Group group) {
  const BlockId id = first(group);
  if (id == kNoBlock) return kNoBlock;
  pull(id);
  settle(nodes_[id], kTaken, 0);
  return id;
}

void ChainOrder::give_back(BlockId id) {
  KVP_CHECK(is_resident(id));
  Node& node = nodes_[id];
  KVP_CHECK(state(node) == kTaken);
  if (node.place == 0) {
    push(id);
  } else {
    settle(node, kInner, node.place);
  }
}

bool ChainOrder::is_resident(BlockId id) const {
  return id < nodes_.length_max() && state(nodes_[id]) != kAbsent;
}

void ChainOrder::settle(Node& node, State state, std::uint32_t place) {
  node.state = state & 3u;
  node.place = place & (kBlocksMax - 1);
}

bool ChainOrder::goes_before(BlockId a, BlockId b) const {
  const Node& x = nodes_[a];
  const Node& y = nodes_[b];
  if (x.rank != y.rank) return x.rank < y.rank;
  if (x.depth != y.depth) return x.depth > y.depth;
  return a < b;
}

BlockId ChainOrder::parent_of(const Node& node) const {
  if (node.parent == kNoBlock) return kNoBlock;
  const Node& parent = nodes_[node.parent];
  return state(parent) != kAbsent && parent.epoch <= node.epoch ? node.parent : kNoBlock;
}

void ChainOrder::add_child(BlockId parent) {
  Node& node = nodes_[parent];
  if (state(node) == kOrdered) {
    pull(parent);
    settle(node, kInner, 0);
  }
  settle(node, state(node), node.place + 1u);
}

void ChainOrder::drop_child(BlockId parent) {
  Node& node = nodes_[parent];
  KVP_CHECK(state(node) != kOrdered && node.place > 0);
  settle(node, state(node), node.place - 1u);
  if (state(node) == kInner && node.place == 0) push(parent);
}

ChainOrder::Heap& ChainOrder::heap_of(Group group) {
  while (heaps_.size() <= group) heaps_.emplace_back();
  Heap& heap = heaps_[group];
  if (heap.ids.length_max() == 0) heap.ids.extend(nodes_.length_max());
  return heap;
}

void ChainOrder::push(BlockId id) {
  Heap& heap = heap_of(nodes_[id].group);
  heap.ids.reach(heap.size + std::size_t{1});
  settle(nodes_[id], kOrdered, heap.size);
  sift_up(heap, heap.size++, id);
}

// Out of its heap; the caller says what the block becomes.
void ChainOrder::pull(BlockId id) {
  Heap& heap = heaps_[nodes_[id].group];
  const std::uint32_t at = nodes_[id].place;
  KVP_CHECK(at < heap.size && heap.ids[at] == id);
  const BlockId last = heap.ids[--heap.size];
  if (last == id) return;
  if (at > 0 && goes_before(last, heap.ids[(at - 1) / kArity])) {
    sift_up(heap, at, last);
  } else {
    sift_down(heap, at, last);
  }
}

void ChainOrder::sift_up(Heap& heap, std::uint32_t at, BlockId id) {
  while (at > 0) {
    const std::uint32_t above = (at - 1) / kArity;
    if (!goes_before(id, heap.ids[above])) break;
    put_at(heap, at, heap.ids[above]);
    at = above;
  }
  put_at(heap, at, id);
}

void ChainOrder::sift_down(Heap& heap, std::uint32_t at, BlockId id) {
  for (;;) {
    const std::uint64_t below = std::uint64_t{at} * kArity + 1;
    if (below >= heap.size) break;
    const std::uint64_t end = std::min<std::uint64_t>(below + kArity, heap.size);
    auto least = static_cast<std::uint32_t>(below);
    for (std::uint32_t i = least + 1; i < end; ++i) {
      if (goes_before(heap.ids[i], heap.ids[least])) least = i;
    }
    if (!goes_before(heap.ids[least], id)) break;
    put_at(heap, at, heap.ids[least]);
    at = least;
  }
  put_at(heap, at, id);
}

void ChainOrder::put_at(Heap& heap, std::uint32_t at, BlockId id) {
  heap.ids[at] = id;
  nodes_[id].place = at & (kBlocksMax - 1);
}

std::size_t ChainOrder::bytes() const {
  std::size_t total = nodes_.bytes() + heaps_.capacity() * sizeof(Heap);
  for (const Heap& heap : heaps_) total += heap.ids.bytes();
  return total;
}

void ChainOrder::check_invariants() const {
  const std::size_t ids = nodes_.length_reached();
  std::vector<std::uint32_t> children(ids, 0);
  std::uint64_t resident = 0;
  std::uint64_t ordered = 0;
  for (BlockId id = 0; id < ids; ++id) {
    const Node& node = nodes_[id];
    if (state(node) == kAbsent) continue;
    ++resident;
    if (state(node) == kOrdered) {
      ++ordered;
      const Heap& heap = heaps_[node.group];
      KVP_CHECK(node.place < heap.size && heap.ids[node.place] == id);
      KVP_CHECK(node.place == 0 || !goes_before(id, heap.ids[(node.place - 1) / kArity]));
    }
    if (const BlockId parent = parent_of(node); parent != kNoBlock) ++children[parent];
  }
  for (BlockId id = 0; id < ids; ++id) {
    const Node& node = nodes_[id];
    if (state(node) == kAbsent) continue;
    KVP_CHECK(children[id] == (state(node) == kOrdered ? 0 : node.place));
    KVP_CHECK(state(node) != kInner || node.place > 0);
  }
  for (const Heap& heap : heaps_) ordered -= heap.size;
  KVP_CHECK(ordered == 0 && resident == resident_);
}

}  // namespace kvpool
