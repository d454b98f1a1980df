// Blocks that Python looks at in place: pinned for reading, or reserved for writing.
#pragma once
#include <nanobind/nanobind.h>

#include "bindings/handles.h"

namespace kvpool {

// A list of read-only memoryviews.
nanobind::typed<nanobind::list, nanobind::any> view_blocks(const SpaceHandle& space,
                                                           nanobind::handle keys);
// (status, Reservation or None)
nanobind::typed<nanobind::tuple, nanobind::int_, nanobind::any> reserve_block(
    const SpaceHandle& space, nanobind::handle key, nanobind::handle parent,
    nanobind::handle timeout_s);

}  // namespace kvpool
