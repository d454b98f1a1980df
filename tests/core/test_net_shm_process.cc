// Clients in processes of their own: they share a node, and die or stop at any moment.
#include <fcntl.h>

#include <algorithm>

#include "core_process.h"
#include "net/shm_channel.h"
#include "net_process.h"

// Under a sanitizer a child that was forked beside threads may wait for ever for a lock of its
// allocator, held by a thread that is not there.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)

namespace kvpool {
namespace {

using namespace std::chrono_literals;

using test::after;
using test::all_are;
using test::ClientProcess;
using test::get_through;
using test::keys_from;
using test::kKiB;
using test::NamedSpace;
using test::never_hung;
using test::put_through;
using test::ShmHost;

constexpr std::uint64_t kBytes = 64 * kKiB;
using Link = ClientProcess::Link;

NodeOptions pool_of(std::uint64_t units) { return test::Pool::plain(units * kUnitBytes); }

TEST_CASE("shm processes: what one puts the other gets and sees") {
  const ShmHost host(pool_of(8));
  const NamedSpace space(host.space(1, kBytes));
  const auto keys = keys_from(1, 30);
  ClientProcess writer(host.ticket(), [&](ShmChannel& channel, ShmClient&, Link link) {
    const bool good = all_are(put_through(channel, space, keys), PutStatus::stored);
    link.say('p');
    return good ? 0 : 1;
  });
  ClientProcess reader(host.ticket(), [&](ShmChannel& channel, ShmClient&, Link link) {
    if (link.hear() != 'g') return 2;
    Miss why = Miss::none;
    std::size_t wrong = 0;
    if (channel.lookup(space, keys, nullptr, why) != keys.size()) return 3;
    if (get_through(channel, space, keys, wrong, why) != keys.size() || wrong != 0) return 4;
    const auto pins = channel.acquire(space, keys, why);
    if (pins->places.size() != keys.size()) return 5;
    for (std::size_t i = 0; i < keys.size(); ++i)
      if (!test::is_payload(pins->base + pins->places[i].offset, kBytes, keys[i])) return 6;
    return all_are(put_through(channel, space, keys), PutStatus::present) ? 0 : 7;
  });
  CHECK(writer.hear() == 'p');
  reader.say('g');
  CHECK(writer.join() == 0);
  CHECK(reader.join() == 0);
  CHECK(host.comes_to_rest(10s));
  host.node->check_invariants();
}

TEST_CASE("shm processes: two that put the same keys store each once") {
  const ShmHost host(pool_of(8));
  Namespace& own = host.space(1, kBytes);
  const NamedSpace space(own);
  constexpr std::uint64_t kRounds = 40, kKeys = 4;
  const auto body = [&](ShmChannel& channel, ShmClient&, Link link) {
    if (link.hear() != 'g') return 1;
    for (std::uint64_t round = 0; round < kRounds; ++round)
      for (const PutStatus status : put_through(channel, space, keys_from(round * kKeys, kKeys)))
        if (status > PutStatus::present) return 2;
    return 0;
  };
  ClientProcess one(host.ticket(), body), other(host.ticket(), body);
  one.say('g');
  other.say('g');
  CHECK(one.join() == 0);
  CHECK(other.join() == 0);
  CHECK(host.node->stats().store.puts == kRounds * kKeys);
  CHECK(host.node->lookup(own, keys_from(0, kRounds * kKeys), nullptr) == kRounds * kKeys);
  CHECK(host.comes_to_rest(10s));
  host.node->check_invariants();
}

// Stops in the middle of a put, with half a block staged: the pipe tells that it is there.
class HalfSource final : public BlockSource {
 public:
  explicit HalfSource(Link link) : link_(link) {}
  bool fill(std::size_t index, std::byte* slot, Hash128&) override {
    if (index < 2) {
      std::memset(slot, 7, kBytes);
      return true;
    }
    link_.say('h');
    pause();
    return false;
  }

