#include <cstddef>
#include <cstdint>

#include "base/cpu.h"
#include "block/copy_kernel.h"

#if defined(__x86_64__)
// After the headers: their inline functions stay baseline code, whichever copy the linker keeps.
#pragma GCC target("avx2")
#define KVP_COPY_NAME "avx2"
#define KVP_COPY_KERNEL kCopyAvx2
#define KVP_COPY_VECTOR_BYTES 32
#define KVP_COPY_LOAD "vmovdqu"
#define KVP_COPY_STORE "vmovdqu"
#define KVP_COPY_STREAM "vmovntdq"
#include "block/copy_kernel.inl"
#endif
