// What sources are promised by the threads that serve them.
#include "net/reactor.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include "net_cases.h"

namespace kvpool {
namespace {

using namespace test;

// Ready when it is rung; does what the test says.
class Bell final : public Source {
 public:
  explicit Bell(std::function<Outcome(Bell&)> on_ready) : on_ready_(std::move(on_ready)) {}
  ~Bell() override { ++ended; }
  int descriptor() const override { return bell_.get(); }
  Outcome on_ready(std::uint32_t) override {
    CHECK(++turns_at_once == 1);
    CHECK_FALSE(closed);
    std::uint64_t rung = 0;
    CHECK(read(bell_.get(), &rung, sizeof rung) == sizeof rung);
    const Outcome outcome = on_ready_(*this);
    ++turns;
    --turns_at_once;
    return outcome;
  }
  void interrupt() override { interrupted = true; }
  void on_closed() override {
    CHECK(turns_at_once == 0);
    CHECK_FALSE(closed.exchange(true));
  }
  void ring() const {
    const std::uint64_t one = 1;
    REQUIRE(write(bell_.get(), &one, sizeof one) == sizeof one);
  }
  std::atomic<int> turns_at_once{0}, turns{0};
  std::atomic<bool> interrupted{false}, closed{false};
  static inline std::atomic<int> ended{0};

 private:
  const Descriptor bell_{eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  const std::function<Outcome(Bell&)> on_ready_;
};

std::unique_ptr<Reactor> reactor_for(std::uint32_t sources, std::chrono::milliseconds idle = 10s) {
  auto made = Reactor::create(sources, idle);
  REQUIRE(made.has_value());
  return std::move(*made);
}

TEST_CASE("net reactor: each source has its thread while it needs it, and few stay") {
  std::atomic<bool> open{false};
  const auto reactor = reactor_for(40, 20ms);
  std::vector<std::shared_ptr<Bell>> bells;
  for (int i = 0; i < 40; ++i) {
    bells.push_back(std::make_shared<Bell>([&](Bell&) {
      wait_until([&] { return open.load(); });
      return Outcome::again;
    }));
    REQUIRE(reactor->add(1, {bells.back()}).has_value());
  }
  for (const auto& bell : bells) bell->ring();
  wait_until([&] {
    return std::all_of(bells.begin(), bells.end(), [](auto& b) { return b->turns_at_once == 1; });
  });
  CHECK(reactor->threads() <= 41);
  open = true;
  wait_until([&] { return reactor->threads() == Reactor::kThreadsKept; });
  for (int round = 1; round <= 20; ++round)
    for (const auto& bell : bells) {
      bell->ring();
      wait_until([&] { return bell->turns == round + 1; });
    }
}

TEST_CASE("net reactor: many rings at once are never two turns of one source") {
  const auto reactor = reactor_for(8);
  std::vector<std::shared_ptr<Bell>> bells;
  for (int i = 0; i < 8; ++i)
    bells.push_back(std::make_shared<Bell>([](Bell&) { return Outcome::again; }));
  for (const auto& bell : bells) REQUIRE(reactor->add(1, {bell}).has_value());
  for (std::size_t i = 0; i < scaled(20'000); ++i) bells[i % 8]->ring();
  for (const auto& bell : bells) {
    const int before = bell->turns;
    bell->ring();
    wait_until([&] { return bell->turns > before; });
  }
}

TEST_CASE("net reactor: one source closes all of its client, and no other's") {
  const int ended = Bell::ended;
  const auto reactor = reactor_for(8);
  auto idle = std::make_shared<Bell>([](Bell&) { return Outcome::again; });
  auto busy = std::make_shared<Bell>([](Bell& bell) {
    wait_until([&] { return bell.interrupted.load(); });
    return Outcome::again;  // closed all the same
  });
  auto end = std::make_shared<Bell>([](Bell&) { return Outcome::close_client; });
  auto other = std::make_shared<Bell>([](Bell&) { return Outcome::again; });
  REQUIRE(reactor->add(1, {idle, busy, end}).has_value());
  REQUIRE(reactor->add(2, {other}).has_value());
  busy->ring();
  wait_until([&] { return busy->turns_at_once == 1; });
  end->ring();
  wait_until([&] { return idle->closed && busy->closed && end->closed; });
  CHECK_FALSE(idle->interrupted);
  CHECK(reactor->sources() == 1);
  idle.reset();
  busy.reset();
  end.reset();
  wait_until([&] { return Bell::ended == ended + 3; });
  other->ring();
  wait_until([&] { return other->turns == 1; });
  reactor->close();
  CHECK(other->closed);
  CHECK(reactor->threads() == 0);
}

TEST_CASE("net reactor: sources are taken together or not at all") {
  const auto reactor = reactor_for(3);
  const auto made = [] { return std::make_shared<Bell>([](Bell&) { return Outcome::again; }); };
  auto one = made(), two = made(), three = made(), four = made();
  CHECK_FALSE(reactor->add(1, {one, two, three, four}).has_value());
  CHECK_FALSE(reactor->add(1, {one, one}).has_value());  // the second is in already
  CHECK(reactor->sources() == 0);
  one->ring();
  REQUIRE(reactor->add(1, {one, two, three}).has_value());
  wait_until([&] { return one->turns == 1; });
  CHECK_FALSE(one->closed);
  CHECK_FALSE(four->closed);
}

}  // namespace
}  // namespace kvpool
