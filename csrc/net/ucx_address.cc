#include "net/ucx_address.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "block/checksum.h"
#include "memory/arena.h"

namespace kvpool {
namespace {

constexpr std::uint64_t kChunkBytesMin = 1ull << 30;

std::unexpected<Error> bad(const std::string& what) {
  return fail(Code::refused, "a UCX address " + what);
}

void append(std::vector<std::byte>& out, const void* data, std::size_t bytes) {
  if (bytes == 0) return;
  const std::size_t before = out.size();
  out.resize(before + bytes);  // insert() at -O3: g++ 12 warns of an overflow that is none
  std::memcpy(out.data() + before, data, bytes);
}

// Takes what lies in front, if there is as much.
bool take(std::span<const std::byte>& rest, std::size_t bytes, std::span<const std::byte>& taken) {
  if (rest.size() < bytes) return false;
  taken = rest.first(bytes);
  rest = rest.subspan(bytes);
  return true;
}

Result<void> check_head(const UcxAddressHead& head) {
  if (head.magic != kUcxAddressMagic) return bad("does not begin as one");
  if (head.version != kUcxAddressVersion)
    return bad("of version " + std::to_string(head.version) + "; this is version " +
               std::to_string(kUcxAddressVersion));
  if (head.worker_bytes == 0 || head.worker_bytes > kUcxWorkerAddressMax)
    return bad("with a worker's address of " + std::to_string(head.worker_bytes) + " bytes");
  if (head.arena_bytes == 0 || head.arena_bytes > UINT64_MAX - head.arena_base)
    return bad("of an arena that fits in no memory");
  if (head.chunk_bytes == 0 || head.chunks == 0 || head.chunks > kUcxChunksMax ||
      head.chunks != (head.arena_bytes - 1) / head.chunk_bytes + 1)
    return bad("whose chunks do not make up its arena");
  return {};
}

Result<void> take_keys(std::span<const std::byte>& rest, UcxAddress& address) {
  std::span<const std::byte> sizes, key;
  if (!take(rest, address.head.chunks * sizeof(std::uint16_t), sizes)) return bad("is cut off");
  for (std::uint32_t i = 0; i < address.head.chunks; ++i) {
    std::uint16_t bytes = 0;
    std::memcpy(&bytes, sizes.data() + i * sizeof bytes, sizeof bytes);
    if (bytes == 0 || bytes > kUcxRemoteKeyMax)
      return bad("with a remote key of " + std::to_string(bytes) + " bytes");
    if (!take(rest, bytes, key)) return bad("is cut off");
    address.remote_keys.emplace_back(key.begin(), key.end());
  }
  return {};
}

}  // namespace

std::uint64_t ucx_chunk_bytes(std::uint64_t arena_bytes) {
  const std::uint64_t least = (arena_bytes + kUcxChunksMax - 1) / kUcxChunksMax;
  return std::max(kChunkBytesMin, (least + kUnitBytes - 1) / kUnitBytes * kUnitBytes);
}

std::vector<std::byte> encode(const UcxAddress& address) {
  UcxAddressHead head = address.head;
  head.worker_bytes = static_cast<std::uint32_t>(address.worker.size());
  head.chunks = static_cast<std::uint32_t>(address.remote_keys.size());
  KVP_CHECK(check_head(head).has_value());
  std::vector<std::byte> out;
  append(out, &head, sizeof head);
  append(out, address.worker.data(), address.worker.size());
  for (const auto& key : address.remote_keys) {
    KVP_CHECK(!key.empty() && key.size() <= kUcxRemoteKeyMax);
    const auto bytes = static_cast<std::uint16_t>(key.size());
    append(out, &bytes, sizeof bytes);
  }
  for (const auto& key : address.remote_keys) append(out, key.data(), key.size());
  const Hash128 sum = checksum(out.data(), out.size());
  append(out, &sum, sizeof sum);
  return out;
}

Result<UcxAddress> decode_ucx_address(std::span<const std::byte> bytes) {
  if (bytes.size() > kUcxAddressBytesMax) return bad("is too long");
  if (bytes.size() < sizeof(UcxAddressHead) + kHashBytes) return bad("is too short");
  UcxAddress address;
  std::memcpy(&address.head, bytes.data(), sizeof address.head);
  if (auto good = check_head(address.head); !good) return std::unexpected(good.error());
  std::span<const std::byte> rest = bytes.first(bytes.size() - kHashBytes);
  if (Hash128::from_bytes(bytes.last(kHashBytes).data()) != checksum(rest.data(), rest.size()))
    return bad("is damaged");
  std::span<const std::byte> worker;
  rest = rest.subspan(sizeof address.head);
  if (!take(rest, address.head.worker_bytes, worker)) return bad("is cut off");
  address.worker.assign(worker.begin(), worker.end());
  if (auto good = take_keys(rest, address); !good) return std::unexpected(good.error());
  if (!rest.empty()) return bad("goes on after its end");
  return address;
}

}  // namespace kvpool
