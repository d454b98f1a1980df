// What was asked of this node, from the namespaces' own counters and the pages of its clients.
#include "node/node.h"

namespace kvpool {

// Under the lock.
void Node::take_client_traffic(Attached& client) {
  client.traffic->take(*client.page, [&](PageTraffic::More more) {
    // No such number: of the row for all others, or nonsense.
    const Namespace* const space =
        more.space > kNamespacesMax
            ? nullptr
            : store_->namespaces().numbered(static_cast<std::uint32_t>(more.space - 1));
    if (space != nullptr) more.client.get_bytes = more.client.get_blocks * space->block_bytes;
    (space != nullptr ? *space->traffic : nameless_).add_reads(more.traffic);
    client.totals.add(more.client);
    clients_read_.add(more.client);
  });
}

ClientTotals Node::client_totals(const ClientPage& page) {
  Lock lock(mutex_);
  for (Attached& client : attached_) {
    if (client.page != &page) continue;
    take_client_traffic(client);
    return client.totals;
  }
  return {};
}

std::vector<SpaceTraffic> Node::traffic() {
  std::vector<SpaceTraffic> all;
  {
    Lock lock(mutex_);
    for (Attached& client : attached_) take_client_traffic(client);
    for (const Namespace* space : store_->namespaces().all())
      all.push_back({.space = space, .blocks = space->blocks, .totals = {}});
  }
  for (SpaceTraffic& each : all) each.totals = each.space->traffic->totals();
  // Without a namespace: what clients have read in those beyond the ones that they tell apart.
  const TrafficTotals others = nameless_.totals();
  if (others.lookups + others.gets > 0) all.push_back({.totals = others});
  return all;
}

// Without the lock: namespaces stay. What clients have read is in their counters already.
void Node::add_traffic(NodeStats& stats, std::span<Namespace* const> spaces) const {
  const auto add = [&](const TrafficTotals& totals, std::uint64_t block_bytes) {
    // A view that is just being counted may be half told.
    const std::uint64_t copied = totals.loaded() - std::min(totals.loaded(), totals.view_blocks);
    stats.gets += totals.gets - std::min(totals.gets, totals.views);
    stats.get_blocks += copied;
    stats.get_bytes += copied * block_bytes;
    stats.missed_absent += totals.missed_for(Miss::absent);
    stats.missed_moved += totals.missed_for(Miss::moved);
    stats.missed_fault += totals.missed_for(Miss::fault);
    for (std::uint8_t status = 0; status < kPutStatuses; ++status)
      if (!is_there(static_cast<PutStatus>(status))) stats.not_stored += totals.put_status[status];
    stats.put_bytes +=
        (totals.put_as(PutStatus::stored) + totals.put_as(PutStatus::not_durable)) * block_bytes;
  };
  for (const Namespace* space : spaces) add(space->traffic->totals(), space->block_bytes);
  add(nameless_.totals(), 0);
}

}  // namespace kvpool
