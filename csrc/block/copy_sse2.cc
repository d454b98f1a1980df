#include <cstddef>
#include <cstdint>

#include "base/cpu.h"
#include "block/copy_kernel.h"

#if defined(__x86_64__)
#define KVP_COPY_NAME "sse2"
#define KVP_COPY_KERNEL kCopySse2
#define KVP_COPY_VECTOR_BYTES 16
#define KVP_COPY_LOAD "movdqu"
#define KVP_COPY_STORE "movdqu"
#define KVP_COPY_STREAM "movntdq"
#include "block/copy_kernel.inl"
#endif
