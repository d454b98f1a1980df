// Clients that read a node's memory by themselves, and blocks that the node has to ask others for.
#include "block/checksum.h"
#include "net/stream_channel.h"
#include "net_shm.h"
#include "node/elsewhere.h"

using namespace kvpool;
using namespace kvpool::test;

namespace {

constexpr std::uint32_t kBlockBytes = 30'000;

// Has the keys below a number.
class Neighbour final : public Elsewhere {
 public:
  explicit Neighbour(std::vector<Hash128> keys) : keys_(std::move(keys)) {}
  Miss find(const Ask& ask, std::span<std::uint8_t> has) override {
    for (std::size_t i = 0; i < ask.keys.size(); ++i) has[i] = this->has(ask.keys[i]);
    return Miss::none;
  }
  Miss fetch(const Ask& ask, BlockSink& sink) override {
    for (std::size_t i = 0; i < ask.keys.size(); ++i) {
      if (!has(ask.keys[i])) return Miss::absent;
      const auto payload = payload_of(ask.keys[i], ask.space.block_bytes);
      racy_fill(sink.place(i), payload.data(), payload.size());
      sink.arrived(i, checksum(payload.data(), payload.size()));
    }
    return Miss::none;
  }

 private:
  bool has(const Hash128& key) const { return std::ranges::find(keys_, key) != keys_.end(); }
  const std::vector<Hash128> keys_;
};

struct Attached {
  ShmHost host{Pool::plain(32 * kMiB)};
  NamedSpace space{host.space(1, kBlockBytes)};
  std::shared_ptr<StreamChannel> stream;
  std::unique_ptr<ShmChannel> channel;

  Attached() {
    auto ticket = host.ticket();
    auto made = StreamChannel::create({.leases_in_place = true});
    REQUIRE(made.has_value());
    stream = std::move(*made);
    int ends[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    REQUIRE(host.server->add_stream(ticket.client, ends[0]).has_value());
    REQUIRE(stream->attach({&ends[1], 1}).has_value());
    channel = std::make_unique<ShmChannel>(stream);
    auto client = ticket.attach();
    REQUIRE(client.has_value());
    channel->attach(*client);
  }
};

}  // namespace

TEST_CASE("node elsewhere: a client of the same host reaches what other members have") {
  Attached host;
  const auto keys = keys_from(1, 40);
  const auto here = std::span(keys).first(10);
  const auto last = std::span(keys).subspan(25, 5);
  put_through(*host.channel, host.space, here);
  put_through(*host.channel, host.space, last);
  Miss why{};
  std::vector<std::uint8_t> tiers(40);
  CHECK(host.channel->looks_up_at_once());
  CHECK(host.channel->lookup(host.space, keys, tiers.data(), why) == 10);

  host.host.node->set_elsewhere(std::make_shared<Neighbour>(keys_from(1, 35)));
  CHECK(!host.channel->looks_up_at_once());
  CHECK(host.channel->lookup(host.space, keys, tiers.data(), why) == 35);
  CHECK(why == Miss::absent);
  CHECK(tiers[9] == kTierDram);
  CHECK(tiers[10] == kTierRemote);
  CHECK(tiers[25] == kTierDram);
  CHECK(tiers[34] == kTierRemote);
  CHECK(tiers[35] == 0);

  SUBCASE("to copy") {
    std::size_t wrong = 0;
    CHECK(get_through(*host.channel, host.space, keys, wrong, why) == 35);
    CHECK(why == Miss::absent);
    CHECK(wrong == 0);
  }
  SUBCASE("to look at in place") {
    const auto pins = host.channel->acquire(host.space, keys, why);
    REQUIRE(pins->places.size() == 35);
    CHECK(why == Miss::absent);
    for (std::size_t i = 0; i < 35; ++i)
      CHECK(is_payload(pins->base + pins->places[i].offset, kBlockBytes, keys[i]));
  }
  CHECK(host.host.node->lookup(host.host.space(1, kBlockBytes), keys, nullptr, Reach::here()) ==
        35);
  host.host.node->set_elsewhere(nullptr);
  CHECK(host.channel->looks_up_at_once());
  CHECK(host.host.comes_to_rest(std::chrono::seconds(10)));
  host.host.node->check_invariants();
}
