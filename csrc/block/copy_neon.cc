#include <cstddef>
#include <cstdint>

#include "base/cpu.h"
#include "block/copy_kernel.h"

#if defined(__aarch64__)
#define KVP_COPY_NAME "neon"
#define KVP_COPY_KERNEL kCopyNeon
#define KVP_COPY_VECTOR_BYTES 16
#include "block/copy_kernel.inl"
#endif
