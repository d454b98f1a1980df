// Our own bugs stop the process where they are found, before they become wrong bytes.
//
// KVP_CHECK is always on and must stay O(1). Nothing a caller passes may reach it unchecked:
// arguments are validated in bindings/ first.
#pragma once
#include <cstdio>
#include <cstdlib>

namespace kvpool {

[[noreturn]] inline void check_failed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "kvpool: internal check failed: %s (%s:%d)\n", condition, file, line);
  std::abort();
}

}  // namespace kvpool

#define KVP_CHECK(condition) \
  ((condition) ? void(0) : ::kvpool::check_failed(#condition, __FILE__, __LINE__))

#ifdef NDEBUG
#define KVP_DCHECK(condition) void(0)
#else
#define KVP_DCHECK(condition) KVP_CHECK(condition)
#endif
