// Copies move exactly the bytes asked for, at every length and alignment, on every kernel.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "block/copy.h"
#include "block/copy_kernel.h"
#include "block_random.h"

namespace kvpool {
namespace {

using test::Random;
using Copy = void (*)(void*, const void*, std::size_t);
using CopyRuns = void (*)(void*, const void*, const Runs&);

std::vector<Copy> copies() {
  std::vector<Copy> all = {racy_copy, racy_fill, stream_fill};
  for (const CopyKernel* kernel : copy_kernels()) {
    all.push_back(kernel->copy);
    all.push_back(kernel->stream);
  }
  return all;
}

constexpr std::size_t kGuardBytes = 192;
constexpr unsigned char kGuard = 0xa5;

bool untouched(const unsigned char* from, const unsigned char* to) {
  return std::all_of(from, to, [](unsigned char byte) { return byte == kGuard; });
}

void check_one(Copy copy, std::size_t bytes, std::size_t dst_offset, std::size_t src_offset,
               const std::vector<unsigned char>& source) {
  CAPTURE(bytes);
  CAPTURE(dst_offset);
  CAPTURE(src_offset);
  std::vector<unsigned char> dst(2 * kGuardBytes + dst_offset + bytes, kGuard);
  auto* at = dst.data() + kGuardBytes + dst_offset;
  // A heap block of exactly the length: ASan then sees any read beyond either end.
  std::vector<unsigned char> src(source.begin(),
                                 source.begin() + static_cast<std::ptrdiff_t>(src_offset + bytes));
  copy(at, src.data() + src_offset, bytes);
  fence_before_publish();
  REQUIRE(std::equal(at, at + bytes, src.data() + src_offset));
  REQUIRE(untouched(dst.data(), at));
  REQUIRE(untouched(at + bytes, dst.data() + dst.size()));
}

TEST_CASE("copy: every length up to 1024 at random alignments") {
  Random random("copy");
  const auto source = random.bytes(1024 + 64);
  for (const Copy copy : copies()) {
    for (std::size_t bytes = 0; bytes <= 1024; ++bytes) {
      for (int round = 0; round < 4; ++round) {
        check_one(copy, bytes, random.between<std::size_t>(0, 63),
                  random.between<std::size_t>(0, 63), source);
      }
    }
  }
}

TEST_CASE("copy: long ranges at every destination alignment") {
  Random random("copy long");
  const auto source = random.bytes(70'000);
  for (const Copy copy : copies()) {
    for (std::size_t offset = 0; offset < 64; ++offset) {
      check_one(copy, random.between<std::size_t>(1025, 69'000), offset,
                random.between<std::size_t>(0, 63), source);
    }
  }
}

TEST_CASE("copy: both sides on a cache line, around the lengths where the method changes") {
  Random random("copy aligned");
  constexpr std::size_t kMost = (1 << 20) + 300;
  constexpr std::size_t kLine = 64;
  static unsigned char src alignas(kLine)[kMost];
  static unsigned char dst alignas(kLine)[kMost + kGuardBytes];
  const auto source = random.bytes(kMost);
  std::ranges::copy(source, src);
  for (const Copy copy : copies()) {
    for (const std::size_t length : {4u << 10, 1u << 20}) {
      for (const std::size_t bytes :
           {length - 1, length, length + 1, length + random.between<std::size_t>(2, 299)}) {
        CAPTURE(bytes);
        std::ranges::fill(dst, kGuard);
        copy(dst, src, bytes);
        fence_before_publish();
        REQUIRE(std::equal(dst, dst + bytes, src));
        REQUIRE(untouched(dst + bytes, dst + bytes + kGuardBytes));
      }
    }
  }
}

TEST_CASE("copy: runs of any length, either side spread or packed") {
  Random random("copy runs");
  std::vector<CopyRuns> all = {racy_copy_runs, racy_fill_runs};
  for (const CopyKernel* kernel : copy_kernels()) all.push_back(kernel->copy_runs);
  for (const CopyRuns copy_runs : all) {
    for (int round = 0; round < 300; ++round) {
      constexpr std::size_t kFixed[] = {64, 128, 256};
      const std::size_t bytes =
          random.coin() ? kFixed[random.between(0, 2)] : random.between<std::size_t>(0, 700);
      const std::size_t count = random.between<std::size_t>(0, 9);
      const std::size_t dst_step = bytes + (random.coin() ? 0 : random.between<std::size_t>(1, 99));
      const std::size_t src_step = bytes + (random.coin() ? 0 : random.between<std::size_t>(1, 99));
      const auto source = random.bytes(count * src_step);
      std::vector<unsigned char> dst(count * dst_step + kGuardBytes, kGuard);
      auto expected = dst;
      for (std::size_t i = 0; i < count; ++i) {
        for (std::size_t b = 0; b < bytes; ++b) {
          expected[i * dst_step + b] = source[i * src_step + b];
        }
      }
      copy_runs(dst.data(), source.data(),
                {bytes, count, static_cast<std::ptrdiff_t>(dst_step),
                 static_cast<std::ptrdiff_t>(src_step)});
      REQUIRE(dst == expected);
    }
  }
}

// What TSan is run for: both sides of the intended race are invisible to it as a race, and the
// generation sorts the copies out.
TEST_CASE("copy: a reader that races with a writer accepts only whole fills") {
  constexpr std::size_t kBytes = 4096 + 24;
  alignas(64) static unsigned char shared[kBytes];
  std::atomic<std::uint64_t> generation{0};
  std::atomic<bool> stop{false};

  std::thread writer([&] {
    std::vector<unsigned char> fill(kBytes);
    for (std::uint64_t next = 1; !stop.load(std::memory_order_relaxed); ++next) {
      std::fill(fill.begin(), fill.end(), static_cast<unsigned char>(next));
      generation.store(0, std::memory_order_relaxed);
      fence_before_overwrite();
      (next % 2 == 0 ? racy_fill : stream_fill)(shared, fill.data(), kBytes);
      fence_before_publish();
      generation.store(next, std::memory_order_release);
      std::this_thread::yield();
    }
  });

  std::vector<unsigned char> private_copy(kBytes);
  std::uint64_t accepted = 0;
  std::uint64_t wrong = 0;
  while (accepted < 2'000) {
    const std::uint64_t before = generation.load(std::memory_order_acquire);
    if (before == 0) continue;
    racy_copy(private_copy.data(), shared, kBytes);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (generation.load(std::memory_order_relaxed) != before) continue;
    ++accepted;
    for (const unsigned char byte : private_copy) {
      if (byte != static_cast<unsigned char>(before)) ++wrong;
    }
  }
  stop.store(true, std::memory_order_relaxed);
  writer.join();
  CHECK(wrong == 0);
}

}  // namespace
}  // namespace kvpool
