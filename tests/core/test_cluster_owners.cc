// Names of blocks between nodes, and who keeps which slots of the directory.
#include <doctest/doctest.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "cluster/owner_table.h"

namespace kvpool {
namespace {

// Of this thread: what others do on the machine does not count.
double cpu_ms() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) * 1e-6;
}

Hash128 key_of(std::uint64_t n) { return {mix64(n + 77), mix64(~n)}; }

std::vector<Voter> voters_of(std::size_t count, std::uint32_t weight_of(std::size_t) = nullptr) {
  std::vector<Voter> voters;
  for (std::size_t i = 0; i < count; ++i)
    voters.push_back({key_of(1000 + i), weight_of == nullptr ? 1 : weight_of(i)});
  return voters;
}

TEST_CASE("cluster owners: names of blocks are the same everywhere, for good") {
  const DirectoryKey zero = make_directory_key({}, {});
  const DirectoryKey one = make_directory_key({1, 2}, {3, 4});
  const DirectoryKey swapped = make_directory_key({3, 4}, {1, 2});
  CHECK(zero == DirectoryKey{0xcd81'3c4f'efaf'c2d8u, 0xd57a'b0bb'7bc9'b1a1u});
  CHECK(one == DirectoryKey{0x55dd'6e11'd8af'7da5u, 0x7451'6b36'a91e'1e93u});
  CHECK(swapped != one);
  CHECK(slot_of({0, 0xabcd'0000'0000'0001}) == 0xabcd);
}

TEST_CASE("cluster owners: names of blocks fill all slots alike") {
  std::vector<std::uint32_t> count(256);
  const Hash128 space = key_of(~7ull);
  for (std::uint64_t i = 0; i < (1 << 18); ++i)
    ++count[slot_of(make_directory_key(space, {i, 0})) >> 8];  // keys that are far from random
  for (const std::uint32_t each : count) CHECK(std::abs(static_cast<double>(each) - 1024) < 200);
}

TEST_CASE("cluster owners: the table is the same everywhere, for good") {
  std::vector<Voter> voters = voters_of(5, [](std::size_t i) { return std::uint32_t(1 + i % 3); });
  const OwnerTable table = OwnerTable::build(voters);
  std::reverse(voters.begin(), voters.end());
  CHECK(OwnerTable::build(voters).fingerprint() == table.fingerprint());
  CHECK(table.fingerprint() == 0x1c32'0445'bb3d'1decu);
  voters[0].weight = 7;
  CHECK(OwnerTable::build(voters).fingerprint() != table.fingerprint());
}

TEST_CASE("cluster owners: slots by weight") {
  for (const std::size_t members : {1, 3, 8, 32}) {
    const auto weight_of = [](std::size_t i) { return std::uint32_t(1) << (i % 3); };
    const OwnerTable table = OwnerTable::build(voters_of(members, weight_of));
    double weights = 0;
    for (const Voter& each : table.voters()) weights += each.weight;
    std::size_t sum = 0;
    for (std::uint16_t i = 0; i < members; ++i) {
      const double share = table.voters()[i].weight / weights;
      const double slots = static_cast<double>(table.slots_of(i).count());
      const double sigma = std::sqrt(kDirectorySlots * share * (1 - share));
      CHECK(std::abs(slots - share * kDirectorySlots) <= 5 * sigma + 1);
      sum += table.slots_of(i).count();
    }
    CHECK(sum == kDirectorySlots);
  }
}

TEST_CASE("cluster owners: the heaviest against the lightest") {
  const std::vector<Voter> voters{{key_of(1), 256}, {key_of(2), 1}};
  const OwnerTable table = OwnerTable::build(voters);
  const auto light = static_cast<double>(table.slots_of(table.index_of(key_of(2))).count());
  CHECK(std::abs(light - 255) < 5 * 16);
}

TEST_CASE("cluster owners: who comes or goes moves its own slots only") {
  const std::vector<Voter> all =
      voters_of(9, [](std::size_t i) { return std::uint32_t(1 + i % 4); });
  const OwnerTable whole = OwnerTable::build(all);
  for (std::size_t left_out = 0; left_out < all.size(); ++left_out) {
    std::vector<Voter> some = all;
    some.erase(some.begin() + static_cast<std::ptrdiff_t>(left_out));
    const OwnerTable less = OwnerTable::build(some);
    const SlotSet own = whole.slots_of(whole.index_of(all[left_out].id));
    CHECK((moved(whole, less) == own));
    CHECK((moved(less, whole) == own));
  }
  CHECK(moved(whole, OwnerTable::build(all)).none());
  CHECK(moved(OwnerTable(), whole).all());
  CHECK(moved(whole, OwnerTable()).none());
}

TEST_CASE("cluster owners: more weight only wins slots, none keeps none") {
  std::vector<Voter> voters = voters_of(6);
  const OwnerTable before = OwnerTable::build(voters);
  voters[2].weight = 3;
  const OwnerTable more = OwnerTable::build(voters);
  const std::uint16_t at = more.index_of(voters[2].id);
  CHECK((moved(before, more) & ~more.slots_of(at)).none());
  CHECK(more.slots_of(at).count() > 2 * before.slots_of(at).count());
  voters[2].weight = 0;
  const OwnerTable none = OwnerTable::build(voters);
  CHECK(none.slots_of(at).none());
  CHECK((moved(before, none) == before.slots_of(at)));
  CHECK(none.index_of(key_of(5)) == OwnerTable::kNobody);
}

TEST_CASE("cluster owners: nobody owns anything") {
  const OwnerTable nobody = OwnerTable::build({});
  CHECK(nobody.owner(0) == OwnerTable::kNobody);
  CHECK(OwnerTable().owner_of(key_of(1)) == OwnerTable::kNobody);
  const std::vector<Voter> light{{key_of(1), 0}};
  CHECK(OwnerTable::build(light).owner(77) == OwnerTable::kNobody);
}

TEST_CASE("cluster owners: how long a table takes") {
  const std::vector<Voter> voters = voters_of(8);
  double best = 1e9;
  for (int run = 0; run < 5; ++run) {
    const double before = cpu_ms();
    const OwnerTable table = OwnerTable::build(voters);
    best = std::min(best, cpu_ms() - before);
    REQUIRE(table.owner(0) < 8);
  }
  std::printf("owner table of 8 members: %.2f ms\n", best);
}

}  // namespace
}  // namespace kvpool
