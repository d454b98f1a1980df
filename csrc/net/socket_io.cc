#include "net/socket_io.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <climits>
#include <memory>

namespace kvpool {
namespace {

using std::chrono::steady_clock;

constexpr std::size_t kPiecesMax = IOV_MAX;
constexpr std::size_t kForgetBytes = 64 << 10;
// Of a sender. What lies in it is copied in by one side and out by the other: more than their cache
// holds costs a third more CPU on both. With several streams it is enough for links of 1 ms.
constexpr int kBufferBytes = 512 << 10;

// done: it is ready, or broken, which the next call on it tells.
Io wait_for(int socket, short event, const Patience& patience) {
  const auto now = steady_clock::now();
  if (now >= patience.deadline) return Io::late;
  const auto until = std::min(patience.deadline, now + patience.stall_max);
  pollfd wanted{.fd = socket, .events = event, .revents = 0};
  for (;;) {
    const int ready = poll(&wanted, 1, poll_ms(until));
    if (ready > 0) return Io::done;
    if (ready < 0 && errno != EINTR) return Io::closed;
    if (steady_clock::now() >= until) return until == patience.deadline ? Io::late : Io::stalled;
  }
}

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK; }

}  // namespace

int poll_ms(steady_clock::time_point deadline) {
  const auto left = deadline - steady_clock::now();
  if (left <= steady_clock::duration::zero()) return 0;
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(left).count() + 1;
  return static_cast<int>(std::min<std::int64_t>(ms, INT_MAX));
}

std::span<iovec> past(std::span<iovec> pieces, std::size_t bytes) {
  while (!pieces.empty() && bytes >= pieces.front().iov_len) {
    bytes -= pieces.front().iov_len;
    pieces = pieces.subspan(1);
  }
  if (bytes > 0) {
    pieces.front().iov_base = static_cast<std::byte*>(pieces.front().iov_base) + bytes;
    pieces.front().iov_len -= bytes;
  }
  return pieces;
}

Io send_all(int socket, std::span<iovec> pieces, const Patience& patience, std::uint64_t& moved) {
  pieces = past(pieces, 0);
  while (!pieces.empty()) {
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = std::min(pieces.size(), kPiecesMax);
    const ssize_t sent = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) {
      moved += static_cast<std::uint64_t>(sent);
      pieces = past(pieces, static_cast<std::size_t>(sent));
      if (pieces.empty()) break;
    } else if (errno == EINTR) {
      continue;
    } else if (!would_block()) {
      return Io::closed;
    }
    // Full: also after a part, since a sender that never sleeps would miss its deadline.
    if (const Io waited = wait_for(socket, POLLOUT, patience); waited != Io::done) return waited;
  }
  return Io::done;
}

Io receive_some(int socket, std::span<const iovec> pieces, const Patience& patience,
                std::size_t& received) {
  for (;;) {
    if (steady_clock::now() >= patience.deadline) return Io::late;  // also of one that has bytes
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(pieces.data());  // recvmsg does not change it
    message.msg_iovlen = std::min(pieces.size(), kPiecesMax);
    const ssize_t got = recvmsg(socket, &message, MSG_DONTWAIT);
    if (got > 0) {
      received = static_cast<std::size_t>(got);
      return Io::done;
    }
    if (got == 0) return Io::closed;
    if (errno == EINTR) continue;
    if (!would_block()) return Io::closed;
    if (const Io waited = wait_for(socket, POLLIN, patience); waited != Io::done) return waited;
  }
}

Io receive_nothing(int socket, std::uint64_t bytes, const Patience& patience) {
  if (bytes == 0) return Io::done;
  const auto scratch = std::make_unique_for_overwrite<std::byte[]>(kForgetBytes);
  while (bytes > 0) {
    const iovec piece{scratch.get(), std::min<std::uint64_t>(bytes, kForgetBytes)};
    std::size_t got = 0;
    if (const Io how = receive_some(socket, {&piece, 1}, patience, got); how != Io::done)
      return how;
    bytes -= got;
  }
  return Io::done;
}

bool is_peer_gone(int socket) {
  pollfd wanted{.fd = socket, .events = POLLRDHUP, .revents = 0};
  return poll(&wanted, 1, 0) > 0;
}

Result<void> prepare_stream(int socket, bool& is_unix) {
  sockaddr_storage address{};
  socklen_t bytes = sizeof address;
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&address), &bytes) != 0)
    return fail_for(errno, "a connection");
  is_unix = address.ss_family == AF_UNIX;
  const int flags = fcntl(socket, F_GETFL);
  if (flags < 0 || fcntl(socket, F_SETFL, flags | O_NONBLOCK) != 0)
    return fail_for(errno, "a connection");
  // The machine may give less, which costs speed only.
  setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &kBufferBytes, sizeof kBufferBytes);
  if (is_unix) return {};
  const int on = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return {};
}

}  // namespace kvpool
