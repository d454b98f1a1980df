// The rows of a client's page that say what it has read without asking (node/client_page.h).
#include "net/shm_use.h"

namespace kvpool {
namespace {

constexpr std::uint32_t kNamedRows = kTrafficRows - 1;

void add(TrafficRow& row, std::uint32_t word, std::uint64_t more) {
  if (more != 0) row[word].fetch_add(more, std::memory_order_relaxed);
}

// False: another thread was first, for the namespace that is `said` then.
bool claim(ClientTraffic& rows, std::uint32_t at, std::uint64_t name, std::uint64_t& said) {
  if (!rows[at][TrafficRow::space].compare_exchange_strong(said, name, std::memory_order_relaxed))
    return false;
  rows.in_use.fetch_or(std::uint64_t{1} << at, std::memory_order_relaxed);
  return true;
}

// The first kNamedRows namespaces that this client meets have a row each, as a rule the one that
// is looked at first. What it reads in others is told, but not of which.
TrafficRow& row_of(const ShmUse& use) {
  ClientTraffic& rows = use.client->page().traffic;
  const std::uint64_t name = std::uint64_t{use.number} + 1;
  for (std::uint32_t i = 0; use.number < kNamespacesMax && i < kNamedRows; ++i) {
    const std::uint32_t at = (use.number + i) % kNamedRows;
    std::uint64_t said = rows[at][TrafficRow::space].load(std::memory_order_relaxed);
    if (said == name) return rows[at];
    if (said != 0) continue;
    if (claim(rows, at, name, said) || said == name) return rows[at];
  }
  std::uint64_t said = rows[kNamedRows][TrafficRow::space].load(std::memory_order_relaxed);
  if (said == 0) claim(rows, kNamedRows, TrafficRow::kAnySpace, said);
  return rows[kNamedRows];
}

void add_missed(TrafficRow& row, const Share& share) {
  std::size_t missing = share.asked - share.loaded;
  if (missing == 0) return;
  if (share.is_first) {
    add(row, TrafficRow::missed + static_cast<std::uint32_t>(share.why), 1);
    --missing;
  }
  add(row, TrafficRow::missed + static_cast<std::uint32_t>(Miss::behind), missing);
}

}  // namespace

void count_lookup(const ShmUse& use, std::size_t asked, const Looked& looked) {
  TrafficRow& row = row_of(use);
  add(row, TrafficRow::lookups, 1);
  add(row, TrafficRow::lookup_dram, looked.present - looked.on_ssd);
  add(row, TrafficRow::lookup_ssd, looked.on_ssd);
  if (looked.present == asked) return;
  add(row, TrafficRow::lookup_missed, 1);
  add(row, TrafficRow::lookup_behind, asked - looked.present - 1);
}

void count_get(const ShmUse& use, const Share& share) {
  TrafficRow& row = row_of(use);
  add(row, TrafficRow::gets, 1);
  add(row, TrafficRow::loaded, share.loaded);
  add_missed(row, share);
}

void count_view(const ShmUse& use, const Share& share) {
  TrafficRow& row = row_of(use);
  add(row, TrafficRow::views, 1);
  add(row, TrafficRow::view_blocks, share.loaded);
  add_missed(row, share);
}

}  // namespace kvpool
