// A link between two hosts whose other side stops at a byte of the test's choice.
#pragma once
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <functional>
#include <thread>

#include "net_cases.h"

namespace kvpool::test {

// Over all links to one host.
struct Meter {
  std::atomic<std::int64_t> left{0};    // bytes from that host that are still passed on
  std::atomic<bool> is_frozen{false};   // it has sent them: from then on it is silent
  std::function<void()> spent = [] {};  // called once, by a thread of a relay

  void take(std::int64_t bytes) {
    if (left.fetch_sub(bytes) > 0 && left.load() <= 0) spent();
  }
};

class Relay {
 public:
  Relay(Descriptor near, Descriptor far, Meter& meter)
      : near_(std::move(near)), far_(std::move(far)), meter_(meter), thread_([this] { run(); }) {}
  ~Relay() {
    end();
    thread_.join();
  }
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

 private:
  void end() {
    shutdown(near_.get(), SHUT_RDWR);
    shutdown(far_.get(), SHUT_RDWR);
  }
  void run() {
    std::vector<std::byte> some(64 << 10);
    for (;;) {
      const bool is_silent = meter_.is_frozen;
      std::array<pollfd, 2> ready{
          pollfd{.fd = near_.get(), .events = POLLIN, .revents = 0},
          // Nothing is taken from one that is silent: only its end is seen.
          pollfd{.fd = far_.get(), .events = is_silent ? short{0} : short{POLLIN}, .revents = 0}};
      poll(ready.data(), ready.size(), 60'000);
      if (ready[0].revents != 0 && !pass(near_, far_, some, false)) break;
      if (ready[1].revents != 0 && !pass(far_, near_, some, true)) break;
    }
    end();
  }
  bool pass(const Descriptor& from, const Descriptor& to, std::span<std::byte> some, bool is_back) {
    const ssize_t got = recv(from.get(), some.data(), some.size(), 0);
    if (got <= 0) return false;
    if (!send_bytes(to, some.first(static_cast<std::size_t>(got)))) return false;
    if (is_back) meter_.take(got);
    return true;
  }

  const Descriptor near_, far_;
  Meter& meter_;
  std::thread thread_;
};

}  // namespace kvpool::test
