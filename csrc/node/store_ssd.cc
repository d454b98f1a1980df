// How blocks pass between DRAM and the SSD tier, and what is queued to be written. Groups are made
// in store_group.cc, room on the SSD in store_ssd_room.cc, a restart in store_restore.cc.
#include <algorithm>

#include "base/check.h"
#include "node/store.h"

namespace kvpool {

void Store::attach_ssd(const SsdBooksOptions& options) {
  SsdBooksOptions full = options;
  full.records_max = records_max_;
  full.ghosts_max = std::min<std::uint64_t>(options.facts.entries_max * 16,
                                            bytes_limit() / 100 / 32);  // as for DRAM
  ssd_ = std::make_unique<SsdBooks>(full);
  takes_writes_ = true;
  fit_reach();
}

// The files are closed: what lies in them stays there, and is nothing to us any more.
void Store::detach_ssd() {
  if (!ssd_) return;
  takes_writes_ = false;
  for (BlockId record = 0; record < records_used_; ++record) {
    Private& mine = private_[record];
    if (mine.state == State::free) continue;
    const bool is_only_there = mine.state == State::resident && !is_in_dram(record);
    if (is_on_ssd(record)) --on_ssd_;
    const std::uint8_t before = tiers_of(record);
    mine.flags &= kInDram | kLoading;
    if (mine.state == State::resident && !is_only_there) note_tiers(record, before);
    if (is_only_there) retire(record, Gone::lost, 0);
  }
  ssd_.reset();
}

// --- blocks that are to be written ---------------------------------------------------------------

void Store::write_soon(BlockId record) {
  Private& mine = private_[record];
  if (!takes_writes_ || mine.state != State::resident) return;  // a zombie goes with its last pin
  if ((mine.flags & (kOnSsd | kQueued | kWriting)) != 0) return;
  mine.flags |= kQueued;
  mine.unworthy = false;
  ssd_->queue().push(record);
}

void Store::unqueue(BlockId record) {
  Private& mine = private_[record];
  if ((mine.flags & kQueued) == 0) return;
  mine.flags &= static_cast<std::uint8_t>(~kQueued);
  ssd_->queue().remove(record);
}

void Store::queue_all() {
  if (ssd_->options().admit != SsdAdmit::all) return;  // the others stand in the queue already
  for (BlockId record = 0; record < records_used_; ++record)
    if (private_[record].state == State::resident && !is_copy(record)) write_soon(record);
}

void Store::queue_unwritten() {
  for (const BlockId record : ssd_->take_unwritten())
    if (private_[record].state == State::resident) write_soon(record);
}

void Store::stop_queueing() {
  takes_writes_ = false;
  while (const auto record = ssd_->queue().first()) unqueue(*record);
}
// --- back into DRAM ------------------------------------------------------------------------------

bool Store::is_full(ClassId klass) const {
  return slabs_.units_in_slabs() + slabs_.slab_units(klass) > slabs_.limit() ||
         (blocks_limit_ != 0 && spare_blocks() == 0);
}

bool Store::is_warm_enough(BlockId record) const {
  const ClassId klass = private_[record].klass;
  if (!is_full(klass)) return true;
  const BlockId victim = policy_->peek_coldest(klass);
  if (victim == kNoBlock) return false;
  return ssd_->heat().temperature(record) > ssd_->heat().temperature(victim);
}

Store::Reserved Store::reserve_promotion(BlockId record, bool forced, Seconds now) {
  using Outcome = Reserved::Outcome;
  Private& mine = private_[record];
  KVP_CHECK(mine.pins_or_next > 0);
  if (mine.state != State::resident) return {.outcome = Outcome::no_room};
  if (is_in_dram(record)) return {.outcome = Outcome::present, .record = record};
  if ((mine.flags & kLoading) != 0) return {.outcome = Outcome::pending, .record = record};
  const ClassId klass = mine.klass;
  if (slabs_.slab_units(klass) > slabs_.limit())
    return {.outcome = Outcome::no_room, .why = NoRoom::too_large};
  if (!forced && !is_warm_enough(record)) return {.outcome = Outcome::no_room};
  const Room room = make_room(klass, now);
  if (room == Room::again) return {.outcome = Outcome::again};
  if (room == Room::none) return {.outcome = Outcome::no_room, .why = NoRoom::pool_pinned};
  const auto slot = slabs_.take(klass, record);
  mine.flags |= kLoading;
  ++loading_;
  Reserved answer{.outcome = Outcome::reserved, .record = record, .offset = slot->offset};
  claim_pages(*slot, klass, answer);
  return answer;
}

void Store::promotion_pages_made(std::uint64_t offset, bool made) {
  slabs_.pages_made(slabs_.slot_at(offset).slab, made);
}

bool Store::promote(BlockId record, std::uint64_t offset, Seconds now) {
  Private& mine = private_[record];
  if (mine.state != State::resident) {
    abandon_promotion(record, offset);
    return false;
  }
  KVP_CHECK((mine.flags & kLoading) != 0 && !is_in_dram(record));
  mine.flags = static_cast<std::uint8_t>((mine.flags & ~kLoading) | kInDram);
  --loading_;
  ++in_dram_;
  ++counters_.promotions;
  index_->promote(record, offset);
  enter_dram_order(record, ssd_->heat().parent(record), now);
  policy_->set_heat(record, ssd_->heat().heat(record, now), now);
  note_tiers(record, kOnSsd);
  return true;
}

void Store::abandon_promotion(BlockId record, std::uint64_t offset) {
  Private& mine = private_[record];
  KVP_CHECK((mine.flags & kLoading) != 0);
  mine.flags &= static_cast<std::uint8_t>(~kLoading);
  --loading_;
  slabs_.give(slabs_.slot_at(offset));
}

// Nobody pins it, and the SSD has a copy. The record goes on, so no reader of it is turned away.
void Store::demote(BlockId record, Seconds now) {
  Private& mine = private_[record];
  KVP_CHECK(mine.state == State::resident && mine.pins_or_next == 0);
  const IndexWriter::Fields fields = index_->fields(record);
  index_->demote(record);
  policy_->erase(record, fingerprint(fields.incarnation, fields.key), Leave::evicted, now);
  mine.parked = false;
  mine.flags &= static_cast<std::uint8_t>(~kInDram);
  --in_dram_;
  ++counters_.demotions;
  note_tiers(record, kInDram | kOnSsd);
  vacate(fields.offset);
}

void Store::lose_ssd_copy(BlockId record, bool quarantine, Seconds now) {
  const Private& mine = private_[record];
  // One that is gone already loses its copy with its last pin.
  if (mine.state != State::resident || !is_on_ssd(record)) return;
  if ((mine.flags & kLoading) != 0) return;  // somebody else is reading it: theirs decides
  if (quarantine) ssd_->condemn(ssd_place(record));
  // On its way to another slot, with bytes that are compared, or from DRAM.
  if ((mine.flags & kWriting) != 0) return;
  ++counters_.ssd_lost;
  if (!is_in_dram(record)) return retire(record, Gone::lost, now);
  ssd_->heat().let_go(record);  // children there must not name a parent that is not
  drop_ssd_copy(record);
  write_soon(record);
}

Hash128 Store::sum_of(BlockId record) const { return index_->sum(record); }
void Store::check_ssd_invariants() const {
  std::uint64_t on_ssd = 0, resident = 0;
  for (BlockId record = 0; record < records_used_; ++record) {
    const Private& mine = private_[record];
    if (mine.state == State::free) continue;
    resident += mine.state == State::resident;
    KVP_CHECK((mine.flags & kWriting) == 0 || mine.pins_or_next > 0);
    if (!is_on_ssd(record)) continue;
    ++on_ssd;
    const SsdPlace place = ssd_place(record);
    KVP_CHECK(ssd_->slots().owner(ssd_->slots().slot_at(place.offset())) == record);
    if (mine.state != State::resident) continue;
    const BlockId parent = ssd_->heat().parent(record);
    KVP_CHECK(parent == kNoBlock || is_on_ssd(parent));
    const std::uint64_t tier = view().record(record).tier.load(std::memory_order_relaxed);
    KVP_CHECK(tier == (kTierSsd | (is_in_dram(record) ? std::uint64_t{kTierDram} : 0)));
  }
  KVP_CHECK(on_ssd == on_ssd_ && ssd_->heat().stats().resident == resident);
  ssd_->check_invariants();
}

}  // namespace kvpool
