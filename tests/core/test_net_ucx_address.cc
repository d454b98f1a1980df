#include <cstring>

#include "block/checksum.h"
#include "block_random.h"
#include "net/ucx_address.h"
#include "net/ucx_options.h"

namespace kvpool {
namespace {

using Bytes = std::vector<std::byte>;

UcxAddress some_address(test::Random& random, std::uint64_t arena_bytes) {
  UcxAddress address;
  address.head.library_major = 1;
  address.head.library_minor = 13;
  address.head.arena_bytes = arena_bytes;
  address.head.chunk_bytes = ucx_chunk_bytes(arena_bytes);
  address.head.arena_base = 0x7f00'0000'0000;
  const auto text = [&](std::size_t bytes) {
    Bytes out;
    for (const unsigned char byte : random.bytes(bytes)) out.push_back(std::byte{byte});
    return out;
  };
  address.worker = text(random.between<std::size_t>(1, kUcxWorkerAddressMax));
  for (std::uint64_t at = 0; at < arena_bytes; at += address.head.chunk_bytes)
    address.remote_keys.push_back(text(random.between<std::size_t>(1, kUcxRemoteKeyMax)));
  return address;
}

// The sum set right: whoever makes an address can do that.
Bytes signed_again(Bytes bytes) {
  const std::size_t end = bytes.size() - kHashBytes;
  checksum(bytes.data(), end).to_bytes(bytes.data() + end);
  return bytes;
}

template <typename Field>
Bytes with(const Bytes& bytes, std::size_t offset, Field value) {
  Bytes changed = bytes;
  std::memcpy(changed.data() + offset, &value, sizeof value);
  return signed_again(changed);
}

TEST_CASE("ucx address: what is encoded is decoded, for arenas of all sizes") {
  test::Random random("ucx address");
  for (const std::uint64_t arena :
       {1ull << 21, 1ull << 30, (1ull << 30) + 1, 37ull << 30, (1ull << 42) + (3ull << 21)}) {
    const UcxAddress address = some_address(random, arena);
    CHECK(address.remote_keys.size() <= kUcxChunksMax);
    const Bytes bytes = encode(address);
    CHECK(bytes.size() <= kUcxAddressBytesMax);
    const auto decoded = decode_ucx_address(bytes);
    REQUIRE(decoded.has_value());
    CHECK(decoded->worker == address.worker);
    CHECK(decoded->remote_keys == address.remote_keys);
    CHECK(decoded->head.arena_bytes == arena);
    CHECK(decoded->head.arena_base == address.head.arena_base);
    CHECK(decoded->head.library_minor == 13);
  }
}

TEST_CASE("ucx address: one that is cut off, too long or flipped anywhere is refused") {
  test::Random random("ucx address");
  const Bytes bytes = encode(some_address(random, 3ull << 30));
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    const Bytes cut(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(length));
    REQUIRE_FALSE(decode_ucx_address(cut).has_value());
    if (length >= kHashBytes) REQUIRE_FALSE(decode_ucx_address(signed_again(cut)).has_value());
  }
  for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    Bytes flipped = bytes;
    flipped[bit / 8] ^= std::byte{static_cast<unsigned char>(1u << bit % 8)};
    REQUIRE_FALSE(decode_ucx_address(flipped).has_value());
  }
  Bytes longer = bytes;
  longer.resize(longer.size() + 1);
  CHECK_FALSE(decode_ucx_address(signed_again(longer)).has_value());
  longer.resize(1 << 20);
  CHECK_FALSE(decode_ucx_address(signed_again(longer)).has_value());
}

