// XXH3 by the instructions that are enabled where this is included. Include last, after setting
// KVP_CHECKSUM_KERNEL (the constant to define) and KVP_CHECKSUM_NAME. All of xxHash is static here,
// so that code made for one processor can never be linked into a path for another.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvpool {
namespace {

static_assert(sizeof(XXH3_state_t) == 576 && alignof(XXH3_state_t) == 64,
              "ChecksumStream holds one");

Hash128 from_xxh(XXH128_hash_t hash) { return {hash.low64, hash.high64}; }

Hash128 one_shot(const void* data, std::size_t bytes) {
  return from_xxh(XXH3_128bits(data, bytes));
}

// None of these can fail: xxHash refuses null only, and update() with nothing is left out by
// callers.
void reset(void* state) { (void)XXH3_128bits_reset(static_cast<XXH3_state_t*>(state)); }

void update(void* state, const void* data, std::size_t bytes) {
  (void)XXH3_128bits_update(static_cast<XXH3_state_t*>(state), data, bytes);
}

Hash128 digest(const void* state) {
  return from_xxh(XXH3_128bits_digest(static_cast<const XXH3_state_t*>(state)));
}

}  // namespace

const ChecksumKernel KVP_CHECKSUM_KERNEL = {KVP_CHECKSUM_NAME, one_shot, reset, update, digest};

}  // namespace kvpool
