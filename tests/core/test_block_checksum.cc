// One checksum: whichever kernel, however it is fed, and over exactly the bytes that were stored.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "block/checksum.h"
#include "block/checksum_kernel.h"
#include "block/copy.h"
#include "block_random.h"

namespace kvpool {
namespace {

struct Known {
  std::size_t bytes;
  const char* sum;
};

// Python: xxhash.xxh3_128_intdigest(data).to_bytes(16, "little").hex(); byte i is (i*131+17) % 251.
constexpr Known kKnown[] = {
    {0, "7f498d4624c30160d8984701d306aa99"},    {1, "bdfecddf2bfe19f34a99a4f582816df4"},
    {16, "0f22c7a710881455bd69bbf067da8820"},   {17, "824cbd818346d4ee87e877926571df67"},
    {128, "d7a73d5178d7441687395b45a2a75c09"},  {129, "57e3257026d96bd257a29f8bc660d42e"},
    {240, "5791f4712f5d47a0efd01cd726870afb"},  {241, "0a7fb32295c8f4cc10f7f576580250b9"},
    {1024, "9c313041dc08c8fc340faf9b2a43b263"}, {1025, "bfd0df4fb1aa43e89c280ef2d7537180"},
    {4096, "5dbcc9dacfa6d2fad61ddc2141662560"}, {4097, "6d4877d9c9e16542fc5e5c50093d72f1"},
    {10000, "41f1c76175541de2158ccb8885296f9a"}};

std::string hex(const Hash128& hash) {
  std::array<unsigned char, kHashBytes> bytes;
  hash.to_bytes(bytes.data());
  return test::hex(bytes);
}

TEST_CASE("checksum: golden values on every kernel") {
  for (const auto& known : kKnown) {
    std::vector<unsigned char> data(known.bytes);
    for (std::size_t i = 0; i < data.size(); ++i) {
      data[i] = static_cast<unsigned char>((i * 131 + 17) % 251);
    }
    CHECK(hex(checksum(data.data(), data.size())) == known.sum);
    for (const ChecksumKernel* kernel : checksum_kernels()) {
      CAPTURE(kernel->name);
      CHECK(hex(kernel->one_shot(data.data(), data.size())) == known.sum);
    }
  }
}

TEST_CASE("checksum: kernels agree on every cut") {
  test::Random random("checksum");
  for (int round = 0; round < 200; ++round) {
    const auto data = random.bytes(random.between<std::size_t>(0, 20'000));
    const Hash128 expected = checksum(data.data(), data.size());
    for (const ChecksumKernel* kernel : checksum_kernels()) {
      CAPTURE(kernel->name);
      REQUIRE(kernel->one_shot(data.data(), data.size()) == expected);
      alignas(64) std::byte state[576];
      kernel->reset(state);
      for (std::size_t at = 0; at < data.size();) {
        const std::size_t piece = std::min(random.between<std::size_t>(1, 5'000), data.size() - at);
        kernel->update(state, data.data() + at, piece);
        at += piece;
      }
      REQUIRE(kernel->digest(state) == expected);
    }
  }
}

TEST_CASE("checksum: a stream can be read midway, fed nothing, and begun again") {
  const std::string text = "one pool for every engine";
  ChecksumStream stream;
  CHECK(stream.digest() == checksum(nullptr, 0));
  stream.update(text.data(), 8);
  stream.update(nullptr, 0);
  CHECK(stream.digest() == checksum(text.data(), 8));
  stream.update(text.data() + 8, text.size() - 8);
  CHECK(stream.digest() == checksum(text.data(), text.size()));
  stream.reset();
  stream.update(text.data(), text.size());
  CHECK(stream.digest() == checksum(text.data(), text.size()));
}

TEST_CASE("checksum: the copying form stores the bytes, sums them, and touches nothing else") {
  test::Random random("copy_with_checksum");
  constexpr std::size_t kGuard = 128;
  for (int round = 0; round < 400; ++round) {
    const std::size_t bytes = random.coin() ? random.between<std::size_t>(0, 600)
                                            : random.between<std::size_t>(4'000, 14'000);
    const std::size_t src_offset = random.between<std::size_t>(0, 70);
    const std::size_t dst_offset = random.between<std::size_t>(0, 70);
    const auto src = random.bytes(src_offset + bytes);
    for (const Stores stores : {Stores::cached, Stores::streaming}) {
      std::vector<unsigned char> dst(kGuard + dst_offset + bytes + kGuard, 0xa5);
      auto* at = dst.data() + kGuard + dst_offset;
      const Hash128 sum = copy_with_checksum(at, src.data() + src_offset, bytes, stores);
      fence_before_publish();
      REQUIRE(sum == checksum(src.data() + src_offset, bytes));
      REQUIRE(std::equal(at, at + bytes, src.data() + src_offset));
      REQUIRE(std::all_of(dst.data(), at, [](unsigned char c) { return c == 0xa5; }));
      REQUIRE(std::all_of(at + bytes, dst.data() + dst.size(),
                          [](unsigned char c) { return c == 0xa5; }));
    }
  }
}

// A client can write into its staging memory whenever it likes.
TEST_CASE("checksum: the copying form sums what it stored, even if the source changes meanwhile") {
  constexpr std::size_t kBytes = 64 << 10;
  alignas(64) static unsigned char source[kBytes];
  alignas(64) static unsigned char stored[kBytes];
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> scribbles{0};
  std::thread scribbler([&] {
    std::vector<unsigned char> line(256);
    for (std::size_t at = 0; !stop.load(std::memory_order_relaxed); at = (at + 4352) % kBytes) {
      std::ranges::fill(line, static_cast<unsigned char>(scribbles.fetch_add(1)));
      racy_fill(source + at / 256 * 256, line.data(), line.size());
    }
  });
  std::size_t wrong = 0;
  std::size_t changed = 0;
  for (std::size_t round = 0; round < 300 || changed < 20; ++round) {
    const Stores stores = round % 2 == 0 ? Stores::cached : Stores::streaming;
    const std::uint64_t before = scribbles.load();
    const Hash128 sum = copy_with_checksum(stored, source, kBytes, stores);
    if (scribbles.load() != before) ++changed;
    if (sum != checksum(stored, kBytes)) ++wrong;
  }
  stop.store(true, std::memory_order_relaxed);
  scribbler.join();
  CHECK(wrong == 0);
}

}  // namespace
}  // namespace kvpool
