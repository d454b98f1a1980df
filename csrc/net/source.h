// One thing a server waits for: a stream, a bell of a lane, the socket of an shm client.
//
// What a source is promised (net/reactor.h):
//   1. on_ready() is called by one thread at a time, never beside on_closed(), and not again before
//      it has returned. It may take as long as its requests do: others are served meanwhile.
//   2. on_closed() is called once, last, whatever the reason: the peer, drop_client(), close().
//   3. interrupt() may come at any moment until destruction, from any thread, also while
//      on_ready() runs, also twice.
// What it owes:
//   1. on_ready() returns within 100 ms of interrupt();
//   2. it holds its descriptor open until it is destroyed: no number becomes another file's;
//   3. on_ready() never blocks but by poll, futex or the node, each with a deadline;
//   4. what it has not taken from its descriptor makes it ready again (level-triggered). What it
//      took and left in memory of its own does not.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>

#include "net/leases.h"
#include "net/rate_limit.h"

namespace kvpool {

// What becomes of a source after its turn.
enum class Outcome : std::uint8_t {
  again,         // armed again
  close,         // this source is closed
  close_client,  // all of its client's are
};

class Source {
 public:
  virtual ~Source() = default;
  virtual int descriptor() const = 0;
  // `events` as epoll tells them: EPOLLIN, EPOLLRDHUP, EPOLLHUP, EPOLLERR.
  virtual Outcome on_ready(std::uint32_t events) = 0;
  virtual void interrupt() = 0;
  virtual void on_closed() = 0;
};

// What all sources of a server add to; ServerStats is read from it. Outlives all sources.
struct ServerBooks {
  std::atomic<bool> draining{false};  // new requests are refused
  std::atomic<std::uint64_t> streams{0}, shm_clients{0}, leases{0}, requests{0}, bytes_in{0},
      bytes_out{0}, closed_garbage{0}, closed_late{0};
  std::atomic<std::uint64_t> far_leases{0}, far_lent_bytes{0}, far_expired{0};  // to peers
  RateLimit puts, gets;  // of payload, for all connections together

  // Why a connection is being closed that broke the protocol / that took too long.
  void note_garbage(std::string why) {
    closed_garbage.fetch_add(1, std::memory_order_relaxed);
    note(std::move(why));
  }
  void note_late(std::string why) {
    closed_late.fetch_add(1, std::memory_order_relaxed);
    note(std::move(why));
  }
  std::string last_closed() const {
    const std::lock_guard lock(mutex_);
    return last_closed_;
  }

 private:
  void note(std::string why) {
    const std::lock_guard lock(mutex_);
    last_closed_ = std::move(why);
  }
  mutable std::mutex mutex_;  // guards last_closed_
  std::string last_closed_;
};

// What all connections of one client share. Outlives each of them.
struct ClientBooks {
  ClientBooks(std::uint64_t number, Node& node, ServerBooks& server)
      : id(number), leases(node, server.leases) {}

  void begin_shm() {
    leases.open();
    has_shm.store(true, std::memory_order_release);
  }
  void end_shm() {
    has_shm.store(false, std::memory_order_release);
    leases.close();
  }

  void count_get(const Loaded& loaded, std::uint64_t block_bytes) {
    gets.fetch_add(1, std::memory_order_relaxed);
    get_blocks.fetch_add(loaded.blocks(), std::memory_order_relaxed);
    get_bytes.fetch_add(loaded.blocks() * block_bytes, std::memory_order_relaxed);
  }

  const std::uint64_t id;
  std::atomic<bool> has_shm{false};  // it has mapped the arena, so places in it mean something
  // Through streams and lanes; what it reads without asking is in its page.
  alignas(64) std::atomic<std::uint64_t> requests{0}, bytes_in{0}, bytes_out{0}, gets{0},
      get_blocks{0}, get_bytes{0}, views{0}, view_blocks{0};
  alignas(64) Leases leases;
};

}  // namespace kvpool
