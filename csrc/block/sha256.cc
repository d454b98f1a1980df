#include "block/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/check.h"
#include "base/cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvpool {
namespace {

constexpr std::array<std::uint32_t, 8> kInitialState = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

alignas(64) constexpr std::array<std::uint32_t, 64> kRound = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

std::uint32_t load_big_endian(const std::byte* at) {
  std::uint32_t word;
  std::memcpy(&word, at, sizeof word);
  return __builtin_bswap32(word);
}

std::uint32_t stretch(std::uint32_t w16, std::uint32_t w15, std::uint32_t w7, std::uint32_t w2) {
  const std::uint32_t s0 = std::rotr(w15, 7) ^ std::rotr(w15, 18) ^ (w15 >> 3);
  const std::uint32_t s1 = std::rotr(w2, 17) ^ std::rotr(w2, 19) ^ (w2 >> 10);
  return w16 + s0 + w7 + s1;
}

void compress_portable(std::uint32_t* state, const std::byte* chunks, std::size_t count) {
  for (; count > 0; --count, chunks += 64) {
    std::array<std::uint32_t, 64> w;
    for (std::size_t t = 0; t < 16; ++t) w[t] = load_big_endian(chunks + 4 * t);
    for (std::size_t t = 16; t < 64; ++t) w[t] = stretch(w[t - 16], w[t - 15], w[t - 7], w[t - 2]);

    auto [a, b, c, d, e, f, g, h] = std::array<std::uint32_t, 8>{
        state[0], state[1], state[2], state[3], state[4], state[5], state[6], state[7]};
    for (std::size_t t = 0; t < 64; ++t) {
      const std::uint32_t sum1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const std::uint32_t choose = g ^ (e & (f ^ g));
      const std::uint32_t t1 = h + sum1 + choose + kRound[t] + w[t];
      const std::uint32_t sum0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const std::uint32_t majority = (a & b) | (c & (a | b));
      h = g;
      g = f;
      f = e;
      e = d + t1;
      d = c;
      c = b;
      b = a;
      a = t1 + sum0 + majority;
    }
    const std::array<std::uint32_t, 8> out = {a, b, c, d, e, f, g, h};
    for (std::size_t i = 0; i < 8; ++i) state[i] += out[i];
  }
}

#if defined(__x86_64__)
// The instructions keep the eight words in two registers, as (a b e f) and (c d g h), highest lane
// first, and do two rounds each; four message words make one register.
__attribute__((target("sha,sse4.1,ssse3"))) void compress_sha_ni(std::uint32_t* state,
                                                                 const std::byte* chunks,
                                                                 std::size_t count) {
  const __m128i byte_order = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  const auto* words = reinterpret_cast<const __m128i*>(state);
  const __m128i badc = _mm_shuffle_epi32(_mm_loadu_si128(words), 0xb1);
  const __m128i hgfe = _mm_shuffle_epi32(_mm_loadu_si128(words + 1), 0x1b);
  __m128i abef = _mm_alignr_epi8(badc, hgfe, 8);
  __m128i cdgh = _mm_blend_epi16(hgfe, badc, 0xf0);

  for (; count > 0; --count, chunks += 64) {
    const __m128i abef_before = abef;
    const __m128i cdgh_before = cdgh;
    __m128i w[4];
    for (int i = 0; i < 4; ++i) {
      w[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(chunks) + i);
      w[i] = _mm_shuffle_epi8(w[i], byte_order);
    }
#pragma GCC unroll 16
    for (int quad = 0; quad < 16; ++quad) {
      __m128i& now = w[quad & 3];
      const __m128i& next = w[(quad + 1) & 3];
      const __m128i& last = w[(quad + 3) & 3];
      const auto* constants = reinterpret_cast<const __m128i*>(kRound.data()) + quad;
      const __m128i keyed = _mm_add_epi32(now, _mm_load_si128(constants));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, keyed);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(keyed, 0x0e));
      if (quad < 12) {
        const __m128i w7 = _mm_alignr_epi8(last, w[(quad + 2) & 3], 4);
        now = _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(now, next), w7), last);
      }
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }

  const __m128i feba = _mm_shuffle_epi32(abef, 0x1b);
  const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xb1);
  auto* out = reinterpret_cast<__m128i*>(state);
  _mm_storeu_si128(out, _mm_blend_epi16(feba, dchg, 0xf0));
  _mm_storeu_si128(out + 1, _mm_alignr_epi8(dchg, feba, 8));
}
#endif

}  // namespace

Sha256Path sha256_path() { return cpu_features().sha ? Sha256Path::sha_ni : Sha256Path::portable; }

Sha256::Sha256(Sha256Path path) : compress_(compress_portable) {
  if (path == Sha256Path::sha_ni) {
    KVP_CHECK(cpu_features().sha);
#if defined(__x86_64__)
    compress_ = compress_sha_ni;
#endif
  }
  reset();
}

void Sha256::reset() {
  state_ = kInitialState;
  message_bytes_ = 0;
  held_bytes_ = 0;
}

void Sha256::update(const void* data, std::size_t bytes) {
  const auto* from = static_cast<const std::byte*>(data);
  message_bytes_ += bytes;
  if (held_bytes_ > 0) {
    const std::size_t taken = std::min(kChunkBytes - held_bytes_, bytes);
    if (taken > 0) std::memcpy(held_.data() + held_bytes_, from, taken);
    held_bytes_ += taken;
    from += taken;
    bytes -= taken;
    if (held_bytes_ < kChunkBytes) return;
    compress_(state_.data(), held_.data(), 1);
  }
  const std::size_t whole = bytes / kChunkBytes;
  if (whole > 0) compress_(state_.data(), from, whole);
  held_bytes_ = bytes % kChunkBytes;
  if (held_bytes_ > 0) std::memcpy(held_.data(), from + whole * kChunkBytes, held_bytes_);
}

Sha256::Digest Sha256::finish() {
  constexpr std::size_t kLengthAt = kChunkBytes - sizeof(std::uint64_t);
  held_[held_bytes_++] = std::byte{0x80};
  if (held_bytes_ > kLengthAt) {
    std::memset(held_.data() + held_bytes_, 0, kChunkBytes - held_bytes_);
    compress_(state_.data(), held_.data(), 1);
    held_bytes_ = 0;
  }
  std::memset(held_.data() + held_bytes_, 0, kLengthAt - held_bytes_);
  const std::uint64_t bits = __builtin_bswap64(message_bytes_ * 8);
  std::memcpy(held_.data() + kLengthAt, &bits, sizeof bits);
  compress_(state_.data(), held_.data(), 1);

  Digest digest;
  for (std::size_t i = 0; i < state_.size(); ++i) {
    const std::uint32_t word = __builtin_bswap32(state_[i]);
    std::memcpy(digest.data() + 4 * i, &word, sizeof word);
  }
  return digest;
}

}  // namespace kvpool
