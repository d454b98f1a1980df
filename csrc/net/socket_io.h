// Moving bytes through a non-blocking socket: all of them, or until a deadline, or until the peer
// has not moved a byte for too long.
//
// The second limit is what a deadline cannot be: a peer on a slow link may take its time, one that
// has stopped may not. Any thread; one thread per direction of a socket. Never raises SIGPIPE.
#pragma once
#include <sys/uio.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "tier/descriptor.h"

namespace kvpool {

struct Patience {
  std::chrono::steady_clock::time_point deadline;
  std::chrono::milliseconds stall_max;  // without a byte
};

enum class Io : std::uint8_t {
  done,
  closed,   // the peer ended it, or it broke
  late,     // the deadline came
  stalled,  // not a byte for stall_max
};

// Sends all pieces, which it shortens as they go. `moved` counts bytes, also on failure.
Io send_all(int socket, std::span<iovec> pieces, const Patience& patience, std::uint64_t& moved);

// Fills the pieces in their order; at least one byte, at most all. Waits for the first.
Io receive_some(int socket, std::span<const iovec> pieces, const Patience& patience,
                std::size_t& received);

// Reads `bytes` and forgets them.
Io receive_nothing(int socket, std::uint64_t bytes, const Patience& patience);

// `bytes` off the front of the pieces: those that are used up, and the head of the next.
std::span<iovec> past(std::span<iovec> pieces, std::size_t bytes);

// Milliseconds for poll(2), at least 1 while the deadline is ahead; 0: it has come.
int poll_ms(std::chrono::steady_clock::time_point deadline);

// The other side has closed, or the socket is broken. What it has sent before may be unread.
bool is_peer_gone(int socket);

// Non-blocking, no delay of small segments, large buffers. `is_unix`: of the same host.
Result<void> prepare_stream(int socket, bool& is_unix);

}  // namespace kvpool
