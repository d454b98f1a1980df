// Two nodes with UCX between them: this process, and one that is this program again.
//
// The other one is executed, not only forked: UCX does not live through a fork. Here there is no
// RDMA, so what stands in for it is tcp (bytes come through the peer's own thread) and cma (the
// reader copies out of the peer's memory by itself, as a network card would).
#pragma once
#include <doctest/doctest.h>
#include <fcntl.h>
#include <spawn.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/check.h"
#include "block/checksum.h"
#include "core_build.h"
#include "core_process.h"
#include "net/ucx_lane.h"

namespace kvpool::test {

inline constexpr const char* kUcxPeerCase = "ucx peer: holds an arena for the process that made it";
inline constexpr const char* kUcxPeerVariable = "KVPOOL_TEST_UCX_PEER";
inline constexpr int kUcxFromParent = 198, kUcxToParent = 199;
inline constexpr std::uint64_t kUcxHollowFrom = 1ull << 30;  // larger arenas are mostly empty

inline UcxOptions ucx_options(const std::string& kind) {
  UcxOptions options;
  options.takes_unchecked = true;
  options.transports = kind;
  if (kind == "tcp") {
    options.devices = "lo";
    options.settings = {{"TCP_TX_SEG_SIZE", "256k"}, {"TCP_RX_SEG_SIZE", "256k"}};
  } else {
    // Without these UCX uses no shared memory where it is to notice that a peer has died. 1.13 does
    // not let a program set the second.
    options.settings = {{"MM_ERROR_HANDLING", "y"}};
    setenv("UCX_CMA_MEMORY_INVALIDATE", "y", 1);
  }
  return options;
}

// Why there is nothing to be tested here; empty: there is. Whatever else goes wrong is a finding.
inline std::string no_ucx(const std::string& kind = "tcp") {
  if (kUnderTsan) return "UCX is not built for ThreadSanitizer, which sees races in it";
  const auto arena = Arena::create("kvpool-test", kUnitBytes, Arena::Kind::sealed);
  REQUIRE(arena.has_value());
  const auto lane = UcxLane::open(**arena, ucx_options(kind));
  if (lane) return {};
  const std::string& why = lane.error().message;
  const bool is_absent = why.contains("built without") || why.contains("no UCX library");
  if (!is_absent && kind == "tcp") FAIL(why);
  return why;
}

// What the arena of a peer holds: the same for the same seed, in either process.
inline void fill_arena(std::span<std::byte> arena, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  for (std::size_t at = 0; at < arena.size(); at += sizeof(std::uint64_t)) {
    const std::uint64_t word = random();
    std::memcpy(arena.data() + at, &word, sizeof word);
  }
}
inline std::span<std::byte> filled_part(std::byte* base, std::uint64_t bytes) {
  const std::uint64_t from = bytes > kUcxHollowFrom ? kUcxHollowFrom - kUnitBytes : 0;
  return {base + from, bytes - from};
}

class UcxPeerProcess {
 public:
  UcxPeerProcess(const std::string& kind, std::uint64_t bytes, std::uint64_t seed) {
    int down[2], up[2];
    REQUIRE(pipe2(down, O_CLOEXEC) == 0);
    REQUIRE(pipe2(up, O_CLOEXEC) == 0);
    start(kind + ";" + std::to_string(bytes) + ";" + std::to_string(seed), down[0], up[1]);
    close(down[0]);
    close(up[1]);
    to_ = down[1];
    from_ = up[0];
    std::uint32_t length = 0;
    hear(&length, sizeof length);
    address_.resize(length);
    hear(address_.data(), length);
  }
  ~UcxPeerProcess() {
    kill();
    close(to_);
    close(from_);
  }
  UcxPeerProcess(const UcxPeerProcess&) = delete;
  UcxPeerProcess& operator=(const UcxPeerProcess&) = delete;

