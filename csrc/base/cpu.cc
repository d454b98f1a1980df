#include "base/cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace kvpool {
namespace {

CpuFeatures detect() {
  CpuFeatures found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  found.avx2 = __builtin_cpu_supports("avx2");
  found.avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  // g++ 12 has no names for these two bits of leaf 7.
  constexpr unsigned kStringsBit = 1u << 9;
  constexpr unsigned kShaBit = 1u << 29;
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0) {
    found.fast_strings = (ebx & kStringsBit) != 0;
    found.sha =
        (ebx & kShaBit) != 0 && __builtin_cpu_supports("ssse3") && __builtin_cpu_supports("sse4.1");
  }
#endif
  return found;
}

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures found = detect();
  return found;
}

}  // namespace kvpool
