#include "bindings/layers.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "base/check.h"
#include "bindings/bind.h"
#include "bindings/gil.h"
#include "bindings/memory.h"
#include "bindings/raise.h"

namespace kvpool {
namespace {

using nb::literals::operator""_a;

// address, bytes from there on, bytes per item, shape, strides in bytes
using TensorFacts = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t,
                               std::vector<std::uint64_t>, std::vector<std::int64_t>>;

PagedTensor paged_tensor(const TensorFacts& facts, const std::vector<std::string>& roles) {
  const auto& [address, extent, item, shape, strides] = facts;
  if (shape.size() != roles.size() || strides.size() != roles.size())
    raise_bad_argument("a layer has " + std::to_string(shape.size()) + " dimensions; dims names " +
                       std::to_string(roles.size()));
  PagedTensor tensor;
  tensor.base = reinterpret_cast<std::byte*>(address);
  tensor.extent_bytes = extent;
  tensor.item_bytes = item;
  for (std::size_t i = 0; i < roles.size(); ++i) {
    const auto known = role(roles[i]);
    if (!known)
      raise_bad_argument("dims has '" + roles[i] + "'; it can have page, kv, token, head, element");
    tensor.dimensions.push_back({*known, shape[i], strides[i]});
  }
  return tensor;
}

struct LayersRequest {
  std::string layout;
  std::uint64_t block_tokens, page_tokens;
  bool split_kv;
};

Layers* make_layers(const LayersRequest& request, const std::vector<TensorFacts>& tensors,
                    const std::vector<std::string>& dims, nb::object keep, bool writable) {
  const auto kind = layout_kind(request.layout);
  if (!kind)
    raise_bad_argument("layout is '" + request.layout + "'; it can be nhd, hnd, mla, opaque");
  PagedLayers layers{*kind, request.block_tokens, request.page_tokens, request.split_kv, {}};
  for (const TensorFacts& facts : tensors) layers.tensors.push_back(paged_tensor(facts, dims));
  return new Layers(request.layout, value_or_raise(CopyPlan::make(layers)), std::move(keep),
                    writable);
}

std::vector<std::int64_t> pages_of(const Layers& layers, nb::handle block_table,
                                   std::size_t blocks) {
  const CopyPlan& plan = layers.plan();
  std::vector<std::int64_t> pages =
      integers(block_table, "block_table", blocks * plan.pages_per_block());
  value_or_raise(plan.check_pages(pages));
  return pages;
}

// Calls move(pages of the block, its memory) for each, without the GIL.
template <typename Move>
void for_each_block(const Layers& layers, std::span<const std::int64_t> pages, const Places& places,
                    Move move) {
  const std::size_t in_block = layers.plan().pages_per_block();
  const GilReleased released;
  for (std::size_t i = 0; (i + 1) * in_block <= pages.size(); ++i)
    KVP_CHECK(move(pages.subspan(i * in_block, in_block), places.at(i)).has_value());
}

void gather_blocks(const Layers& layers, std::size_t blocks, nb::handle block_table, nb::handle out,
                   nb::handle stride) {
  const std::size_t bytes = layers.plan().block_bytes();
  const auto pages = pages_of(layers, block_table, blocks);
  const Places places(out, Access::write, "out", {blocks, bytes, stride, nb::none()});
  for_each_block(layers, pages, places, [&](auto block_pages, std::byte* block) {
    return gather(layers.plan(), block_pages, {block, bytes});
  });
}

void scatter_blocks(const Layers& layers, std::size_t blocks, nb::handle block_table,
                    nb::handle data, nb::handle stride) {
  const std::size_t bytes = layers.plan().block_bytes();
  if (!layers.writable())
    raise_bad_argument("a layer is read-only; scatter writes into all of them");
  const auto pages = pages_of(layers, block_table, blocks);
  const Places places(data, Access::read, "data", {blocks, bytes, stride, nb::none()});
  for_each_block(layers, pages, places, [&](auto block_pages, const std::byte* block) {
    return scatter(layers.plan(), block_pages, {block, bytes});
  });
}

}  // namespace

void bind_layers(nb::module_& m) {
  nb::class_<Layers>(m, "Layers", "Paged KV tensors, planned once for save and load.")
      .def_static(
          "make",
          [](std::string layout, std::uint64_t block_tokens, std::uint64_t page_tokens,
             bool split_kv, const std::vector<TensorFacts>& tensors,
             const std::vector<std::string>& dims, nb::object keep, bool writable) {
            return make_layers({std::move(layout), block_tokens, page_tokens, split_kv}, tensors,
                               dims, std::move(keep), writable);
          },
          "layout"_a, "block_tokens"_a, "page_tokens"_a, "split_kv"_a, "tensors"_a, "dims"_a,
          "keep"_a, "writable"_a)
      .def_prop_ro("layout", [](const Layers& l) { return l.layout(); })
      .def_prop_ro("block_bytes", [](const Layers& l) { return l.plan().block_bytes(); })
      .def_prop_ro("pages_per_block", [](const Layers& l) { return l.plan().pages_per_block(); })
      .def_prop_ro("page_count", [](const Layers& l) { return l.plan().page_count(); })
      .def("gather", &gather_blocks, "blocks"_a, "block_table"_a.none(), "out"_a.none(),
           "stride"_a = nb::none(),
           "Copy `blocks` blocks out of the pages, in the order of bytes that save() stores.\n\n"
           "block_table: page numbers in token order, pages_per_block for each block. out: one\n"
           "writable buffer with block i at i * stride bytes (stride: block_bytes unless given), "
           "or\n"
           "a list of buffers of block_bytes each. Raises BadArgument; then nothing was written.\n"
           "Releases the GIL; cost: one copy.")
      .def("scatter", &scatter_blocks, "blocks"_a, "block_table"_a.none(), "data"_a.none(),
           "stride"_a = nb::none(),
           "Copy `blocks` blocks into the pages: gather() backwards, with the same arguments.");
}

}  // namespace kvpool
