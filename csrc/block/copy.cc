#include "block/copy.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "base/cpu.h"
#include "block/copy_kernel.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#if (defined(__x86_64__) || defined(__aarch64__)) && !defined(__SANITIZE_THREAD__)
#define KVP_COPY_BY_KERNEL 1
#else
#define KVP_COPY_BY_KERNEL 0
#endif

namespace kvpool {

std::span<const CopyKernel* const> copy_kernels() {
#if defined(__x86_64__)
  static constexpr std::array<const CopyKernel*, 2> kAll = {&kCopySse2, &kCopyAvx2};
  return std::span(kAll).first(cpu_features().avx2 ? 2 : 1);
#elif defined(__aarch64__)
  static constexpr std::array<const CopyKernel*, 1> kAll = {&kCopyNeon};
  return kAll;
#else
  return {};
#endif
}

#if KVP_COPY_BY_KERNEL

namespace {

const CopyKernel& kernel() {
  static const CopyKernel& best = *copy_kernels().back();
  return best;
}

// ASan does not look into assembly, so it is asked; the plain access makes it report.
void check_range([[maybe_unused]] const void* at, [[maybe_unused]] std::size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  const void* bad = bytes == 0 ? nullptr : __asan_region_is_poisoned(const_cast<void*>(at), bytes);
  if (bad != nullptr) (void)*static_cast<const volatile char*>(bad);
#endif
}

void check_ranges([[maybe_unused]] const void* at, [[maybe_unused]] std::size_t bytes,
                  [[maybe_unused]] std::size_t count, [[maybe_unused]] std::ptrdiff_t step_bytes) {
#if defined(__SANITIZE_ADDRESS__)
  const auto* range = static_cast<const char*>(at);
  for (std::size_t i = 0; i < count; ++i, range += step_bytes) check_range(range, bytes);
#endif
}

}  // namespace

void racy_copy(void* dst, const void* src, std::size_t bytes) {
  check_range(dst, bytes);
  check_range(src, bytes);
  kernel().copy(dst, src, bytes);
}

void racy_fill(void* dst, const void* src, std::size_t bytes) { racy_copy(dst, src, bytes); }

void stream_fill(void* dst, const void* src, std::size_t bytes) {
  check_range(dst, bytes);
  check_range(src, bytes);
  kernel().stream(dst, src, bytes);
}

void racy_copy_runs(void* dst, const void* src, const Runs& runs) {
  check_ranges(dst, runs.bytes, runs.count, runs.dst_step_bytes);
  check_ranges(src, runs.bytes, runs.count, runs.src_step_bytes);
  kernel().copy_runs(dst, src, runs);
}

void racy_fill_runs(void* dst, const void* src, const Runs& runs) {
  racy_copy_runs(dst, src, runs);
}

#else

// Words of the shared side are aligned; the private side takes what comes. Needs nothing but the
// C++ memory model.
namespace {

constexpr std::size_t kWordBytes = sizeof(std::uint64_t);

// Bytes to move singly before `shared` is on a word.
std::size_t bytes_to_word(const char* shared, std::size_t bytes) {
  return std::min(bytes, static_cast<std::size_t>(-reinterpret_cast<std::uintptr_t>(shared) % 8));
}

}  // namespace

void racy_copy(void* dst, const void* src, std::size_t bytes) {
  auto* to = static_cast<char*>(dst);
  const auto* from = static_cast<const char*>(src);
  const char* const end = from + bytes;
  const char* const words = from + bytes_to_word(from, bytes);
  while (from < words) *to++ = __atomic_load_n(from++, __ATOMIC_RELAXED);
  for (; from + kWordBytes <= end; from += kWordBytes, to += kWordBytes) {
    const auto word =
        __atomic_load_n(reinterpret_cast<const std::uint64_t*>(from), __ATOMIC_RELAXED);
    std::memcpy(to, &word, kWordBytes);
  }
  while (from < end) *to++ = __atomic_load_n(from++, __ATOMIC_RELAXED);
}

void racy_fill(void* dst, const void* src, std::size_t bytes) {
  auto* to = static_cast<char*>(dst);
  const auto* from = static_cast<const char*>(src);
  char* const end = to + bytes;
  char* const words = to + bytes_to_word(to, bytes);
  while (to < words) __atomic_store_n(to++, *from++, __ATOMIC_RELAXED);
  for (; to + kWordBytes <= end; from += kWordBytes, to += kWordBytes) {
    std::uint64_t word;
    std::memcpy(&word, from, kWordBytes);
    __atomic_store_n(reinterpret_cast<std::uint64_t*>(to), word, __ATOMIC_RELAXED);
  }
  while (to < end) __atomic_store_n(to++, *from++, __ATOMIC_RELAXED);
}

void stream_fill(void* dst, const void* src, std::size_t bytes) { racy_fill(dst, src, bytes); }

void racy_copy_runs(void* dst, const void* src, const Runs& runs) {
  auto* to = static_cast<char*>(dst);
  const auto* from = static_cast<const char*>(src);
  for (std::size_t i = 0; i < runs.count; ++i) {
    racy_copy(to, from, runs.bytes);
    to += runs.dst_step_bytes;
    from += runs.src_step_bytes;
  }
}

void racy_fill_runs(void* dst, const void* src, const Runs& runs) {
  auto* to = static_cast<char*>(dst);
  const auto* from = static_cast<const char*>(src);
  for (std::size_t i = 0; i < runs.count; ++i) {
    racy_fill(to, from, runs.bytes);
    to += runs.dst_step_bytes;
    from += runs.src_step_bytes;
  }
}

#endif

}  // namespace kvpool
