// The life of a UCX lane: what it takes, what it leaves behind, what it does to its process.
#include <dirent.h>
#include <dlfcn.h>
#include <signal.h>
#include <time.h>

#include <cstdlib>
#include <optional>
#include <thread>

#include "block_random.h"
#include "net/ucx_address.h"
#include "net/ucx_lane.h"
#include "net_ucx.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;
using test::count_of;
using test::UcxBlocks;
using test::UcxPeerProcess;
using test::UcxReader;
using Clock = std::chrono::steady_clock;

bool is_skipped() {
  const std::string why = test::no_ucx();
  if (why.empty()) return false;
  MESSAGE("not tested: " << why);
  CHECK_FALSE(why.empty());
  return true;
}

std::size_t entries_of(const char* folder) {
  DIR* const opened = opendir(folder);
  REQUIRE(opened != nullptr);
  std::size_t count = 0;
  while (readdir(opened) != nullptr) ++count;
  closedir(opened);
  return count;
}

std::unique_ptr<Arena> sealed_arena() {
  auto arena = Arena::create("kvpool-test", kUnitBytes, Arena::Kind::sealed);
  REQUIRE(arena.has_value());
  return std::move(*arena);
}

class VariableSet {
 public:
  VariableSet(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    setenv(name, value, 1);
  }
  ~VariableSet() {
    if (before_)
      setenv(name_, before_->c_str(), 1);
    else
      unsetenv(name_);
  }
  VariableSet(const VariableSet&) = delete;
  VariableSet& operator=(const VariableSet&) = delete;

 private:
  const char* const name_;
  std::optional<std::string> before_;
};

TEST_CASE("ucx lane: what cannot be opened is refused with its reason") {
  const auto arena = sealed_arena();
  const auto tcp = UcxLane::open(*arena, {.transports = "tcp"});
  REQUIRE_FALSE(tcp.has_value());
  CHECK(tcp.error().code == Code::bad_argument);
  if (is_skipped()) return;
  const auto elastic = Arena::create("kvpool-test", kUnitBytes, Arena::Kind::elastic);
  REQUIRE(elastic.has_value());
  const auto punched = UcxLane::open(**elastic, test::ucx_options("tcp"));
  REQUIRE_FALSE(punched.has_value());
  CHECK(punched.error().code == Code::bad_argument);
  CHECK(punched.error().message.contains("sealed"));
  const auto nowhere = UcxLane::open(*arena, {.devices = "no_such_device:1"});
  REQUIRE_FALSE(nowhere.has_value());
  CHECK(nowhere.error().code == Code::refused);
  MESSAGE(nowhere.error().message);
  const auto unknown = UcxLane::open(*arena, {.settings = {{"NO_SUCH_SETTING", "1"}}});
  CHECK_FALSE(unknown.has_value());
}

TEST_CASE("ucx lane: the library that is chosen is the only one that is tried") {
  if (is_skipped()) return;
  const auto arena = sealed_arena();
  for (const char* path : {"/nowhere/libucp.so.0", "libc.so.6"}) {
    const VariableSet chosen("KVPOOL_UCX_LIB", path);
    const auto lane = UcxLane::open(*arena, test::ucx_options("tcp"));
    REQUIRE_FALSE(lane.has_value());
    CHECK(lane.error().code == Code::refused);
    CHECK(lane.error().message.contains(path));
    MESSAGE(lane.error().message);
  }
  // One that was found and is no UCX: the next is tried.
  UcxOptions options = test::ucx_options("tcp");
  options.library = "/nowhere/libucp.so";
  const auto lane = UcxLane::open(*arena, options);
  REQUIRE(lane.has_value());
  CHECK((*lane)->library().contains("libucp"));
}

TEST_CASE("ucx lane: an address that is damaged or foreign connects to nobody") {
  if (is_skipped()) return;
  const UcxReader one("tcp"), two("tcp");
  const std::vector<std::byte> address(two.lane->address().begin(), two.lane->address().end());
  CHECK(address.size() < 1024);
  const auto is_refused = [&](const std::vector<std::byte>& bytes) {
    const auto peer = one.lane->connect(bytes, Clock::now() + 30s);
    return !peer.has_value() && peer.error().code == Code::refused;
  };
  for (std::size_t length = 0; length < address.size(); ++length)
    REQUIRE(is_refused({address.begin(), address.begin() + static_cast<std::ptrdiff_t>(length)}));
  for (std::size_t at = 0; at < address.size(); ++at) {
    auto flipped = address;
    flipped[at] ^= std::byte{0x10};
    REQUIRE(is_refused(flipped));
  }
  CHECK(is_refused(std::vector<std::byte>(1 << 20)));
  auto decoded = decode_ucx_address(address);
  REQUIRE(decoded.has_value());
  decoded->head.library_major = 2;
  CHECK(is_refused(encode(*decoded)));
  CHECK(one.lane->connect(address, Clock::now() + 30s).has_value());
}

