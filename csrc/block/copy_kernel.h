// One copy routine per instruction set, chosen once; copy.cc and the tests are the only users.
#pragma once
#include <cstddef>
#include <span>

#include "block/copy.h"

namespace kvpool {

// Both sides of every routine may be shared: no byte is touched by compiled code.
struct CopyKernel {
  const char* name;
  void (*copy)(void* dst, const void* src, std::size_t bytes);
  void (*stream)(void* dst, const void* src, std::size_t bytes);
  void (*copy_runs)(void* dst, const void* src, const Runs& runs);
};

// Those this processor can run, slowest first; empty where there is no assembly for it.
//
// There is none for AVX-512: on Zen 4 it was nowhere faster than AVX2 with the destination aligned
// (4 KiB to 4 MiB, hot and cold, aligned and not), and elsewhere it lowers the clock.
std::span<const CopyKernel* const> copy_kernels();

#if defined(__x86_64__)
extern const CopyKernel kCopySse2;
extern const CopyKernel kCopyAvx2;
#elif defined(__aarch64__)
extern const CopyKernel kCopyNeon;
#endif

}  // namespace kvpool
