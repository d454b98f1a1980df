#include "block/layout.h"

#include <algorithm>
#include <string>
#include <utility>

namespace kvpool {
namespace {

using std::to_string;

constexpr std::array<std::pair<std::string_view, LayoutKind>, 4> kKinds = {
    {{"nhd", LayoutKind::nhd},
     {"hnd", LayoutKind::hnd},
     {"mla", LayoutKind::mla},
     {"opaque", LayoutKind::opaque}}};

constexpr std::array<std::pair<std::string_view, Role>, 5> kRoles = {{{"page", Role::page},
                                                                      {"kv", Role::kv},
                                                                      {"token", Role::token},
                                                                      {"head", Role::head},
                                                                      {"element", Role::element}}};

// Says what is wrong with one tensor; empty when nothing is.
using Complaint = std::string;

std::uint64_t size_of(const PagedTensor& tensor, Role role) {
  const auto& dims = tensor.dimensions;
  const auto found = std::ranges::find(dims, role, &Dimension::role);
  return found == dims.end() ? 1 : found->size;
}

Complaint check_roles(const PagedTensor& tensor, const PagedLayers& layers) {
  std::array<std::size_t, kRoles.size()> seen{};
  for (const auto& dim : tensor.dimensions) ++seen[static_cast<std::size_t>(dim.role)];
  const auto times = [&](Role role) { return seen[static_cast<std::size_t>(role)]; };

  if (times(Role::page) != 1) {
    return "has " + to_string(times(Role::page)) + " page dimensions; it must have 1";
  }
  if (layers.kind == LayoutKind::opaque) return "";
  for (const Role once : {Role::kv, Role::token, Role::head}) {
    if (times(once) > 1) return "has the dimension " + std::string(role_name(once)) + " twice";
  }
  if (times(Role::token) == 0) return "has no token dimension";
  if (times(Role::element) == 0) return "has no element dimension";
  if (size_of(tensor, Role::token) != layers.page_tokens) {
    return "has " + to_string(size_of(tensor, Role::token)) + " tokens in a page; page_tokens is " +
           to_string(layers.page_tokens);
  }
  const bool is_mla = layers.kind == LayoutKind::mla;
  if (!is_mla && times(Role::head) == 0) return "has no head dimension";
  if (is_mla && size_of(tensor, Role::head) > 1) {
    return "has " + to_string(size_of(tensor, Role::head)) + " heads; mla allows 1";
  }
  const std::uint64_t kv_max = is_mla || layers.split_kv ? 1 : 2;
  if (size_of(tensor, Role::kv) > kv_max) {
    return "has a kv dimension of " + to_string(size_of(tensor, Role::kv)) + "; the limit is " +
           to_string(kv_max);
  }
  return "";
}

Complaint check_sizes(const PagedTensor& tensor) {
  if (tensor.base == nullptr) return "has no memory";
  if (tensor.item_bytes == 0) return "has items of 0 bytes";
  const auto& dims = tensor.dimensions;
  if (dims.size() > kDimensionsMax) {
    return "has " + to_string(dims.size()) + " dimensions; the limit is " +
           to_string(kDimensionsMax);
  }
  for (std::size_t i = 0; i < dims.size(); ++i) {
    const std::string where =
        "dimension " + to_string(i) + " (" + std::string(role_name(dims[i].role)) + ") ";
    if (dims[i].size == 0) return where + "is empty";
    if (dims[i].size > 1 && dims[i].stride_bytes <= 0) {
      return where + "has a stride of " + to_string(dims[i].stride_bytes) +
             " bytes; it must be positive";
    }
  }
  return "";
}

// Smallest stride first, each dimension must step over all that the smaller ones cover. Then no two
// items share a byte, and the last byte of all is the end of what is covered. (Shapes that
// interleave two dimensions without touching are refused as well; no engine has them.)
Complaint check_extent(const PagedTensor& tensor) {
  std::vector<Dimension> dims;
  std::ranges::copy_if(tensor.dimensions, std::back_inserter(dims),
                       [](const Dimension& dim) { return dim.size > 1; });
  std::ranges::sort(dims, {}, &Dimension::stride_bytes);

  std::uint64_t covered_bytes = tensor.item_bytes;
  for (const auto& dim : dims) {
    const auto stride = static_cast<std::uint64_t>(dim.stride_bytes);
    const std::string where = "the " + std::string(role_name(dim.role)) + " dimension ";
    if (stride < covered_bytes) {
      return where + "has a stride of " + to_string(stride) + " bytes and overlaps the " +
             to_string(covered_bytes) + " bytes within";
    }
    std::uint64_t last_step = 0;
    if (__builtin_mul_overflow(dim.size - 1, stride, &last_step) ||
        __builtin_add_overflow(covered_bytes, last_step, &covered_bytes)) {
      return where + "reaches beyond 2^64 bytes";
    }
  }
  std::uint64_t end = 0;
  const auto begin = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(tensor.base));
  if (covered_bytes > tensor.extent_bytes ||
      __builtin_add_overflow(begin, tensor.extent_bytes, &end)) {
    return "reaches over " + to_string(covered_bytes) + " bytes; its memory has " +
           to_string(tensor.extent_bytes);
  }
  return "";
}

Complaint check(const PagedTensor& tensor, const PagedLayers& layers) {
  Complaint complaint = check_sizes(tensor);
  if (complaint.empty()) complaint = check_roles(tensor, layers);
  if (complaint.empty()) complaint = check_extent(tensor);
  return complaint;
}

Complaint check_layers(const PagedLayers& layers) {
  if (layers.tensors.empty()) return "there are no tensors";
  if (layers.page_tokens == 0) return "page_tokens is 0; it must be at least 1";
  if (layers.block_tokens == 0 || layers.block_tokens % layers.page_tokens != 0) {
    return "block_tokens is " + to_string(layers.block_tokens) +
           "; it must be a multiple of page_tokens, " + to_string(layers.page_tokens);
  }
  if (!layers.split_kv) return "";
  if (layers.kind != LayoutKind::nhd && layers.kind != LayoutKind::hnd) {
    return "only nhd and hnd have K and V to split";
  }
  if (layers.tensors.size() % 2 != 0) {
    return "there are " + to_string(layers.tensors.size()) +
           " tensors; K and V apart need an even number";
  }
  return "";
}

// Position of a dimension in the block's bytes; elements and opaque contents keep their own order.
int rank(LayoutKind kind, Role role) {
  if (kind == LayoutKind::opaque) return role == Role::page ? 0 : 1;
  switch (role) {
    case Role::kv:
      return 0;
    case Role::head:
      return kind == LayoutKind::hnd ? 1 : 4;
    case Role::page:
      return 2;
    case Role::token:
      return 3;
    case Role::element:
      return 5;
  }
  return 5;
}

// The dimensions as loops over the tensor, in the order of the block's bytes. The block is dense in
// that order, so only the tensor's strides decide what can be joined.
std::vector<CopyPlan::Loop> loops_of(const PagedTensor& tensor, LayoutKind kind,
                                     std::uint64_t pages_per_block) {
  std::vector<Dimension> dims = tensor.dimensions;
  std::ranges::stable_sort(dims, {}, [&](const Dimension& dim) { return rank(kind, dim.role); });
  // A single page per block is no loop but a place to start from, and parts nothing.
  if (pages_per_block == 1) {
    std::ranges::stable_partition(dims, [](const Dimension& d) { return d.role == Role::page; });
  }
  std::vector<CopyPlan::Loop> loops;
  for (const auto& dim : dims) {
    if (dim.role == Role::page) {
      // Page 0 is the only page where the stride has no meaning.
      loops.push_back({pages_per_block, dim.size > 1 ? dim.stride_bytes : 0, true});
    } else if (dim.size > 1) {
      loops.push_back({dim.size, dim.stride_bytes, false});
    }
  }
  return loops;
}

CopyPlan::Tensor plan_tensor(const PagedTensor& tensor, LayoutKind kind,
                             std::uint64_t pages_per_block) {
  std::vector<CopyPlan::Loop> joined;  // innermost first
  std::uint64_t run_bytes = tensor.item_bytes;
  const auto loops = loops_of(tensor, kind, pages_per_block);
  for (auto loop = loops.rbegin(); loop != loops.rend(); ++loop) {
    const auto stride = static_cast<std::uint64_t>(loop->stride_bytes);
    if (joined.empty() && !loop->over_pages && stride == run_bytes) {
      run_bytes *= loop->count;
    } else if (!joined.empty() && !joined.back().over_pages && !loop->over_pages &&
               stride ==
                   joined.back().count * static_cast<std::uint64_t>(joined.back().stride_bytes)) {
      joined.back().count *= loop->count;
    } else {
      joined.push_back(*loop);
    }
  }

  CopyPlan::Tensor plan;
  plan.base = tensor.base;
  plan.strip.run_bytes = run_bytes;
  if (!joined.front().over_pages) {
    plan.strip.count = joined.front().count;
    plan.strip.stride_bytes = joined.front().stride_bytes;
    joined.erase(joined.begin());
  }
  plan.loop_count = joined.size();
  std::ranges::copy(joined.rbegin(), joined.rend(), plan.loops.begin());
  return plan;
}

// Bytes of a tensor in one block; nothing when that is beyond 2^64.
std::optional<std::uint64_t> bytes_in_block(const CopyPlan::Tensor& tensor) {
  std::uint64_t bytes =
      tensor.strip.run_bytes * tensor.strip.count;  // within the tensor: no overflow
  for (std::size_t i = 0; i < tensor.loop_count; ++i) {
    if (__builtin_mul_overflow(bytes, tensor.loops[i].count, &bytes)) return std::nullopt;
  }
  return bytes;
}

std::unexpected<Error> refuse(std::size_t tensor, const Complaint& complaint) {
  return fail(Code::bad_argument, "tensor " + to_string(tensor) + ": " + complaint);
}

}  // namespace

