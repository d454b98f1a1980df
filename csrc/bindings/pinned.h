// Blocks that Python looks at in place: pinned for reading, or reserved for writing.
#pragma once
#include <nanobind/nanobind.h>

#include "bindings/handles.h"

namespace kvpool {

nanobind::object view_blocks(const SpaceHandle& space, nanobind::handle keys);
nanobind::object reserve_block(const SpaceHandle& space, nanobind::handle key,
                               nanobind::handle parent, nanobind::handle timeout_s);

}  // namespace kvpool
