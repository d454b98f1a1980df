#include "block/checksum.h"

#include <algorithm>
#include <array>

#include "base/cpu.h"
#include "block/checksum_kernel.h"
#include "block/copy.h"

namespace kvpool {
namespace {

const ChecksumKernel& kernel() {
  static const ChecksumKernel& best = *checksum_kernels().back();
  return best;
}

// Small enough to stay in the first cache beside the stack, a multiple of what XXH3 takes at once.
constexpr std::size_t kBounceBytes = 4096;

}  // namespace

std::span<const ChecksumKernel* const> checksum_kernels() {
#if defined(__x86_64__)
  static constexpr std::array kAll = {&kChecksumBaseline, &kChecksumAvx2, &kChecksumAvx512};
  const std::size_t count = !cpu_features().avx2 ? 1 : !cpu_features().avx512 ? 2 : 3;
#else
  static constexpr std::array kAll = {&kChecksumBaseline};
  const std::size_t count = 1;
#endif
  return std::span(kAll).first(count);
}

Hash128 checksum(const void* data, std::size_t bytes) { return kernel().one_shot(data, bytes); }

ChecksumStream::ChecksumStream() { reset(); }

void ChecksumStream::reset() { kernel().reset(state_); }

void ChecksumStream::update(const void* data, std::size_t bytes) {
  if (bytes > 0) kernel().update(state_, data, bytes);
}

Hash128 ChecksumStream::digest() const { return kernel().digest(state_); }

Hash128 copy_with_checksum(void* dst, const void* src, std::size_t bytes, Stores stores) {
  alignas(64) std::byte bounce[kBounceBytes];
  auto* const fill = stores == Stores::streaming ? stream_fill : racy_fill;
  auto* to = static_cast<std::byte*>(dst);
  const auto* from = static_cast<const std::byte*>(src);
  if (bytes <= kBounceBytes) {
    racy_copy(bounce, from, bytes);
    fill(to, bounce, bytes);
    return checksum(bounce, bytes);
  }
  ChecksumStream sum;
  for (std::size_t at = 0; at < bytes; at += kBounceBytes) {
    const std::size_t piece = std::min(kBounceBytes, bytes - at);
    racy_copy(bounce, from + at, piece);
    sum.update(bounce, piece);
    fill(to + at, bounce, piece);
  }
  return sum.digest();
}

}  // namespace kvpool
