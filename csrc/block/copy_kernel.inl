// The copy loops, once for every vector width. Include last, after setting
//   KVP_COPY_KERNEL, KVP_COPY_NAME                     the constant to define, and its name
//   KVP_COPY_VECTOR_BYTES                              the width
//   KVP_COPY_LOAD, KVP_COPY_STORE, KVP_COPY_STREAM     the instructions, on x86
// Everything else here has internal linkage, so that code made for one processor can never be
// linked into a path for another.

namespace kvpool {
namespace {

#define KVP_INLINE inline __attribute__((always_inline))

constexpr std::size_t kVectorBytes = KVP_COPY_VECTOR_BYTES;
constexpr std::size_t kStepBytes = 8 * kVectorBytes;  // loaded whole, then stored whole
constexpr std::size_t kLineBytes = 64;

using Vector = char __attribute__((vector_size(kVectorBytes)));

template <std::size_t kBytes>
using Bytes = const char[kBytes];

#if defined(__x86_64__)

KVP_INLINE Vector load(const char* at) {
  Vector v;
  asm volatile(KVP_COPY_LOAD " %1, %0"
               : "=x"(v)
               : "m"(*reinterpret_cast<Bytes<kVectorBytes>*>(at)));
  return v;
}

KVP_INLINE void store(char* at, Vector v) {
  asm volatile(KVP_COPY_STORE " %1, %0"
               : "=m"(*reinterpret_cast<char (*)[kVectorBytes]>(at))
               : "x"(v));
}

// Two at a time, since ARM has no such store of one.
KVP_INLINE void store_past_cache(char* at, Vector v, Vector next) {
  asm volatile(KVP_COPY_STREAM " %1, %0"
               : "=m"(*reinterpret_cast<char (*)[kVectorBytes]>(at))
               : "x"(v));
  asm volatile(KVP_COPY_STREAM " %1, %0"
               : "=m"(*reinterpret_cast<char (*)[kVectorBytes]>(at + kVectorBytes))
               : "x"(next));
}

// A general register of 1, 2, 4 or 8 bytes.
template <typename Word>
KVP_INLINE void move_word(char* dst, const char* src) {
  Word word;
  asm volatile("mov %1, %0" : "=r"(word) : "m"(*reinterpret_cast<Bytes<sizeof(Word)>*>(src)));
  asm volatile("mov %1, %0" : "=m"(*reinterpret_cast<char (*)[sizeof(Word)]>(dst)) : "r"(word));
}

#else

// "Q": an address in a register and nothing else, which every one of these takes.
KVP_INLINE Vector load(const char* at) {
  Vector v;
  asm volatile("ldr %q0, %1" : "=w"(v) : "Q"(*reinterpret_cast<Bytes<kVectorBytes>*>(at)));
  return v;
}

KVP_INLINE void store(char* at, Vector v) {
  asm volatile("str %q1, %0" : "=Q"(*reinterpret_cast<char (*)[kVectorBytes]>(at)) : "w"(v));
}

KVP_INLINE void store_past_cache(char* at, Vector v, Vector next) {
  asm volatile("stnp %q1, %q2, %0"
               : "=Q"(*reinterpret_cast<char (*)[2 * kVectorBytes]>(at))
               : "w"(v), "w"(next));
}

// A general register of 1, 2, 4 or 8 bytes.
template <typename Word>
KVP_INLINE void move_word(char* dst, const char* src) {
  std::uint64_t word;
  const auto& from = *reinterpret_cast<Bytes<sizeof(Word)>*>(src);
  auto& to = *reinterpret_cast<char (*)[sizeof(Word)]>(dst);
  if constexpr (sizeof(Word) == 8) {
    asm volatile("ldr %x0, %1" : "=r"(word) : "Q"(from));
    asm volatile("str %x1, %0" : "=Q"(to) : "r"(word));
  } else if constexpr (sizeof(Word) == 4) {
    asm volatile("ldr %w0, %1" : "=r"(word) : "Q"(from));
    asm volatile("str %w1, %0" : "=Q"(to) : "r"(word));
  } else {
    static_assert(sizeof(Word) == 1);
    asm volatile("ldrb %w0, %1" : "=r"(word) : "Q"(from));
    asm volatile("strb %w1, %0" : "=Q"(to) : "r"(word));
  }
}

#endif

KVP_INLINE void move_16(char* dst, const char* src) {
  move_word<std::uint64_t>(dst, src);
  move_word<std::uint64_t>(dst + 8, src + 8);
}

template <std::size_t kVectors, bool kPastCache = false>
KVP_INLINE void move_vectors(char* dst, const char* src) {
  Vector held[kVectors];
#pragma GCC unroll 8
  for (std::size_t i = 0; i < kVectors; ++i) held[i] = load(src + i * kVectorBytes);
  if constexpr (kPastCache) {
    static_assert(kVectors % 2 == 0);
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kVectors; i += 2)
      store_past_cache(dst + i * kVectorBytes, held[i], held[i + 1]);
  } else {
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kVectors; ++i) store(dst + i * kVectorBytes, held[i]);
  }
}