 private:
  Link link_;
};

struct Step {
  const char* name;
  int (*body)(ShmChannel&, const Space&, Link);
};

int die_reserving(ShmChannel& channel, const Space& space, Link link) {
  PutStatus status = PutStatus::failed;
  const auto blocks = channel.reserve_many(space, 8, status);
  link.say('h');
  pause();
  return blocks == nullptr;
}
int die_staging(ShmChannel& channel, const Space& space, Link link) {
  HalfSource source(link);
  put_through(channel, space, keys_from(1000, 4), source);
  return 1;
}
int die_viewing(ShmChannel& channel, const Space& space, Link link) {
  Miss why = Miss::none;
  const auto pins = channel.acquire(space, keys_from(1, 8), why);
  if (pins->places.size() == 8) link.say('h');
  pause();
  return 1;
}
int die_reading(ShmChannel& channel, const Space& space, Link link) {
  for (bool told = false;;) {
    Miss why = Miss::none;
    std::size_t wrong = 0;
    get_through(channel, space, keys_from(1, 8), wrong, why);
    if (!told) link.say('h');
    told = true;
  }
}
constexpr Step kSteps[] = {{"reserving", die_reserving},
                           {"staging", die_staging},
                           {"viewing", die_viewing},
                           {"reading", die_reading}};

TEST_CASE("shm processes: one that is killed holds nothing 100 ms later") {
  for (const Step& step : kSteps) {
    CAPTURE(std::string(step.name));
    const ShmHost host(pool_of(1));  // 32 slots
    Namespace& own = host.space(1, kBytes);
    const NamedSpace space(own);
    const auto other = host.channel();
    const auto keys = keys_from(1, 8);
    REQUIRE(all_are(put_through(*other, space, keys), PutStatus::stored));
    ClientProcess client(host.ticket(), [&](ShmChannel& channel, ShmClient&, Link link) {
      return step.body(channel, space, link);
    });
    REQUIRE(client.hear() == 'h');
    if (step.body == die_viewing) {
      host.node->remove(own, keys);
      CHECK(host.node->stats().held_slots == 8);
    }
    client.kill();
    // On an idle machine 100 ms; here the machine may be busy with other tests.
    const auto until = after(test::kUnderAsan ? 2000ms : 500ms);
    while (host.server->stats().shm_clients == 2 && std::chrono::steady_clock::now() < until)
      std::this_thread::yield();
    CHECK(host.server->stats().shm_clients == 1);
    CHECK(host.comes_to_rest(500ms));  // what its lanes were at ends with them
    host.node->check_invariants();
    put_through(*other, space, keys_from(2000, 30));
    std::size_t wrong = 0;
    Miss why = Miss::none;
    CHECK(get_through(*other, space, keys_from(2000, 30), wrong, why) == 30);
    CHECK(wrong == 0);
  }
}

TEST_CASE("shm processes: one that is stopped in a put holds up nobody else, and goes on") {
  const ShmHost host(pool_of(8));
  const NamedSpace space(host.space(1, kBytes));
  ClientProcess client(host.ticket(), [&](ShmChannel& channel, ShmClient&, Link link) {
    link.say('r');
    for (std::uint64_t n = 0; link.hear() == 'g'; ++n) {
      if (!all_are(put_through(channel, space, keys_from(n * 10, 8)), PutStatus::stored)) return 1;
      link.say('d');
    }
    return 0;
  });
  REQUIRE(client.hear() == 'r');
  const auto other = host.channel();
  std::uint64_t number = 1'000'000;
  for (int round = 0; round < 10; ++round) {
    client.say('g');
    client.signal(SIGSTOP);
    for (int i = 0; i < 5; ++i)
      CHECK(all_are(put_through(*other, space, keys_from(number += 10, 4)), PutStatus::stored));
    client.signal(SIGCONT);
    CHECK(client.hear() == 'd');
  }
  client.say('e');
  CHECK(client.join() == 0);
  CHECK(host.comes_to_rest(10s));
}

// --- a node in a process of its own --------------------------------------------------------------

// The descriptors of an offer, on their way to this process.
void send_offer(int to, const test::ShmTicket& ticket) {
  struct Facts {
    std::uint64_t lanes, staging, arena, index, pins;
  } facts{ticket.offer.lanes, ticket.offer.staging_bytes, ticket.offer.arena_bytes,
          ticket.offer.index_bytes, ticket.offer.pin_bytes};
  std::vector<int> numbers = ticket.offer.descriptors;
  numbers.push_back(ticket.socket);
  alignas(cmsghdr) char room[CMSG_SPACE(sizeof(int) * 32)] = {};
  iovec part{&facts, sizeof facts};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = room;
  message.msg_controllen = CMSG_SPACE(sizeof(int) * numbers.size());
  cmsghdr* const head = CMSG_FIRSTHDR(&message);
  head->cmsg_level = SOL_SOCKET;
  head->cmsg_type = SCM_RIGHTS;
  head->cmsg_len = CMSG_LEN(sizeof(int) * numbers.size());
  std::memcpy(CMSG_DATA(head), numbers.data(), sizeof(int) * numbers.size());
  KVP_CHECK(sendmsg(to, &message, 0) == sizeof facts);
}
test::ShmTicket receive_offer(int from) {
  std::uint64_t facts[5];
  alignas(cmsghdr) char room[CMSG_SPACE(sizeof(int) * 32)] = {};
  iovec part{facts, sizeof facts};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = room;
  message.msg_controllen = sizeof room;
  KVP_CHECK(recvmsg(from, &message, MSG_CMSG_CLOEXEC) == sizeof facts);
  const cmsghdr* const head = CMSG_FIRSTHDR(&message);
  std::vector<int> numbers((head->cmsg_len - CMSG_LEN(0)) / sizeof(int));
  std::memcpy(numbers.data(), CMSG_DATA(head), numbers.size() * sizeof(int));
  test::ShmTicket ticket;
  ticket.socket = numbers.back();
  numbers.pop_back();
  ticket.offer = {.descriptors = numbers,
                  .lanes = static_cast<std::uint32_t>(facts[0]),
                  .staging_bytes = facts[1],
                  .arena_bytes = facts[2],
                  .index_bytes = facts[3],
                  .pin_bytes = facts[4]};
  return ticket;
}

class NodeProcess {
 public:
  NodeProcess() {
    int ends[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
    id_ = fork();
    REQUIRE(id_ >= 0);
    if (id_ == 0) {
      close(ends[0]);
      const ShmHost host(pool_of(8));
      host.space(1, kBytes);
      test::ShmTicket ticket = host.ticket();
      send_offer(ends[1], ticket);
      ticket.close_all();
      char end = 0;
      (void)!read(ends[1], &end, 1);
      _exit(0);
    }
    close(ends[1]);
    link_ = ends[0];
  }
  ~NodeProcess() {
    signal(SIGKILL);
    waitpid(id_, nullptr, 0);
    close(link_);
  }
  test::ShmTicket ticket() const { return receive_offer(link_); }
  void signal(int number) const { test::send_signal(id_, number); }

 private:
  pid_t id_ = 0;
  int link_ = -1;
};

Space first_space() {
  return Space{.id = {}, .block_bytes = kBytes, .number = 0, .local = nullptr};
}

TEST_CASE(
    "shm processes: a node that is stopped costs a put its deadline, and the lane comes back") {
  const NodeProcess node;
  auto client = node.ticket().attach();
  REQUIRE(client.has_value());
  ShmChannel channel(nullptr);
  channel.attach(*client);
  const Space space = first_space();
  const auto keys = keys_from(1, 20);
  REQUIRE(all_are(put_through(channel, space, keys), PutStatus::stored));
  Miss why = Miss::none;
  std::size_t wrong = 0;
  for (int round = 0; round < 3; ++round) {
    node.signal(SIGSTOP);
    // More calls than lanes: those without one wait for it as long as they may.
    for (int i = 0; i < 4; ++i) {
      const auto others = keys_from(1000 + static_cast<std::uint64_t>(round * 10 + i) * 20, 20);
      test::PlacedSource source(others, kBytes);
      const auto begin = std::chrono::steady_clock::now();
      const auto statuses = put_through(channel, space, others, source, nullptr, after(60ms));
      CHECK(all_are(statuses, PutStatus::timed_out));
      CHECK(std::chrono::steady_clock::now() - begin >= 60ms);
      CHECK(std::chrono::steady_clock::now() - begin < 3s);
    }
    // What needs no node goes on.
    CHECK(get_through(channel, space, keys, wrong, why) == 20);
    CHECK(channel.acquire(space, keys, why)->places.size() == 20);
    node.signal(SIGCONT);
    const auto more = keys_from(50'000 + static_cast<std::uint64_t>(round) * 100, 6);
    CHECK(all_are(put_through(channel, space, more), PutStatus::stored));
    CHECK(get_through(channel, space, more, wrong, why) == 6);
  }
  CHECK(wrong == 0);
}

TEST_CASE("shm processes: a node that is killed is noticed at once, and its pinned blocks stay") {
  const NodeProcess node;
  auto client = node.ticket().attach();
  REQUIRE(client.has_value());
  ShmChannel channel(nullptr);
  channel.attach(*client);
  const Space space = first_space();
  const auto keys = keys_from(1, 20);
  REQUIRE(all_are(put_through(channel, space, keys), PutStatus::stored));
  Miss why = Miss::none;
  const auto pins = channel.acquire(space, keys, why);
  REQUIRE(pins->places.size() == 20);
  node.signal(SIGSTOP);
  std::atomic<bool> has_begun{false};
  std::thread killer([&] {
    while (!has_begun) std::this_thread::yield();
    node.signal(SIGKILL);
  });
  const auto others = keys_from(1000, 20);
  test::PlacedSource source(others, kBytes);
  has_begun = true;
  const auto begin = std::chrono::steady_clock::now();
  const auto statuses = put_through(channel, space, others, source);  // a deadline of a minute
  CHECK(all_are(statuses, PutStatus::disconnected));
  CHECK(std::chrono::steady_clock::now() - begin < 5s);
  killer.join();
  CHECK(channel.is_broken());
  std::size_t wrong = 0;
  CHECK(get_through(channel, space, keys, wrong, why) == 0);
  CHECK(why == Miss::disconnected);
  for (std::size_t i = 0; i < 20; ++i)
    CHECK(test::is_payload(pins->base + pins->places[i].offset, kBytes, keys[i]));
}

TEST_CASE("shm processes: a child of a client tears nothing down") {
  const ShmHost host(pool_of(8));
  const NamedSpace space(host.space(1, kBytes));
  auto channel = host.channel();
  const auto keys = keys_from(1, 4);
  REQUIRE(all_are(put_through(*channel, space, keys), PutStatus::stored));
  Miss why = Miss::none;
  auto pins = channel->acquire(space, keys, why);
  PutStatus status = PutStatus::failed;
  auto blocks = channel->reserve_many(space, 2, status);
  REQUIRE(blocks != nullptr);
  const int said = test::status_of_child([&] {
    if (!channel->is_forked()) return 1;
    pins.reset();
    blocks.reset();
    channel.reset();
    return 0;
  });
  CHECK(said == 0);
  CHECK(pins->places.size() == 4);
  test::make_payload(blocks->memory(0), kBytes, test::key_of(9));
  host.node->remove(host.space(1, kBytes), keys);
  CHECK(host.node->stats().held_slots == 4);
  CHECK(all_are(put_through(*channel, space, keys_from(100, 4)), PutStatus::stored));
}

}  // namespace
}  // namespace kvpool

#endif
