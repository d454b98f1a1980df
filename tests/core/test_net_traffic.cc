// Through whatever channel a block is asked for, the node's figures say so once; and what it tells
// of its clients.
#include <sys/socket.h>

#include <random>

#include "net/local_channel.h"
#include "net/server.h"
#include "net/stream_channel.h"
#include "net_shm.h"
#include "node_ssd_cases.h"
#include "traffic_cases.h"

namespace kvpool {
namespace {

using namespace std::chrono_literals;
using namespace test;

constexpr std::uint64_t kBlock = 64 * kKiB;

// A channel with one stream to the server.
std::unique_ptr<StreamChannel> stream_to(const ShmHost& host, std::uint64_t client,
                                         bool leases_in_place = false) {
  int ends[2];
  KVP_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  KVP_CHECK(host.server->add_stream(client, ends[0]).has_value());
  auto made = StreamChannel::create({.timeout = 60s, .leases_in_place = leases_in_place});
  KVP_CHECK(made.has_value());
  KVP_CHECK((*made)->attach({&ends[1], 1}).has_value());
  return std::move(*made);
}

// Of shared memory, with leases by request.
std::unique_ptr<ShmChannel> shm_to(const ShmHost& host, std::uint64_t* number = nullptr) {
  ShmTicket ticket = host.ticket();
  if (number != nullptr) *number = ticket.client;
  std::shared_ptr<Channel> by_request = stream_to(host, ticket.client, true);
  auto made = std::make_unique<ShmChannel>(by_request);
  auto client = ticket.attach();
  KVP_CHECK(client.has_value());
  made->attach(*client);
  return made;
}

// A caller of one channel, and what it was told.
class Caller {
 public:
  Caller(Channel& channel, const Space& space, std::uint64_t seed)
      : channel_(channel), space_(space), engine_(seed) {}

  void run(std::size_t operations) {
    for (std::size_t i = 0; i < operations; ++i) {
      const std::uint64_t first = engine_() % keys_max;
      step(engine_() % 8, keys_from(first, 1 + engine_() % 8));
    }
  }
  void step(std::uint64_t what, const std::vector<Hash128>& keys) {
    Miss why{};
    if (what < 3) return put(keys);
    if (what == 3) {
      const std::size_t found = channel_.lookup(space_, keys, nullptr, why);
      return tally.looked(keys.size(), found);
    }
    if (what == 4 && views) {
      const auto pins = channel_.acquire(space_, keys, why);
      return tally.got(keys.size(), pins->places.size(), why);
    }
    KeySink sink(keys, space_.block_bytes);
    const std::size_t got = channel_.get(space_, keys, sink, why);
    wrong += sink.wrong;
    tally.got(keys.size(), got, why);
  }
  void put(const std::vector<Hash128>& keys) {
    PlacedSource source(keys, space_.block_bytes);
    tally.put(put_through(channel_, space_, keys, source));
  }
  Tally tally;
  std::uint64_t wrong = 0;
  std::uint64_t keys_max = 120;
  bool views = true;  // those of a stream are a lookup and a get of what it found