  std::span<const std::byte> address() const { return address_; }
  void signal(int number) const { send_signal(id_, number); }
  // Writes others bytes into the first unit of its arena.
  void rewrite() const {
    char done = 0;
    REQUIRE(write(to_, "r", 1) == 1);
    hear(&done, 1);
  }
  void kill() {
    if (id_ == 0) return;
    ::kill(id_, SIGKILL);
    while (waitpid(id_, nullptr, 0) < 0) REQUIRE(errno == EINTR);
    id_ = 0;
  }

 private:
  void start(const std::string& what, int from_parent, int to_parent) {
    posix_spawn_file_actions_t actions;
    REQUIRE(posix_spawn_file_actions_init(&actions) == 0);
    posix_spawn_file_actions_adddup2(&actions, from_parent, kUcxFromParent);
    posix_spawn_file_actions_adddup2(&actions, to_parent, kUcxToParent);
    posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    std::string select = std::string("--test-case=") + kUcxPeerCase, all = "--no-skip";
    std::string program = "/proc/self/exe", mark = std::string(kUcxPeerVariable) + "=" + what;
    std::vector<char*> arguments = {program.data(), select.data(), all.data(), nullptr};
    std::vector<char*> environment = {mark.data()};
    for (char** each = environ; *each != nullptr; ++each) environment.push_back(*each);
    environment.push_back(nullptr);
    const int error =
        posix_spawn(&id_, program.c_str(), &actions, nullptr, arguments.data(), environment.data());
    posix_spawn_file_actions_destroy(&actions);
    REQUIRE(error == 0);
  }
  void hear(void* into, std::size_t bytes) const {
    for (std::size_t done = 0; done < bytes;) {
      const ssize_t more = read(from_, static_cast<char*>(into) + done, bytes - done);
      REQUIRE_MESSAGE(more > 0, "the peer has ended");
      done += static_cast<std::size_t>(more);
    }
  }

  pid_t id_ = 0;
  int to_ = -1, from_ = -1;
  std::vector<std::byte> address_;
};

// The reading side: a lane of its own, with a small arena, since it is read from by nobody.
struct UcxReader {
  explicit UcxReader(const std::string& kind) {
    auto made = Arena::create("kvpool-test", kUnitBytes, Arena::Kind::sealed);
    REQUIRE(made.has_value());
    arena = std::move(*made);
    auto opened = UcxLane::open(*arena, ucx_options(kind));
    REQUIRE_MESSAGE(opened.has_value(), opened.error().message);
    lane = std::move(*opened);
  }
  std::unique_ptr<UcxPeer> connect(std::span<const std::byte> address) const {
    auto peer = lane->connect(address, std::chrono::steady_clock::now() + std::chrono::seconds(30));
    REQUIRE_MESSAGE(peer.has_value(), peer.error().message);
    return std::move(*peer);
  }

  std::unique_ptr<Arena> arena;
  std::unique_ptr<UcxLane> lane;
};

// `count` blocks of `bytes`, one after another from the start of what the peer holds.
struct UcxBlocks {
  UcxBlocks(std::span<const std::byte> held, std::size_t count, std::uint64_t bytes)
      : memory(std::make_shared<std::vector<std::byte>>(count * bytes, std::byte{0x5a})) {
    for (std::size_t i = 0; i < count; ++i)
      places.push_back({.offset = i * bytes,
                        .bytes = bytes,
                        .sum = checksum(held.data() + i * bytes, bytes),
                        .into = memory->data() + i * bytes});
  }
  bool are_all(std::byte value) const {
    return std::ranges::all_of(*memory, [&](std::byte byte) { return byte == value; });
  }
  void set_all(std::byte value) const { std::ranges::fill(*memory, value); }

  std::shared_ptr<std::vector<std::byte>> memory;
  std::vector<UcxPlace> places;
};

inline std::size_t count_of(const std::vector<UcxOutcome>& outcomes, UcxOutcome which) {
  return static_cast<std::size_t>(std::ranges::count(outcomes, which));
}

}  // namespace kvpool::test
