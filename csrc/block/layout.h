// Paged KV tensors of an engine <-> the contiguous bytes of a block.
//
// An engine keeps KV in pages of `page_tokens` tokens, scattered by a block table over one tensor
// per layer (or a pair: K and V), in whatever order of dimensions its kernels like. A block has one
// canonical order, so that it means the same to every engine, page size and set of strides:
//
//   layers in the order given, and in each layer
//     nhd     [kv][token][head][element]
//     hnd     [kv][head][token][element]
//     mla     [token][element]
//     opaque  [page][all other dimensions as listed]
//
// Tokens run across the pages of the block. `kv` is K then V; a tensor without that dimension has
// one.
//
// A CopyPlan is made once for a set of tensors: everything about shapes is checked there, against
// the memory each tensor owns, and dimensions are joined into the longest runs that are contiguous
// on both sides. Moving a block then only needs its page numbers, which are checked on every call.
//
// Relies on: the tensors outlive the plan and keep their addresses.
// Promises:  no byte outside the tensors and the block is touched, whatever the shapes, strides and
//            page numbers; no allocation per block; no libc call per run.
// Pure; plans are immutable and may be shared by threads.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "block/checksum.h"
#include "block/key.h"

namespace kvpool {

enum class LayoutKind : std::uint8_t { nhd, hnd, mla, opaque };
enum class Role : std::uint8_t { page, kv, token, head, element };

std::optional<LayoutKind> layout_kind(std::string_view name);  // "nhd", "hnd", "mla", "opaque"
std::optional<Role> role(std::string_view name);  // "page", "kv", "token", "head", "element"
std::string_view role_name(Role role);

inline constexpr std::size_t kDimensionsMax = 5;

struct Dimension {
  Role role = Role::page;
  std::uint64_t size = 0;
  std::int64_t stride_bytes = 0;  // of no meaning where size is 1
};

struct PagedTensor {
  std::byte* base = nullptr;
  std::uint64_t extent_bytes = 0;  // memory that may be touched, from base on
  std::uint64_t item_bytes = 0;
  // One page; token, head and kv as the kind has them; `element` may come several times.
  std::vector<Dimension> dimensions;
};

struct PagedLayers {
  LayoutKind kind = LayoutKind::nhd;
  std::uint64_t block_tokens = 0;  // a multiple of page_tokens
  std::uint64_t page_tokens = 0;
  bool split_kv = false;  // K and V are tensors of their own: K0, V0, K1, V1, ...
  std::vector<PagedTensor> tensors;
};

class CopyPlan {
 public:
  // bad_argument names the tensor and the dimension, the value and the limit.
  static Result<CopyPlan> make(const PagedLayers& layers);

  std::uint64_t block_bytes() const { return block_bytes_; }
  std::uint64_t pages_per_block() const { return pages_per_block_; }
  std::uint64_t page_count() const { return page_count_; }  // page numbers are below this

  // Any number of page numbers, such as a whole block table. bad_argument names the first position
  // that is out of range, its value and the limit.
  Result<void> check_pages(std::span<const std::int64_t> pages) const;

  // What follows serves the functions below.
  struct Loop {
    std::uint64_t count = 0;
    std::int64_t stride_bytes = 0;
    bool over_pages = false;  // step i goes to pages[i] * stride_bytes
  };
  struct Strip {  // `count` runs, contiguous in the block, a stride apart in the tensor
    std::uint64_t run_bytes = 0;
    std::uint64_t count = 1;
    std::int64_t stride_bytes = 0;
  };
  struct Tensor {
    std::byte* base = nullptr;
    Strip strip;                             // innermost
    std::array<Loop, kDimensionsMax> loops;  // outermost first, in the order of the block's bytes
    std::size_t loop_count = 0;
  };
  std::span<const Tensor> tensors() const { return tensors_; }

 private:
  CopyPlan() = default;

  std::uint64_t block_bytes_ = 0;
  std::uint64_t pages_per_block_ = 0;
  std::uint64_t page_count_ = 0;
  std::vector<Tensor> tensors_;
};

// In all of these: `pages` are the pages_per_block() page numbers of one block in token order;
// `block` is block_bytes() long. Nothing is touched when a page number is refused.

// Pages -> block. The block may be under the eyes of racing readers (block/copy.h).
Result<void> gather(const CopyPlan& plan, std::span<const std::int64_t> pages,
                    std::span<std::byte> block);

// As gather, and the checksum of what was stored, in the same pass (see copy_with_checksum).
Result<Hash128> gather_with_checksum(const CopyPlan& plan, std::span<const std::int64_t> pages,
                                     std::span<std::byte> block, Stores stores);

// Block -> pages.
Result<void> scatter(const CopyPlan& plan, std::span<const std::int64_t> pages,
                     std::span<const std::byte> block);

// Asked whether the block still is what it was; a bare function, as it is asked in the inner loop.
struct StillValid {
  bool (*ask)(void* context) = nullptr;
  void* context = nullptr;
};
inline constexpr std::size_t kValidityBytes = 256 << 10;

// As scatter, from a block that may be evicted meanwhile. Asks after every kValidityBytes and after
// the last byte; false: it was told to stop, and the pages hold nothing of value.
Result<bool> scatter_while_valid(const CopyPlan& plan, std::span<const std::int64_t> pages,
                                 std::span<const std::byte> block, const StillValid& valid);

}  // namespace kvpool
