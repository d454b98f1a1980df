#include <cstddef>
#include <cstdint>
#include <cstring>

#include "block/checksum_kernel.h"

#if defined(__x86_64__)
// After the headers: their inline functions stay baseline code, whichever copy the linker keeps.
#pragma GCC target("avx2")
#define KVP_CHECKSUM_NAME "avx2"
#define KVP_CHECKSUM_KERNEL kChecksumAvx2
#include "block/checksum_kernel.inl"
#endif
