// The pages of an LMDB 0.9 file, as liblmdb writes them on a 64-bit little-endian machine.
//
// Page p lies at byte p * 4096. Pages 0 and 1 are meta pages, written in turn: the one with the
// higher transaction id counts, and it is page (id & 1). Everything hangs from two trees in it: the
// free list, and the main database, whose records are the named databases.
// liblmdb keeps these structs to itself; they have not changed since 0.9.0 (data version 1).
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvpool::lmdb {

inline constexpr std::uint64_t kPageBytes = 4096;
inline constexpr std::uint32_t kMagic = 0xBEEFC0DE;
inline constexpr std::uint32_t kVersion = 1;
inline constexpr std::uint64_t kNoPage = ~0ull;
inline constexpr std::size_t kKeyBytesMax = 511;
inline constexpr std::size_t kDepthMax = 32;  // more than a cursor can climb

// PageHeader::flags
inline constexpr std::uint16_t kBranch = 0x01, kLeaf = 0x02, kOverflow = 0x04, kMeta = 0x08;
// NodeHeader::flags in a leaf
inline constexpr std::uint16_t kBigData = 0x01, kSubData = 0x02;
// Tree::flags that change how keys are compared or values lie
inline constexpr std::uint16_t kOrderFlags = 0x7e, kIntegerKey = 0x08;

struct PageHeader {
  std::uint64_t number = 0;
  std::uint16_t pad = 0, flags = 0;
  // Branch and leaf: end of the offsets behind the header, start of the nodes. Overflow: as one
  // u32, the pages of the run.
  std::uint16_t lower = 0, upper = 0;
  std::uint32_t run_pages() const { return lower | static_cast<std::uint32_t>(upper) << 16; }
};
static_assert(sizeof(PageHeader) == 16);

struct NodeHeader {
  std::uint16_t low = 0, high = 0;
  std::uint16_t flags = 0, key_bytes = 0;
  // Leaf: bytes of the value. Branch: number of the child.
  std::uint32_t value_bytes() const { return low | static_cast<std::uint32_t>(high) << 16; }
  std::uint64_t child() const { return value_bytes() | static_cast<std::uint64_t>(flags) << 32; }
};
static_assert(sizeof(NodeHeader) == 8);

struct Tree {
  std::uint32_t pad = 0;  // in the free list's: the page size
  std::uint16_t flags = 0, depth = 0;
  std::uint64_t branch_pages = 0, leaf_pages = 0, overflow_pages = 0, entries = 0;
  std::uint64_t root = kNoPage;
};
static_assert(sizeof(Tree) == 48);

struct Meta {  // behind the page header
  std::uint32_t magic = 0, version = 0;
  std::uint64_t address = 0, map_bytes = 0;
  Tree free_list, main;
  std::uint64_t last_page = 0, transaction = 0;
};
static_assert(sizeof(Meta) == 136);

template <typename T>
T load(const std::byte* at) {
  T value;
  std::memcpy(static_cast<void*>(&value), at, sizeof(T));
  return value;
}

}  // namespace kvpool::lmdb
