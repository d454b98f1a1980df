#include <cstddef>
#include <cstdint>
#include <cstring>

#include "block/checksum_kernel.h"

#define KVP_CHECKSUM_NAME "baseline"
#define KVP_CHECKSUM_KERNEL kChecksumBaseline
#include "block/checksum_kernel.inl"