 private:
  Channel& channel_;
  const Space& space_;
  std::mt19937_64 engine_;
};

void check_all(Node& node, const Namespace& space, std::span<const Caller> callers) {
  Tally tally;
  for (const Caller& caller : callers) {
    tally.add(caller.tally);
    CHECK(caller.wrong == 0);
  }
  check_blocks(traffic_of(node, space), tally);
}

TEST_CASE("net traffic: a client of shared memory tells what it looks up, copies and shows") {
  const ShmHost host(Pool::plain(32 * kMiB));
  Namespace& of = host.space(1, kBlock);
  const NamedSpace space(of);
  std::uint64_t number = 0;
  const auto channel = shm_to(host, &number);
  Caller caller(*channel, space, 1);
  caller.put(keys_from(0, 10));
  for (const std::uint64_t what : {3, 4, 5}) {
    caller.step(what, keys_from(0, 10));
    caller.step(what, keys_from(5, 10));
    caller.step(what, keys_from(50, 3));
  }
  check_all(*host.node, of, {&caller, 1});
  const TrafficTotals totals = traffic_of(*host.node, of);
  CHECK(totals.gets == 6);
  CHECK(totals.views == 3);
  CHECK(totals.view_blocks == 15);

  const auto clients = host.server->clients();
  REQUIRE(clients.size() == 1);
  CHECK(clients[0].number == number);
  CHECK(clients[0].has_shm);
  CHECK(clients[0].reads.gets == 3);
  CHECK(clients[0].reads.get_blocks == 15);
  CHECK(clients[0].reads.get_bytes == 15 * kBlock);
  CHECK(clients[0].reads.views == 3);
  CHECK(clients[0].reads.view_blocks == 15);
  CHECK(clients[0].bytes_in == 10 * kBlock);
  CHECK(clients[0].requests == 1);
}

TEST_CASE("net traffic: through a stream, what a call asks on the way is not counted") {
  const ShmHost host(Pool::plain(32 * kMiB));
  Namespace& of = host.space(1, kBlock);
  const NamedSpace space(of);
  const auto channel = stream_to(host, host.server->add_client());
  Caller caller(*channel, space, 1);
  caller.put(keys_from(0, 10));  // looks first what is there
  caller.put(keys_from(5, 10));
  caller.step(3, keys_from(0, 20));
  caller.step(5, keys_from(10, 10));
  Miss why{};
  CHECK(channel->acquire(space, keys_from(0, 3), why)->places.size() == 3);  // a lookup and a get
  caller.tally.got(3, 3, Miss::none);
  PutStatus status{};
  const auto keys = keys_from(0, 1);
  CHECK(channel->reserve({space, keys, nullptr, never_hung()}, status) == nullptr);
  check_all(*host.node, of, {&caller, 1});
  CHECK(traffic_of(*host.node, of).gets == 2);
  const ClientStats client = host.server->clients().at(0);
  CHECK(client.reads.gets == 2);
  CHECK(client.reads.get_blocks == 8);
  CHECK(client.reads.get_bytes == 8 * kBlock);
  CHECK(client.bytes_in > 15 * kBlock);
  CHECK(!client.has_shm);
  const NodeStats stats = host.node->stats();
  CHECK(stats.gets == 2);
  CHECK(stats.get_blocks == 8);
  CHECK(stats.missed_absent == 1);
}

TEST_CASE("net traffic: more namespaces than a page has rows for") {
  const ShmHost host(Pool::plain(32 * kMiB));
  const auto channel = shm_to(host);
  std::uint64_t in_spaces = 0;
  const std::uint32_t spaces = kTrafficRows + 10;
  for (std::uint32_t i = 0; i < spaces; ++i) {
    Namespace& of = host.space(i, 4 * kKiB);
    const NamedSpace space(of);
    Caller caller(*channel, space, 1);
    caller.put(keys_from(0, 2));
    caller.step(5, keys_from(0, 2));
    caller.step(5, keys_from(0, 2));
  }
  std::uint64_t in_others = 0;
  for (const SpaceTraffic& each : host.node->traffic()) {
    check_sums(each.totals);
    if (each.space == nullptr) {
      CHECK(in_others == 0);
      in_others = each.totals.loaded_dram;
      continue;
    }
    CHECK(each.totals.put_blocks == 2);
    CHECK((each.totals.loaded_dram == 4 || each.totals.loaded_dram == 0));
    in_spaces += each.totals.loaded_dram;
  }
  CHECK(in_spaces == 4 * (kTrafficRows - 1));
  CHECK(in_others == 4 * (spaces - (kTrafficRows - 1)));
  CHECK(host.node->stats().get_blocks == 4 * spaces);
}

TEST_CASE("net traffic: a process of its own, whose figures outlive it") {
  const ShmHost host(Pool::plain(32 * kMiB));
  Namespace& of = host.space(1, kBlock);
  const NamedSpace space(of);
  {
    const auto channel = shm_to(host);
    Caller caller(*channel, space, 1);
    caller.put(keys_from(0, 4));
    caller.step(5, keys_from(0, 4));
    channel->close();
  }
  const auto deadline = never_hung();
  while (host.node->stats().clients > 0) REQUIRE(std::chrono::steady_clock::now() < deadline);
  CHECK(traffic_of(*host.node, of).loaded_dram == 4);
}

TEST_CASE("net traffic: every block that callers of all channels asked for, while blocks leave") {
  Random random("net traffic");
  const ShmHost host(Pool::plain(6 * kMiB));
  Namespace& of = host.space(1, kBlock);
  const NamedSpace space(of);
  std::vector<std::unique_ptr<Channel>> channels;
  for (int i = 0; i < 2; ++i) {
    channels.push_back(stream_to(host, host.server->add_client(), false));
    channels.push_back(shm_to(host));
    channels.push_back(std::make_unique<LocalChannel>(host.node));
  }
  NamedSpace local(of);
  local.local = &of;
  std::vector<Caller> callers;
  for (std::size_t i = 0; i < channels.size(); ++i)
    callers.emplace_back(*channels[i], local, random.engine()());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < callers.size(); ++i)
    threads.emplace_back([&, i] {
      callers[i].views = i % 3 != 0;
      callers[i].run(scaled(1500));
    });
  for (std::thread& thread : threads) thread.join();
  check_all(*host.node, of, callers);
  CHECK(host.node->stats().store.evictions > 0);
  channels.clear();
  CHECK(host.comes_to_rest(60s));
}

TEST_CASE("net traffic: blocks of the SSD, through every channel") {
  Random random("net traffic ssd");
  TempDirectory directory{fast_directory()};
  NodeOptions options = SsdPool::small(2, 16);
  options.ssd.path = directory / "tier";
  const ShmHost host(options);
  Namespace& of = host.space(1, kBlock);
  NamedSpace space(of);
  space.local = &of;
  const auto stream = stream_to(host, host.server->add_client());
  const auto shm = shm_to(host);
  LocalChannel local(host.node);
  std::vector<Caller> callers;
  callers.emplace_back(*stream, space, random.engine()());
  callers.emplace_back(*shm, space, random.engine()());
  callers.emplace_back(local, space, random.engine()());
  callers[0].views = false;
  for (Caller& caller : callers) caller.keys_max = 200;
  std::vector<std::thread> threads;
  for (Caller& caller : callers) threads.emplace_back([&] { caller.run(scaled(800)); });
  for (std::thread& thread : threads) thread.join();
  // A short run can have met the SSD never. DRAM holds 64 of these 200: every caller meets it now.
  for (std::uint64_t first = 0; first < 200; first += 8) callers[2].put(keys_from(first, 8));
  for (Caller& caller : callers)
    for (const std::uint64_t what : {3, 5})
      for (std::uint64_t first = 0; first < 200; first += 8) caller.step(what, keys_from(first, 8));
  check_all(*host.node, of, callers);
  const TrafficTotals totals = traffic_of(*host.node, of);
  CHECK(totals.loaded_ssd > 0);
  CHECK(totals.lookup_ssd > 0);
  // What is delivered of a block that was leased for it, after copies that came to nothing, counts
  // as from DRAM: it was brought there first.
  CHECK(totals.loaded_ssd <= host.node->stats().ssd_hits);
}

// With a request comes the begin of its payload, which goes on into a slot from there: one that
// somebody may still be copying, as he does not ask. For TSan: it finds nothing in those bytes.
TEST_CASE("net traffic: small blocks by a stream, into slots that are being read") {
  NodeOptions options = Pool::plain(32 * kMiB);
  options.store.blocks_limit = 2;
  const ShmHost host(options);
  Namespace& of = host.space(1, 2 * kKiB);
  NamedSpace space(of);
  space.local = &of;
  const auto stream = stream_to(host, host.server->add_client());
  LocalChannel local(host.node);
  Caller writer(*stream, space, 1), reader(local, space, 2);
  std::atomic<std::uint64_t> newest = 0;  // relaxed: it must not order what it lets meet
  std::atomic<bool> is_done = false;
  std::thread reading([&] {
    while (!is_done.load(std::memory_order_relaxed))
      reader.step(5, keys_from(newest.load(std::memory_order_relaxed), 1));
  });
  for (std::uint64_t i = 0; i < scaled(20'000); ++i) {
    writer.put(keys_from(i, 1));
    newest.store(i, std::memory_order_relaxed);
  }
  is_done.store(true, std::memory_order_relaxed);
  reading.join();
  check_all(*host.node, of, std::array{writer, reader});
  CHECK(host.node->stats().store.evictions > 0);
}

// --- clients and their leases --------------------------------------------------------------------

TEST_CASE("net traffic: leases are told with their age, and by client") {
  const ShmHost host(Pool::plain(32 * kMiB));
  Namespace& of = host.space(1, kBlock);
  const NamedSpace space(of);
  std::uint64_t number = 0;
  const auto shm = shm_to(host, &number);
  const auto leasing = stream_to(host, number, true);
  (void)host.server->add_client();
  Caller caller(*shm, space, 1);
  caller.put(keys_from(0, 5));
  CHECK(host.server->lease_ages() == LeaseAges::Counts{});
  {
    Miss why{};
    const auto pins = leasing->acquire(space, keys_from(0, 5), why);
    CHECK(sum(host.server->lease_ages()) == 5);
    const auto clients = host.server->clients();
    REQUIRE(clients.size() == 2);
    CHECK(clients[0].number == number);
    CHECK(clients[0].leases == 5);
    CHECK(clients[0].leased_bytes == 5 * kBlock);
    CHECK(clients[0].reads.views == 1);
    CHECK(clients[0].reads.view_blocks == 5);
    CHECK(clients[1].leases == 0);
  }
  CHECK(host.server->lease_ages() == LeaseAges::Counts{});
  host.server->drop_client(number);
  CHECK(host.server->clients().size() == 1);
}

ServerOptions slow(std::uint64_t put_bytes_per_s, std::uint64_t get_bytes_per_s) {
  ServerOptions options = ShmHost::small();
  options.put_bytes_per_s = put_bytes_per_s;
  options.get_bytes_per_s = get_bytes_per_s;
  return options;
}

TEST_CASE("rate: puts through lanes are limited, what is read in place is not") {
  ShmHost host(Pool::plain(64 * kMiB), slow(1, 1));
  Namespace& of = host.space(1, kBlock);
  const NamedSpace space(of);
  const auto channel = host.channel();
  CHECK(all_are(put_through(*channel, space, keys_from(0, 4)), PutStatus::stored));
  const auto refused = put_through(*channel, space, keys_from(2, 5));
  CHECK(all_are(std::span(refused).first(2), PutStatus::present));
  CHECK(refused[2] == PutStatus::limited);
  CHECK(refused[3] == PutStatus::chain_broken);
  PutStatus status{};
  const Hash128 key = key_of(50);
  auto room = channel->reserve({space, {&key, 1}, nullptr, never_hung()}, status);
  REQUIRE(room != nullptr);
  CHECK(room->commit(never_hung()) == PutStatus::limited);
  std::size_t wrong = 0;
  Miss why{};
  for (int i = 0; i < 3; ++i) CHECK(get_through(*channel, space, keys_from(0, 4), wrong, why) == 4);
  CHECK(wrong == 0);
  host.server->set_rates(0, 0);
  CHECK(all_are(put_through(*channel, space, keys_from(4, 3)), PutStatus::stored));
  const TrafficTotals totals = traffic_of(*host.node, of);
  check_sums(totals);
  CHECK(totals.put_as(PutStatus::limited) == 2);
  CHECK(totals.put_as(PutStatus::stored) == 7);
  room.reset();
}

}  // namespace
}  // namespace kvpool
