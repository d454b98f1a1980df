// What became of a block of a put. Of the wire and of the Python API (kvpool.Reason): numbers stay.
#pragma once
#include <cstdint>

namespace kvpool {

enum class PutStatus : std::uint8_t {
  stored = 0,
  present = 1,
  // Not stored, because:
  pool_pinned = 2,   // nothing more can go: it is being read or written
  pool_index = 3,    // the index has no place for it
  chain_broken = 4,  // a block before it in the same call was not stored
  timed_out = 5,     // another writer has the key, or room takes several steps: too long
  dropped = 6,       // the namespace was dropped meanwhile
  no_memory = 7,     // the machine has no pages for the slot
  failed = 8,        // the payload could not be produced, or a fault was injected
  too_large = 9,     // the block is larger than the pool is now
  // Readable, but the SSD did not take it, in a pool that promises that it does:
  not_durable = 10,
  // Of a node elsewhere:
  disconnected = 11,  // there is none now, or it went away before it answered
  payload_due = 12,   // inside a channel: thought present and not sent, but it is not there
  limited = 13,       // its clients put more bytes per second than they may
};
inline constexpr std::uint8_t kPutStatuses = 14;

// The node has the block, so what comes behind it can be put. Of not_durable only the SSD has none.
constexpr bool is_there(PutStatus status) {
  return status == PutStatus::stored || status == PutStatus::present ||
         status == PutStatus::not_durable;
}

}  // namespace kvpool
