// Why a block was not delivered. Of the wire and of the Python API (kvpool.Miss): numbers stay.
#pragma once
#include <cstdint>

namespace kvpool {

enum class Miss : std::uint8_t {
  none = 0,          // delivered
  absent = 1,        // not here: never put, evicted, removed or dropped
  behind = 2,        // a block before it in the same call is missing; nobody looked at this one
  moved = 3,         // it left, or changed its place, at every attempt
  ssd_late = 4,      // the SSD did not deliver it in time
  ssd_damaged = 5,   // its copy on the SSD is not whole
  no_room = 6,       // on the SSD, and no room in DRAM to show it in place
  pin_limit = 7,     // this client may not pin more than it does
  timed_out = 8,     // the node did not answer in time
  disconnected = 9,  // no node to ask
  damaged = 10,      // what came over the network is not what was sent
  fault = 11,        // a fault injected by a test
  limited = 12,      // its clients get more bytes per second than they may
};
inline constexpr std::uint8_t kMisses = 13;

}  // namespace kvpool
