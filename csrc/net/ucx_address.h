// What one node tells another so that it can read its arena: a worker's address, where the arena
// begins, and the remote key of each chunk of it. It travels in a handshake.
//
// Little-endian: [UcxAddressHead 56 B][worker's address][chunks x u16 sizes][remote keys][XXH3-128
// of all before, 16 B]. The sum finds damage, not malice: UCX takes address and keys apart without
// looking where they end, so they are to be had only from a peer that has proved who it is.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"

namespace kvpool {

inline constexpr std::uint64_t kUcxAddressMagic = 0x313058435550564bull;  // "KVPUCX01"
inline constexpr std::uint32_t kUcxAddressVersion = 1;
inline constexpr std::size_t kUcxWorkerAddressMax = 4096;
inline constexpr std::size_t kUcxRemoteKeyMax = 512;
inline constexpr std::size_t kUcxChunksMax = 32;

struct UcxAddressHead {
  std::uint64_t magic = kUcxAddressMagic;
  std::uint32_t version = kUcxAddressVersion;
  std::uint16_t library_major = 0, library_minor = 0;  // of UCX
  std::uint32_t worker_bytes = 0, chunks = 0;
  std::uint64_t arena_bytes = 0, chunk_bytes = 0;
  std::uint64_t arena_base = 0;  // as its owner has it mapped
  // Of this use of the arena, drawn at random: places that are told later are in the same one.
  std::uint64_t lane = 0;
};
static_assert(sizeof(UcxAddressHead) == 56);

inline constexpr std::size_t kUcxAddressBytesMax =
    sizeof(UcxAddressHead) + kUcxWorkerAddressMax +
    kUcxChunksMax * (sizeof(std::uint16_t) + kUcxRemoteKeyMax) + 16;

struct UcxAddress {
  UcxAddressHead head;
  std::vector<std::byte> worker;
  std::vector<std::vector<std::byte>> remote_keys;
};

// Sets the counts of the head by itself. An address that is within the bounds above.
std::vector<std::byte> encode(const UcxAddress& address);
// Code::refused: not what encode() makes.
Result<UcxAddress> decode_ucx_address(std::span<const std::byte> bytes);

// How large the chunks of an arena are: as small as kUcxChunksMax lets them be, not below 1 GiB.
std::uint64_t ucx_chunk_bytes(std::uint64_t arena_bytes);

}  // namespace kvpool
