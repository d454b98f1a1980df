// kvpool._core: what the Python package is built on. Users import kvpool.
#include "bindings/bind.h"
#include "bindings/gil.h"
#include "bindings/raise.h"

NB_MODULE(_core, m) {
  m.doc() = "The compiled core of kvpool. Its names may change; use `import kvpool`.";
  // What a daemon thread still holds at exit is no leak, and a library says nothing on its own.
  nanobind::set_leak_warnings(false);
  kvpool::register_translator();
  kvpool::watch_forks_for_gil_sections();
  m.def(
      "end_gil_sections", [] { return kvpool::end_gil_sections(std::chrono::seconds(10)); },
      "At exit: wait until no thread is inside a call without the GIL, 10 s at most.");
  kvpool::bind_keys(m);
  kvpool::bind_replay(m);
  kvpool::bind_cluster_replay(m);
  kvpool::bind_layers(m);
  kvpool::bind_pinned(m);
  kvpool::bind_ssd_scan(m);
  kvpool::bind_node(m);
  kvpool::bind_observe(m);
  kvpool::bind_space(m);
  kvpool::bind_server(m);
  kvpool::bind_cluster(m);
  kvpool::bind_changes(m);
  kvpool::bind_remote(m);
  kvpool::bind_staged(m);
  kvpool::bind_copy_floor(m);
  kvpool::bind_raw_disk(m);
  kvpool::bind_ssd_sizes(m);
}
