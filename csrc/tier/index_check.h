// Reads an index file the way LMDB will, and says whether LMDB can be let near it.
//
// LMDB 0.9 believes its file: a page number that is wrong makes it read outside its map, stop the
// process with an assertion, or write over pages that are in use. So every page that can be reached
// is read here first, with pread (a device error is an answer, not a signal).
//
// Promises, of a file that passes and does not change after:
//   1. both meta pages are LMDB's, and the one that counts is known without doubt;
//   2. each page reached from the free list, the main database and the named ones is in the file,
//      is what its place in the tree says, and is reached once; keys are in order and within what
//      the branches above say; nodes fill their page without gap or overlap;
//   3. pages, depths and entries are as many as recorded;
//   4. the free list names pages in the file, in LMDB's order, once, and none that is in use;
//   5. keys and values of "blocks", "spaces" and "classes" have the sizes of their records.
// Not seen here: what keys and values say (an entry has a check of its own), pages that neither the
// trees nor the free list name, and a whole older state of the file put in the place of the newer.
// Cost: 60 ms of one core for a million entries in the page cache.
#pragma once
#include "base/status.h"

namespace kvpool {

// `fd`: readable. The message is to follow the path: "is damaged: page 7: ...".
Result<void> check_index(int fd);

}  // namespace kvpool