TEST_CASE("ucx address: counts and sizes that are not to be believed are refused") {
  test::Random random("ucx address");
  const Bytes bytes = encode(some_address(random, 3ull << 30));
  REQUIRE(decode_ucx_address(signed_again(bytes)).has_value());
  const auto refused = [&](std::size_t offset, auto value) {
    const auto decoded = decode_ucx_address(with(bytes, offset, value));
    return !decoded.has_value() && decoded.error().code == Code::refused;
  };
  CHECK(refused(offsetof(UcxAddressHead, magic), std::uint64_t{0}));
  CHECK(refused(offsetof(UcxAddressHead, version), std::uint32_t{2}));
  for (const std::uint32_t size : {0u, 1u, 4097u, 0x7fffffffu, 0xffffffffu})
    CHECK(refused(offsetof(UcxAddressHead, worker_bytes), size));
  for (const std::uint32_t chunks : {0u, 1u, 2u, 4u, 33u, 0xffffffffu})
    CHECK(refused(offsetof(UcxAddressHead, chunks), chunks));
  for (const std::uint64_t arena : {0ull, 1ull << 30, ~0ull})
    CHECK(refused(offsetof(UcxAddressHead, arena_bytes), arena));
  for (const std::uint64_t chunk : {0ull, 1ull, ~0ull})
    CHECK(refused(offsetof(UcxAddressHead, chunk_bytes), chunk));
  CHECK(refused(offsetof(UcxAddressHead, arena_base), ~std::uint64_t{0}));
  std::uint32_t worker = 0;
  std::memcpy(&worker, bytes.data() + offsetof(UcxAddressHead, worker_bytes), sizeof worker);
  const std::size_t sizes = sizeof(UcxAddressHead) + worker;
  for (const std::uint16_t size : {std::uint16_t{0}, std::uint16_t{513}, std::uint16_t{0xffff}})
    CHECK(refused(sizes, size));
}

TEST_CASE("ucx address: random bytes with a right sum are refused or bounded") {
  test::Random random("ucx address");
  const Bytes bytes = encode(some_address(random, 3ull << 30));
  for (int round = 0; round < 20'000; ++round) {
    Bytes changed = bytes;
    for (int change = random.between(1, 4); change > 0; --change)
      changed[random.between<std::size_t>(0, sizeof(UcxAddressHead) + 80)] =
          std::byte{static_cast<unsigned char>(random.between(0, 255))};
    const auto decoded = decode_ucx_address(signed_again(changed));
    if (!decoded) continue;
    REQUIRE(decoded->worker.size() <= kUcxWorkerAddressMax);
    REQUIRE(decoded->remote_keys.size() <= kUcxChunksMax);
    const std::uint64_t last = (decoded->head.arena_bytes - 1) / decoded->head.chunk_bytes;
    REQUIRE(last < decoded->remote_keys.size());
  }
}

TEST_CASE("ucx options: transports that check no remote key are for those who say so") {
  CHECK(check(UcxOptions{}).has_value());
  for (const char* list : {"rc", "dc", "rc_mlx5,dc_mlx5", "rc_verbs", "rc_x,dc_x"})
    CHECK(check(UcxOptions{.transports = list}).has_value());
  for (const char* list : {"", "all", "tcp", "rc,tcp", "rc,posix", "sm", "shm", "cma", "^tcp",
                           "self", "ud", "rc,", ",rc", "rc, dc", "rc:aux"}) {
    CAPTURE(std::string(list));
    CHECK_FALSE(check(UcxOptions{.transports = list}).has_value());
    CHECK(check(UcxOptions{.transports = list, .takes_unchecked = true}).has_value());
  }
  CHECK_FALSE(check(UcxOptions{.settings = {{"TLS", "tcp"}}}).has_value());
  CHECK_FALSE(check(UcxOptions{.settings = {{"", "x"}}}).has_value());
  CHECK_FALSE(check(UcxOptions{.devices = std::string(1025, 'x')}).has_value());
  CHECK_FALSE(check(UcxOptions{.devices = std::string("a\0b", 3)}).has_value());
  UcxOptions many;
  many.settings.assign(33, {"A", "b"});
  CHECK_FALSE(check(many).has_value());
}

}  // namespace
}  // namespace kvpool
