#include "bindings/layers.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <vector>

#include "bindings/bind.h"
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
      .def_prop_ro("page_count", [](const Layers& l) { return l.plan().page_count(); });
}

}  // namespace kvpool
