// Copies of what other nodes have: which are kept, which go first, and which the SSD gets.
#include "cluster_members.h"
#include "node_ssd_cases.h"

namespace kvpool {
namespace {

using namespace test;

constexpr std::uint32_t kBlock = 16 * kKiB;

// More than fits; one by one, since what one call puts as a chain stays until that is over.
void fill(TestMember& member, std::uint64_t first) {
  for (const Hash128& key : keys_from(first, 300))
    member.served->put(member.space(kBlock), {&key, 1});
}

TEST_CASE("node copies: of equally warm blocks the copies go first") {
  StoreOptions options;
  options.bytes_limit = 4 * kMiB;
  options.tau_s = 100;
  options.salt = 3;
  auto store = Store::create(options);
  REQUIRE(store.has_value());
  Store& here = **store;
  Namespace& space = **here.open_namespace(key_of(1), kBlock);
  std::vector<Hash128> own, copies;
  std::vector<BlockId> records(40);
  for (std::uint64_t n = 0; n < 40; ++n) {
    const auto reserved = here.reserve(space, key_of(n + 1), 1);
    REQUIRE(reserved.outcome == Store::Reserved::Outcome::reserved);
    if (reserved.makes_slab) here.pages_made(reserved.record, true);
    records[n] = reserved.record;
    const bool is_copy = n % 2 == 0;
    (is_copy ? copies : own).push_back(key_of(n + 1));
    CHECK((is_copy ? here.commit_copy(reserved.record, {}, kNoBlock, 0, 1)
                   : here.commit(reserved.record, {}, kNoBlock, 1)) == Store::Committed::stored);
    CHECK(here.is_copy(reserved.record) == is_copy);
  }
  here.touch(records[0], 1);  // a copy that was used here
  for (int i = 0; i < 19; ++i) REQUIRE(here.evict_one(2));
  BlockId record = kNoBlock;
  for (const Hash128& key : own) CHECK(here.find(space, key, record));
  for (const Hash128& key : std::span(copies).subspan(1)) CHECK(!here.find(space, key, record));
  CHECK(here.find(space, copies[0], record));
  REQUIRE(here.evict_one(2));  // and from then on the coldest
  CHECK(here.find(space, copies[0], record));
  here.check_invariants();
}

TEST_CASE("node copies: one that came with heat outlasts what is colder") {
  StoreOptions options;
  options.bytes_limit = 4 * kMiB;
  options.tau_s = 100;
  auto store = Store::create(options);
  REQUIRE(store.has_value());
  Store& here = **store;
  Namespace& space = **here.open_namespace(key_of(1), kBlock);
  for (std::uint64_t n = 1; n <= 10; ++n) {
    const auto reserved = here.reserve(space, key_of(n), 1);
    REQUIRE(reserved.outcome == Store::Reserved::Outcome::reserved);
    if (reserved.makes_slab) here.pages_made(reserved.record, true);
    if (n == 1)
      here.commit_copy(reserved.record, {}, kNoBlock, 8, 1);
    else
      here.commit(reserved.record, {}, kNoBlock, 1);
  }
  for (int i = 0; i < 9; ++i) REQUIRE(here.evict_one(2));
  BlockId record = kNoBlock;
  CHECK(here.find(space, key_of(1), record));
  here.check_invariants();
}

TEST_CASE("node copies: on a full pool one is kept when it is asked for a second time") {
  NodeOptions options = TestCluster::plain(4 * kMiB);
  options.store.tau_s = 100;
  TestCluster cluster(2, options);
  TestMember& has = cluster[0];
  TestMember& asks = cluster[1];
  Namespace& space = asks.space(kBlock);
  const auto keys = keys_from(1, 50);
  cluster.put(has, keys, kBlock);
  Miss why{};
  const auto count_here = [&] {
    std::size_t count = 0;
    for (const Hash128& key : keys) count += asks.node().look(space, {&key, 1}, nullptr).present;
    return count;
  };
  fill(asks, 1000);
  CHECK(asks.get(keys, kBlock, why) == 50);
  CHECK(count_here() == 0);
  CHECK(asks.node().stats().far.too_cold == 50);
  CHECK(asks.get(keys, kBlock, why) == 50);
  CHECK(count_here() == 50);
  CHECK(asks.node().stats().far.kept == 50);

  // Too long ago counts as never.
  asks.node().remove(space, keys);
  fill(asks, 5000);
  CHECK(asks.get(keys, kBlock, why) == 50);
  CHECK(count_here() == 0);
  asks.pool().clock->set(asks.pool().clock->now() + 150);
  CHECK(asks.get(keys, kBlock, why) == 50);
  CHECK(count_here() == 0);
  CHECK(asks.get(keys, kBlock, why) == 50);
  CHECK(count_here() == 50);
  cluster.check_at_rest();
}

TEST_CASE("node copies: where there is room all are kept, and where no policy remembers") {
  for (const PolicyKind policy : {PolicyKind::temperature, PolicyKind::lru}) {
    NodeOptions options = TestCluster::plain(4 * kMiB);
    options.store.policy = policy;
    TestCluster cluster(2, options);
    const auto keys = keys_from(1, 50);
    cluster.put(cluster[0], keys, kBlock);
    if (policy == PolicyKind::lru) fill(cluster[1], 1000);
    Miss why{};
    CHECK(cluster[1].get(keys, kBlock, why) == 50);
    CHECK(cluster[1].node().stats().far.kept == 50);
    cluster.check_at_rest();
  }
}

TEST_CASE("node copies: the SSD gets them when nobody else has them, or when they are put") {
  const TempDirectory directory{fast_directory()};
  NodeOptions options = SsdPool::small(32, 64);
  options.far_timeout = std::chrono::seconds(30);
  for (const SsdAdmit admit : {SsdAdmit::all, SsdAdmit::second_use}) {
    options.ssd_admit = admit;
    TestCluster cluster(1);
    NodeOptions second = options;
    second.ssd.path = directory / (admit == SsdAdmit::all ? "all" : "second");
    cluster.members.push_back(std::make_unique<TestMember>(2, second, PeerOptions{}));
    cluster.tell_members();
    TestCluster::connect(cluster[0], cluster[1], 3);
    TestCluster::connect(cluster[1], cluster[0], 3);
    Namespace& space = cluster[1].space(kBlock);
    const auto keys = keys_from(1, 30);
    cluster.put(cluster[0], keys, kBlock);
    Miss why{};
    for (int i = 0; i < 3; ++i) CHECK(cluster[1].get(keys, kBlock, why) == 30);
    Node& node = cluster[1].node();
    REQUIRE(node.flush(never_hung()));
    CHECK(node.stats().ssd_blocks == 0);
    const auto first = std::span(keys).first(10), rest = std::span(keys).subspan(10);
    cluster[1].served->put(space, first);
    REQUIRE(node.flush(never_hung()));
    CHECK(node.stats().ssd_blocks == 10);
    node.be_last(space, rest);
    REQUIRE(node.flush(never_hung()));
    CHECK(node.stats().ssd_blocks == 30);
    cluster[1].pool().check_at_rest();
  }
}

TEST_CASE("node copies: a chain is told from its first block, in pieces, as far as it is here") {
  Pool pool(Pool::plain(64 * kMiB));
  Namespace& space = pool.space(1, 4 * kKiB);
  const auto keys = keys_from(1, 1000);
  pool.put(space, keys);
  CHECK(pool.node->chain_of(space, key_of(5000), 100).empty());
  const auto whole = pool.node->chain_of(space, keys.back(), 10'000);
  REQUIRE(whole.size() == 1000);
  for (std::size_t i = 0; i < whole.size(); ++i) CHECK(whole[i].key == keys[i]);
  CHECK(pool.node->chain_of(space, keys.back(), 10).size() == 10);
  CHECK(pool.node->chain_of(space, keys[499], 10'000).size() == 500);
  CHECK(pool.node->ends(10'000).size() == 1);
  pool.check_at_rest();
}

}  // namespace
}  // namespace kvpool
