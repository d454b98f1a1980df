// kvpool._core: what the Python package is built on. Users import kvpool.
#include "bindings/bind.h"
#include "bindings/raise.h"

NB_MODULE(_core, m) {
  m.doc() = "The compiled core of kvpool. Its names may change; use `import kvpool`.";
  kvpool::register_translator();
  kvpool::bind_keys(m);
  kvpool::bind_replay(m);
  kvpool::bind_layers(m);
  kvpool::bind_pinned(m);
  kvpool::bind_node(m);
  kvpool::bind_space(m);
}
