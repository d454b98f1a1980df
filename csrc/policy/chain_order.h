// The order in which blocks would go, kept so that none goes before the blocks that continue it.
//
// Every policy ranks its blocks with one 64-bit number and leaves the rest to this class: one heap
// per group over the blocks that may go (no resident children, not taken). A policy without a
// chain rule inserts every block without a parent.
//
// Relies on: ids below `blocks_max`; one caller at a time.
// Promises:  1. first() is the smallest rank of its group, on equal ranks the deeper block, then
//               the smaller id: the order of calls does not matter, so replays repeat;
//            2. a block with resident children is never first();
//            3. O(log n) a call at any depth and with any number of children, also to erase an
//               inner block; no allocation but pages: 24 bytes a block and 4 in its heap.
//
// How an erased parent is told from the next owner of its id: an epoch is stamped on every insert,
// and moves on when a block leaves children behind. A true parent is never younger than its child,
// the next owner of its id always is.
#pragma once
#include <cstdint>
#include <vector>

#include "base/lazy_array.h"
#include "policy/policy.h"

namespace kvpool {

class ChainOrder {
 public:
  explicit ChainOrder(BlockId blocks_max);

  void insert(BlockId id, BlockId parent, Group group, std::uint64_t rank);
  void erase(BlockId id);
  // The block may go before its children: it has a copy elsewhere. They forget it.
  void let_go(BlockId id);

  Group group(BlockId id) const { return nodes_[id].group; }
  // In any state; rank, children and what was taken stay.
  void set_group(BlockId id, Group group);
  // The block it was inserted behind, kNoBlock when that is gone.
  BlockId parent(BlockId id) const { return parent_of(nodes_[id]); }
  std::uint32_t depth(BlockId id) const { return static_cast<std::uint32_t>(nodes_[id].depth); }
  std::uint64_t rank(BlockId id) const { return nodes_[id].rank; }
  void set_rank(BlockId id, std::uint64_t rank);

  // One bit a block for the policy's own use; off after insert().
  bool is_marked(BlockId id) const { return nodes_[id].is_marked; }
  void mark(BlockId id) { nodes_[id].is_marked = 1; }

  // Takes the first block of a group out of the order until give_back() or erase().
  BlockId take_first(Group group);
  void give_back(BlockId id);
  // kNoBlock when no block of the group may go.
  BlockId first(Group group) const;

  bool is_resident(BlockId id) const;
  std::uint64_t resident() const { return resident_; }
  std::size_t bytes() const;
  void check_invariants() const;

 private:
  enum State : std::uint32_t { kAbsent = 0, kOrdered = 1, kInner = 2, kTaken = 3 };

  struct Node {
    std::uint64_t rank;
    std::uint64_t epoch : 35;  // of its insert
    std::uint64_t depth : 16;  // blocks before it in its chain; stays at the top value when deeper
    std::uint64_t group : 12;
    std::uint64_t is_marked : 1;
    BlockId parent;  // may name an id that has another owner by now: see parent_of()
    std::uint32_t state : 2;
    std::uint32_t place : 30;  // kOrdered: index in its heap; else: how many resident children
  };
  static_assert(sizeof(Node) == 24);
  static constexpr std::uint64_t kEpochMax = (std::uint64_t{1} << 35) - 1;
  static constexpr std::uint64_t kDepthMax = (std::uint64_t{1} << 16) - 1;

  struct Heap {
    LazyArray<BlockId> ids;
    std::uint32_t size = 0;
  };

  static State state(const Node& node) { return static_cast<State>(node.state); }
  static void settle(Node& node, State state, std::uint32_t place);

  bool goes_before(BlockId a, BlockId b) const;
  BlockId parent_of(const Node& node) const;
  void add_child(BlockId parent);
  void drop_child(BlockId parent);

  Heap& heap_of(Group group);
  void push(BlockId id);
  void pull(BlockId id);
  void sift_up(Heap& heap, std::uint32_t at, BlockId id);
  void sift_down(Heap& heap, std::uint32_t at, BlockId id);
  void put_at(Heap& heap, std::uint32_t at, BlockId id);

  LazyArray<Node> nodes_;
  std::vector<Heap> heaps_;
  std::uint64_t resident_ = 0;
  std::uint64_t epoch_ = 0;
  bool is_epoch_used_ = false;  // some insert carries epoch_
};

}  // namespace kvpool