// Fewer bytes than a vector. The two moves overlap where the length is not a power of two: the
// second reads again what the first has read, and whoever raced us in between is found by the
// generation like any other.
KVP_INLINE void move_few(char* dst, const char* src, std::size_t bytes) {
  if (bytes >= 16) {
    move_16(dst, src);
    move_16(dst + bytes - 16, src + bytes - 16);
  } else if (bytes >= 8) {
    move_word<std::uint64_t>(dst, src);
    move_word<std::uint64_t>(dst + bytes - 8, src + bytes - 8);
  } else if (bytes >= 4) {
    move_word<std::uint32_t>(dst, src);
    move_word<std::uint32_t>(dst + bytes - 4, src + bytes - 4);
  } else {
    for (; bytes > 0; --bytes, ++dst, ++src) move_word<std::uint8_t>(dst, src);
  }
}

template <std::size_t kVectors>
KVP_INLINE void move_both_ends(char* dst, const char* src, std::size_t bytes) {
  constexpr std::size_t kEnd = kVectors * kVectorBytes;
  move_vectors<kVectors>(dst, src);
  move_vectors<kVectors>(dst + bytes - kEnd, src + bytes - kEnd);
}

// Fewer bytes than a step.
KVP_INLINE void move_short(char* dst, const char* src, std::size_t bytes) {
  if (bytes >= 4 * kVectorBytes) {
    move_both_ends<4>(dst, src, bytes);
  } else if (bytes >= 2 * kVectorBytes) {
    move_both_ends<2>(dst, src, bytes);
  } else if (bytes >= kVectorBytes) {
    move_both_ends<1>(dst, src, bytes);
  } else {
    move_few(dst, src, bytes);
  }
}

// String instructions do not fetch the lines that they will overwrite, which saves a tenth where
// the destination is cold; but off a cache line, on either side, they lose half. From 1 MiB on they
// gain nothing.
KVP_INLINE bool strings_are_best(const char* dst, const char* src, std::size_t bytes) {
  constexpr std::size_t kLeast = 4 << 10;
  constexpr std::size_t kMost = 1 << 20;
  const auto addresses =
      reinterpret_cast<std::uintptr_t>(dst) | reinterpret_cast<std::uintptr_t>(src);
  return bytes >= kLeast && bytes < kMost && addresses % kLineBytes == 0 &&
         cpu_features().fast_strings;
}

KVP_INLINE void move_string([[maybe_unused]] char* dst, [[maybe_unused]] const char* src,
                            [[maybe_unused]] std::size_t bytes) {
#if defined(__x86_64__)
  asm volatile("rep movsb" : "+D"(dst), "+S"(src), "+c"(bytes)::"memory");
#endif
}

// Stores land on cache lines, whatever the alignment of the loads: a store over two lines costs
// more than a load over two.
template <bool kPastCache>
KVP_INLINE void move_any(char* dst, const char* src, std::size_t bytes) {
  if (bytes < kStepBytes) return move_short(dst, src, bytes);
  if (!kPastCache && strings_are_best(dst, src, bytes)) return move_string(dst, src, bytes);
  const std::size_t ahead = -reinterpret_cast<std::uintptr_t>(dst) % kLineBytes;
  if (ahead > 0) move_vectors<kLineBytes / kVectorBytes>(dst, src);
  std::size_t at = ahead;
  for (; at + kStepBytes <= bytes; at += kStepBytes) {
    move_vectors<8, kPastCache>(dst + at, src + at);
  }
  if (at < bytes) move_vectors<8>(dst + bytes - kStepBytes, src + bytes - kStepBytes);
}

void copy(void* dst, const void* src, std::size_t bytes) {
  move_any<false>(static_cast<char*>(dst), static_cast<const char*>(src), bytes);
}

void stream(void* dst, const void* src, std::size_t bytes) {
  move_any<true>(static_cast<char*>(dst), static_cast<const char*>(src), bytes);
}

template <std::size_t kBytes>
KVP_INLINE void move_fixed(char* dst, const char* src) {
  constexpr std::size_t kVectors = kBytes / kVectorBytes;
  if constexpr (kVectors == 0) {
    static_assert(kBytes == 16);
    move_16(dst, src);
  } else if constexpr (kVectors <= 8) {
    move_vectors<kVectors>(dst, src);
  } else {
    move_vectors<8>(dst, src);
    move_fixed<kBytes - kStepBytes>(dst + kStepBytes, src + kStepBytes);
  }
}

template <std::size_t kBytes>
KVP_INLINE void move_runs(char* dst, const char* src, const Runs& runs) {
  for (std::size_t i = 0; i < runs.count; ++i) {
    if constexpr (kBytes > 0) {
      move_fixed<kBytes>(dst, src);
    } else {
      move_any<false>(dst, src, runs.bytes);
    }
    dst += runs.dst_step_bytes;
    src += runs.src_step_bytes;
  }
}

// One head of one token is 64 to 256 bytes in most models, and 16 where a cache splits its
// elements; those runs pay for no decisions.
void copy_runs(void* dst, const void* src, const Runs& runs) {
  auto* to = static_cast<char*>(dst);
  const auto* from = static_cast<const char*>(src);
  switch (runs.bytes) {
    case 16:
      return move_runs<16>(to, from, runs);
    case 32:
      return move_runs<32>(to, from, runs);
    case 64:
      return move_runs<64>(to, from, runs);
    case 128:
      return move_runs<128>(to, from, runs);
    case 256:
      return move_runs<256>(to, from, runs);
    default:
      return move_runs<0>(to, from, runs);
  }
}

#undef KVP_INLINE

}  // namespace

const CopyKernel KVP_COPY_KERNEL = {KVP_COPY_NAME, copy, stream, copy_runs};

}  // namespace kvpool
