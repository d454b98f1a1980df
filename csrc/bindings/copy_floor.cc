// Our own copy without what stands around it in a get: the floor that `kvpool bench shm` prints
// beside it, out of the same pages, and nothing else.
#include <nanobind/nanobind.h>

#include <cstdint>
#include <cstring>

#include "bindings/bind.h"
#include "bindings/gil.h"
#include "bindings/memory.h"
#include "bindings/raise.h"
#include "block/copy.h"

namespace kvpool {
namespace {

namespace nb = nanobind;
using nb::literals::operator""_a;

void copy_blocks(nb::handle out, nb::handle addresses, std::uint64_t block_bytes) {
  const Memory target(out, Access::write, "out");
  const Memory sources(addresses, Access::read, "addresses");
  const std::uint64_t count = sources.bytes() / sizeof(std::uint64_t);
  if (block_bytes == 0 || target.bytes() / block_bytes < count)
    raise_bad_argument("out has no room for so many blocks");
  const GilReleased released;
  for (std::uint64_t i = 0; i < count; ++i) {
    std::uint64_t from;
    std::memcpy(&from, sources.data() + i * sizeof from, sizeof from);
    racy_copy(target.data() + i * block_bytes, reinterpret_cast<const void*>(from), block_bytes);
  }
}

}  // namespace

void bind_copy_floor(nb::module_& m) {
  m.def("copy_blocks", &copy_blocks, "out"_a.none(), "addresses"_a.none(), "block_bytes"_a,
        "For benches: copy blocks from `addresses` (packed 64-bit numbers, taken on trust) into\n"
        "`out`, one after the other, by the routine that a get uses. Releases the GIL.");
}

}  // namespace kvpool
