#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

// What ThreadSanitizer cannot know of. A read of the SSD goes straight into a slot of the arena.
// Somebody may still be copying, without a lock, what lay in that slot before: he finds another
// generation afterwards and throws his copy away. Where this process itself writes into slots, it
// does so with atomic stores (block/copy.h); what a kernel writes for pread() is taken for a plain
// store.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() {
  return "race:kvpool::SlabFile::read_at\n"
         "race:kvpool::SlabFile::read_run\n"
         "race:kvpool::receive_some\n";
}
