// What people ask of single blocks, and what is written down so that they can be answered: why a
// block left, and how far apart its uses are.
#include <algorithm>

#include "node/store.h"

namespace kvpool {
namespace {

// The largest size that anybody will ask the curve of reuse distances for: 16 times this DRAM, and
// some more so that the curve does not end just there; with the SSD behind it, twice that too.
constexpr std::uint64_t kReachOfDram = 20, kReachOfSsd = 2;

}  // namespace

void Store::fit_reach() {
  const std::uint64_t ssd_bytes = ssd_ ? ssd_->options().facts.units * kUnitBytes : 0;
  reuse_.set_reach(bytes_limit() * kReachOfDram + ssd_bytes * kReachOfSsd);
}

void Store::note_gone(BlockId record, const IndexWriter::Fields& fields, Gone why, Seconds now) {
  const Fingerprint name = fingerprint(fields.incarnation, fields.key);
  departures_.prefetch(name);
  const double heat = uses().heat(record, now);
  departures_.note(
      name,
      {.why = why, .was_on_ssd = is_on_ssd(record), .heat = static_cast<float>(heat), .when = now});
  if (why <= Gone::evicted_ssd) return;  // it lies between two uses wherever it would be by now
  const Fingerprint counted = ReuseBook::name_of(fields.incarnation, fields.key);
  if (const Namespace* space = namespaces_.of(fields.incarnation))
    reuse_.forget(space->number, counted);
  else
    reuse_.forget_in_all(counted);
}

void Store::note_refused(const Namespace& space, const Hash128& key, std::uint8_t status,
                         Seconds now) {
  const std::uint32_t incarnation = space.incarnation.load(std::memory_order_relaxed);
  departures_.note(fingerprint(incarnation, key),
                   {.why = Gone::refused, .status = status, .when = now});
}

std::optional<double> Store::coldest_heat(Seconds now) const {
  std::optional<double> coldest;
  for (ClassId klass = 0; klass < slabs_.class_count(); ++klass) {
    const BlockId record = policy_->peek_coldest(klass);
    if (record == kNoBlock) continue;
    const double heat = uses().heat(record, now);
    if (!coldest || heat < *coldest) coldest = heat;
  }
  return coldest;
}

Store::Explained Store::explain(const Namespace& space, const Hash128& key, Seconds now) const {
  Explained answer;
  const std::uint32_t incarnation = space.incarnation.load(std::memory_order_relaxed);
  const Fingerprint name = fingerprint(incarnation, key);
  BlockId record = kNoBlock;
  if (index_->find(key, incarnation, record)) {
    const Private& mine = private_[record];
    answer.tiers = view().record(record).tier.load(std::memory_order_relaxed);
    answer.heat = uses().heat(record, now);
    answer.temperature = (is_in_dram(record) ? *policy_ : ssd_->heat()).temperature(record);
    answer.idle_s = uses().idle_s(record, now);
    answer.pins = mine.pins_or_next + (is_in_dram(record) && is_named(record));
    return answer;
  }
  answer.ghost_heat = policy_->ghost_heat(name, now);
  if (!answer.ghost_heat && ssd_) answer.ghost_heat = ssd_->heat().ghost_heat(name, now);
  answer.gone = departures_.look(name);
  const std::uint32_t dropped = space.dropped_incarnation;
  if (answer.gone || dropped == 0) return answer;
  if (index_->find(key, dropped, record))  // its memory is not swept yet
    answer.gone = {.why = Gone::dropped,
                   .was_on_ssd = is_on_ssd(record),
                   .heat = static_cast<float>(uses().heat(record, now)),
                   .when = now};
  else
    answer.gone = departures_.look(fingerprint(dropped, key));
  return answer;
}

}  // namespace kvpool
