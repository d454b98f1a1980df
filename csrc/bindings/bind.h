// One function per file of bindings; module.cc calls them all.
#pragma once
#include <nanobind/nanobind.h>

namespace kvpool {

void bind_keys(nanobind::module_& m);
void bind_replay(nanobind::module_& m);
void bind_cluster_replay(nanobind::module_& m);
void bind_node(nanobind::module_& m);
void bind_observe(nanobind::module_& m);
void bind_space(nanobind::module_& m);
void bind_layers(nanobind::module_& m);
void bind_pinned(nanobind::module_& m);
void bind_remote(nanobind::module_& m);
void bind_staged(nanobind::module_& m);
void bind_server(nanobind::module_& m);
void bind_cluster(nanobind::module_& m);
void bind_changes(nanobind::module_& m);
void bind_ssd_scan(nanobind::module_& m);
void bind_copy_floor(nanobind::module_& m);
void bind_raw_disk(nanobind::module_& m);
void bind_ssd_sizes(nanobind::module_& m);

}  // namespace kvpool
