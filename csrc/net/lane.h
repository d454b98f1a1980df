// The memory that a client of the same host and its node share, beside arena and index: a control
// memfd (this layout) and a staging memfd (payload on its way). Both are made and sealed by the
// node, both are writable for the client. docs/formats.md.
//
//   control  [ControlHeader 4 KiB][ClientPage][Lane x lanes], each on a page
//
// A lane is one request at a time. Its keys (and the parent's before them) lie at the start of its
// window of the staging memory; the rest of the window, from the next 64 bytes on, is a ring that
// the payload passes through: bytes are counted from the start of the request and never wrap. Each
// block takes its bytes rounded up to 64 (block_stride), so all begin on a cache line.
//
//   client  fields, keys -> `asked` (release) -> FULL fence -> node_polls == 0? ring the bell
//   node    copies the fields and keys once, checks, works
//   put     client  payload -> `staged` (release)
//           node    takes it 4 KiB at a time -> `taken` (release); passes blocks it has already
//   get     node    payload -> `taken` counts what it has delivered into the ring;
//           client  `staged` counts what the client has copied out
//   node    statuses, count, miss -> `answered` (release)
// Who waits, and who wakes whom: net/futex.h. A side that is stopped or dead costs the other its
// deadline, never more. Until a request is answered its window belongs to it, also when the client
// has given it up: the node may still read there, or write.
#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "block/key.h"
#include "node/client_page.h"

namespace kvpool {

inline constexpr std::uint64_t kControlMagic = 0x314c5254'43504b56ull;
inline constexpr std::uint64_t kControlVersion = 2;
inline constexpr std::uint32_t kLanesMax = 16;
inline constexpr std::uint32_t kKeysPerLane = 1024;  // longer calls are cut
inline constexpr std::uint64_t kLaneWindowMin = 64 << 10;

enum class LaneOp : std::uint32_t { put = 1, get = 2 };

struct ControlHeader {
  std::uint64_t magic, version;
  std::uint64_t lanes, staging_bytes;
  std::uint64_t page_offset, lanes_offset, lane_bytes;
};

struct Lane {
  // Written by the client.
  alignas(64) std::atomic<std::uint64_t> asked;  // number of the newest request; 0 = none yet
  std::atomic<std::uint64_t> op;                 // LaneOp
  std::atomic<std::uint64_t> space, count, skip;
  std::atomic<std::uint64_t> has_parent;
  std::atomic<std::uint64_t> deadline_us;  // from now
  std::atomic<std::uint64_t> cancelled;    // = asked: the client has given this request up
  alignas(64) std::atomic<std::uint64_t> window_offset;
  std::atomic<std::uint64_t> window_bytes;
  alignas(64) std::atomic<std::uint64_t> staged;
  std::atomic<std::uint64_t> client_waits;
  std::atomic<std::uint64_t> node_wake;  // counts wake-ups of the node
  // Written by the node.
  alignas(64) std::atomic<std::uint64_t> taken;
  std::atomic<std::uint64_t> node_waits;
  std::atomic<std::uint64_t> client_wake;           // counts wake-ups of the client
  alignas(64) std::atomic<std::uint64_t> answered;  // number of the request
  std::atomic<std::uint64_t> node_polls;            // not 0: looks at `asked` without the bell
  std::atomic<std::uint64_t> done;                  // get: blocks delivered; put: statuses below
  std::atomic<std::uint64_t> miss;                  // Miss of the first that is missing
  std::atomic<std::uint64_t> refused;               // Refusal
  alignas(64) std::array<std::atomic<std::uint8_t>, kKeysPerLane> status;  // PutStatus
};

// How a window is laid out: [keys, rounded up to 64][ring].
inline constexpr std::uint64_t kLaneAlign = 64;
constexpr std::uint64_t lane_aligned(std::uint64_t bytes) {
  return (bytes + kLaneAlign - 1) / kLaneAlign * kLaneAlign;
}
constexpr std::uint64_t block_stride(std::uint64_t block_bytes) {
  return lane_aligned(block_bytes);
}
constexpr std::uint64_t lane_key_bytes(std::uint64_t count, bool has_parent) {
  return lane_aligned((count + (has_parent ? 1 : 0)) * kHashBytes);
}
// The most that either side moves in one step. Were two steps together more than the ring, each
// side could be waiting for the rest of what the other has half done.
constexpr std::uint64_t half_of_ring(std::uint64_t ring_bytes) {
  const std::uint64_t half = ring_bytes / 2 / kLaneAlign * kLaneAlign;
  return half < kLaneAlign ? kLaneAlign : half;
}

inline constexpr std::uint64_t kControlPage = 4096;
constexpr std::uint64_t on_page(std::uint64_t bytes) {
  return (bytes + kControlPage - 1) / kControlPage * kControlPage;
}
inline constexpr std::uint64_t kPageOffset = kControlPage;
inline constexpr std::uint64_t kLanesOffset = kPageOffset + on_page(sizeof(ClientPage));
inline constexpr std::uint64_t kLaneBytes = on_page(sizeof(Lane));
constexpr std::uint64_t control_bytes(std::uint32_t lanes) {
  return kLanesOffset + lanes * kLaneBytes;
}

}  // namespace kvpool