TEST_CASE("ucx lane: fifty that are opened and closed leave no descriptor and no thread") {
  if (is_skipped()) return;
  std::size_t descriptors = 0, threads = 0;
  for (int round = 0; round < 50; ++round) {
    {
      // The reader goes first: UCX 1.13 ends the process where a worker over tcp is gone before
      // one that has just connected to it.
      const UcxReader two("tcp"), one("tcp");
      two.arena->commit(0, kUnitBytes);
      test::fill_arena({two.arena->base(), kUnitBytes}, 7);
      UcxBlocks blocks({two.arena->base(), kUnitBytes}, 16, 64 << 10);
      const auto peer = one.connect(two.lane->address());
      const auto outcomes = peer->read(blocks.places, nullptr, Clock::now() + 30s);
      REQUIRE(count_of(outcomes, UcxOutcome::whole) == 16);
    }
    if (round == 4) {
      descriptors = entries_of("/proc/self/fd");
      threads = entries_of("/proc/self/task");
    }
  }
  CHECK(entries_of("/proc/self/fd") <= descriptors);
  CHECK(entries_of("/proc/self/task") <= threads);
}

TEST_CASE("ucx lane: one that closes fails the reads under way, and peers may outlive it") {
  if (is_skipped()) return;
  const std::uint64_t bytes = 8 * kUnitBytes, seed = test::run_seed();
  UcxPeerProcess holder("tcp", bytes, seed);
  UcxReader reader("tcp");
  std::vector<std::byte> held(bytes);
  test::fill_arena(held, seed);
  UcxBlocks first(held, 1, 4096), blocks(held, 8, kUnitBytes);
  const auto peer = reader.connect(holder.address());
  REQUIRE(peer->read(first.places, nullptr, Clock::now() + 30s).front() == UcxOutcome::whole);
  holder.signal(SIGSTOP);
  std::vector<UcxOutcome> outcomes;
  std::thread waiting(
      [&] { outcomes = peer->read(blocks.places, blocks.memory, Clock::now() + 60s); });
  const auto begin = Clock::now();
  reader.lane.reset();
  waiting.join();
  CHECK(Clock::now() - begin < 3s);
  CHECK(count_of(outcomes, UcxOutcome::failed) > 0);
  CHECK(blocks.memory.use_count() == 1);
  CHECK(peer->read(first.places, nullptr, Clock::now() + 60s).front() == UcxOutcome::failed);
}

TEST_CASE("ucx lane: signal handlers of the process stay as they were") {
  if (is_skipped()) return;
  for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGHUP}) {
    struct sigaction now{};
    REQUIRE(sigaction(number, nullptr, &now) == 0);
    Dl_info where{};
    const auto handler = reinterpret_cast<void*>(now.sa_handler);
    if (handler == nullptr || dladdr(handler, &where) == 0) {
      CHECK_FALSE(where.dli_fname != nullptr);
      continue;
    }
    CHECK_FALSE(std::string(where.dli_fname).contains("libuc"));
  }
}

TEST_CASE("ucx lane: one that has nothing to do takes no time") {
  if (is_skipped()) return;
  const UcxReader one("tcp"), two("tcp");
  UcxBlocks blocks({two.arena->base(), kUnitBytes}, 16, 64 << 10);
  const auto peer = one.connect(two.lane->address());
  const auto outcomes = peer->read(blocks.places, nullptr, Clock::now() + 30s);
  REQUIRE(count_of(outcomes, UcxOutcome::whole) == 16);
  const auto used_ms = [] {
    timespec used{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return static_cast<double>(used.tv_sec) * 1e3 + static_cast<double>(used.tv_nsec) * 1e-6;
  };
  const double before = used_ms();
  std::this_thread::sleep_for(500ms);  // not to wait for something: to see what is done meanwhile
  CHECK(used_ms() - before < 50);
}

TEST_CASE("ucx lane: a child of fork leaves the lanes of its parent alone") {
  if (is_skipped()) return;
  auto one = std::make_unique<UcxReader>("tcp");
  const UcxReader two("tcp");
  auto peer = one->connect(two.lane->address());
  const int said = test::status_of_child([&] {
    peer.reset();
    one->lane.reset();
    return 0;
  });
  CHECK(said == 0);
  UcxBlocks blocks({two.arena->base(), kUnitBytes}, 16, 64 << 10);
  const auto outcomes = peer->read(blocks.places, nullptr, Clock::now() + 30s);
  CHECK(count_of(outcomes, UcxOutcome::whole) == 16);
}

}  // namespace
}  // namespace kvpool
