// XXH3 once per instruction set, chosen once; checksum.cc and the tests are the only users.
#pragma once
#include <cstddef>
#include <span>

#include "block/key.h"

namespace kvpool {

// `state` is kStateBytes of ChecksumStream, aligned to 64 bytes.
struct ChecksumKernel {
  const char* name;
  Hash128 (*one_shot)(const void* data, std::size_t bytes);
  void (*reset)(void* state);
  void (*update)(void* state, const void* data, std::size_t bytes);
  Hash128 (*digest)(const void* state);
};

// Those this processor can run, slowest first.
std::span<const ChecksumKernel* const> checksum_kernels();

extern const ChecksumKernel kChecksumBaseline;
#if defined(__x86_64__)
extern const ChecksumKernel kChecksumAvx2;
extern const ChecksumKernel kChecksumAvx512;
#endif

}  // namespace kvpool
