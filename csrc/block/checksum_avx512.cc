#include <cstddef>
#include <cstdint>
#include <cstring>

#include "block/checksum_kernel.h"

#if defined(__x86_64__)
// After the headers: their inline functions stay baseline code, whichever copy the linker keeps.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#define KVP_CHECKSUM_NAME "avx512"
#define KVP_CHECKSUM_KERNEL kChecksumAvx512
#include "block/checksum_kernel.inl"
#endif