std::optional<LayoutKind> layout_kind(std::string_view name) {
  for (const auto& [known, kind] : kKinds) {
    if (known == name) return kind;
  }
  return std::nullopt;
}

std::optional<Role> role(std::string_view name) {
  for (const auto& [known, value] : kRoles) {
    if (known == name) return value;
  }
  return std::nullopt;
}

std::string_view role_name(Role role) { return kRoles[static_cast<std::size_t>(role)].first; }

Result<CopyPlan> CopyPlan::make(const PagedLayers& layers) {
  if (const auto complaint = check_layers(layers); !complaint.empty()) {
    return fail(Code::bad_argument, complaint);
  }
  CopyPlan plan;
  plan.pages_per_block_ = layers.block_tokens / layers.page_tokens;
  for (std::size_t i = 0; i < layers.tensors.size(); ++i) {
    const PagedTensor& tensor = layers.tensors[i];
    if (const auto complaint = check(tensor, layers); !complaint.empty()) {
      return refuse(i, complaint);
    }
    const std::uint64_t pages = size_of(tensor, Role::page);
    if (i == 0) plan.page_count_ = pages;
    if (pages != plan.page_count_) {
      return refuse(
          i, "has " + to_string(pages) + " pages; tensor 0 has " + to_string(plan.page_count_));
    }
    plan.tensors_.push_back(plan_tensor(tensor, layers.kind, plan.pages_per_block_));
    const auto bytes = bytes_in_block(plan.tensors_.back());
    if (!bytes || __builtin_add_overflow(plan.block_bytes_, *bytes, &plan.block_bytes_)) {
      return refuse(i, "makes a block of more than 2^64 bytes");
    }
  }
  return plan;
}

Result<void> CopyPlan::check_pages(std::span<const std::int64_t> pages) const {
  for (std::size_t i = 0; i < pages.size(); ++i) {
    if (pages[i] < 0 || static_cast<std::uint64_t>(pages[i]) >= page_count_) {
      return fail(Code::bad_argument, "page " + to_string(i) + " of the table is " +
                                          to_string(pages[i]) + "; there are " +
                                          to_string(page_count_) + " pages");
    }
  }
  return {};
}

}  // namespace kvpool
