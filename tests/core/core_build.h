// Which build of the tests this is. Work is bounded by counts, and a sanitizer's are smaller.
#pragma once
#include <cstddef>

namespace kvpool::test {

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kUnderTsan = true;
#else
inline constexpr bool kUnderTsan = false;
#endif
#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kUnderAsan = true;
#else
inline constexpr bool kUnderAsan = false;
#endif

// `count` as shipped; a quarter of it under ASan, a twelfth under TSan, about as much time.
constexpr std::size_t scaled(std::size_t count) {
  return kUnderTsan ? count / 12 + 1 : kUnderAsan ? count / 4 + 1 : count;
}

}  // namespace kvpool::test
