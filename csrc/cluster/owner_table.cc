#include "cluster/owner_table.h"

#include <algorithm>
#include <array>
#include <bit>

#include "base/check.h"
#include "block/checksum.h"

namespace kvpool {
namespace {

// A voter's draw for a slot is u in (0, 1], and the lowest -log2(u) / weight owns it: so each wins
// in proportion to its weight, whoever else there is. Logarithms have 48 bits behind the point.
constexpr int kPointBits = 48;
constexpr int kTableBits = 10;
constexpr std::size_t kTableSize = (1u << kTableBits) + 1;

// log2 of a mantissa in [1, 2) with 63 bits behind the point, bit by bit.
constexpr std::uint64_t log2_bits(std::uint64_t mantissa) {
  std::uint64_t log = 0;
  for (int bit = 0; bit < kPointBits; ++bit) {
    const auto square = static_cast<unsigned __int128>(mantissa) * mantissa;
    const bool is_two = (square >> 127) != 0;
    mantissa = static_cast<std::uint64_t>(square >> (is_two ? 64 : 63));
    log = log << 1 | std::uint64_t{is_two};
  }
  return log;
}

// Between two places of the table the logarithm is taken for a straight line. That is off by less
// than 1/2000 of what it says for u near 1, where the winners are; and the same everywhere.
class Logarithm {
 public:
  Logarithm() {
    for (std::size_t i = 0; i + 1 < kTableSize; ++i)
      table_[i] = log2_bits((std::uint64_t{1} << 63) + (std::uint64_t{i} << (63 - kTableBits)));
    table_[kTableSize - 1] = std::uint64_t{1} << kPointBits;
  }
  // -log2((draw + 1) / 2^64): 0 to 64.
  std::uint64_t minus_log2(std::uint64_t draw) const {
    if (draw == ~std::uint64_t{0}) return 0;
    const std::uint64_t u = draw + 1;
    const int zeros = std::countl_zero(u);
    const std::uint64_t mantissa = (u << zeros) & ~(std::uint64_t{1} << 63);
    const std::size_t i = mantissa >> (63 - kTableBits);
    const std::uint64_t rest = (mantissa >> (63 - kTableBits - 16)) & 0xffff;
    const std::uint64_t log = table_[i] + (((table_[i + 1] - table_[i]) * rest) >> 16);
    return (std::uint64_t(zeros + 1) << kPointBits) - log;
  }

 private:
  std::array<std::uint64_t, kTableSize> table_;
};

struct Draws {
  std::uint64_t seed;
  std::uint32_t weight;
  std::uint16_t index;
};

std::uint16_t winner(const Logarithm& logarithm, std::uint64_t slot, std::span<const Draws> all) {
  std::uint16_t best = OwnerTable::kNobody;
  std::uint64_t best_log = 0, best_weight = 1;
  for (const Draws& each : all) {
    const std::uint64_t log = logarithm.minus_log2(mix64(slot ^ each.seed));
    // log / weight < best_log / best_weight; below 2^55 * 2^9. Equal: the lower id stays.
    if (best != OwnerTable::kNobody && log * best_weight >= best_log * each.weight) continue;
    best = each.index;
    best_log = log;
    best_weight = each.weight;
  }
  return best;
}

}  // namespace

OwnerTable OwnerTable::build(std::span<const Voter> voters) {
  KVP_CHECK(voters.size() <= kMembersMax);
  OwnerTable made;
  made.voters_.assign(voters.begin(), voters.end());
  std::ranges::sort(made.voters_, {}, &Voter::id);
  std::vector<Draws> draws;
  std::uint64_t names = 0;
  for (std::size_t i = 0; i < made.voters_.size(); ++i) {
    const Voter& each = made.voters_[i];
    KVP_CHECK(each.weight <= kWeightMax);
    const std::uint64_t seed = mix64(each.id.low + mix64(each.id.high + 0x9e37'79b9'7f4a'7c15u));
    names = mix64(names + mix64(seed ^ each.weight));
    if (each.weight > 0) draws.push_back({seed, each.weight, static_cast<std::uint16_t>(i)});
  }
  const Logarithm logarithm;
  made.owners_.resize(kDirectorySlots);
  for (std::size_t slot = 0; slot < kDirectorySlots; ++slot)
    made.owners_[slot] = winner(logarithm, mix64(slot + 1), draws);
  made.fingerprint_ =
      checksum(made.owners_.data(), made.owners_.size() * sizeof(std::uint16_t)).low ^ names;
  return made;
}

std::uint16_t OwnerTable::index_of(const Hash128& id) const {
  const auto at = std::ranges::lower_bound(voters_, id, {}, &Voter::id);
  if (at == voters_.end() || at->id != id) return kNobody;
  return static_cast<std::uint16_t>(at - voters_.begin());
}

SlotSet OwnerTable::slots_of(std::uint16_t voter) const {
  SlotSet slots;
  for (std::size_t slot = 0; slot < owners_.size(); ++slot)
    if (owners_[slot] == voter && voter != kNobody) slots.set(slot);
  return slots;
}

SlotSet moved(const OwnerTable& before, const OwnerTable& now) {
  // By number in `before` of each voter of `now`: ids are compared once, not once a slot.
  std::vector<std::uint16_t> was(now.voters().size());
  for (std::size_t i = 0; i < was.size(); ++i) was[i] = before.index_of(now.voters()[i].id);
  SlotSet slots;
  for (std::uint32_t slot = 0; slot < kDirectorySlots; ++slot) {
    const std::uint16_t owner = now.owner(slot);
    if (owner == OwnerTable::kNobody) continue;
    if (was[owner] == OwnerTable::kNobody || was[owner] != before.owner(slot)) slots.set(slot);
  }
  return slots;
}

}  // namespace kvpool
