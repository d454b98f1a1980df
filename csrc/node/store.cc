#include "node/store.h"

#include <algorithm>
#include <limits>
#include <string>

#include "base/check.h"

namespace kvpool {
namespace {

constexpr std::uint64_t kRecordsMax = kBlocksMax;
constexpr std::uint64_t kGhostBytes = 32;  // at most, by the policy's contract
constexpr std::uint64_t kGhostsPerBlock = 16;
constexpr std::uint64_t kGhostShareInverse = 100;  // ghosts take at most 1% of the payload memory

// More than a process has addresses for, and far less than the units a 32-bit number counts.
constexpr std::uint64_t kPoolBytesMax = 1ull << 46;

std::uint32_t units_of(std::uint64_t bytes) {
  return static_cast<std::uint32_t>((bytes + kUnitBytes - 1) / kUnitBytes);
}
// What a block takes of the pool; no more than 32 bits hold, with its length.
std::uint32_t slot_bytes(const Namespace& space) {
  return static_cast<std::uint32_t>(SlabPool::slot_bytes(space.block_bytes));
}
std::uint64_t bytes_max_of(const StoreOptions& options) {
  return units_of(std::max(options.bytes_max, options.bytes_limit)) * kUnitBytes;
}

}  // namespace

Result<std::unique_ptr<Store>> Store::create(const StoreOptions& options) {
  if (options.bytes_limit < kUnitBytes)
    return fail(Code::bad_argument, "a pool needs at least " + std::to_string(kUnitBytes) +
                                        " bytes of memory, not " +
                                        std::to_string(options.bytes_limit));
  if (std::max(options.bytes_max, options.bytes_limit) > kPoolBytesMax)
    return fail(Code::bad_argument,
                "a pool has at most " + std::to_string(kPoolBytesMax) + " bytes of memory, not " +
                    std::to_string(std::max(options.bytes_max, options.bytes_limit)));
  const std::uint64_t bytes_max = bytes_max_of(options);
  if (options.sealed && options.bytes_max > options.bytes_limit)
    return fail(Code::bad_argument,
                "a sealed pool has one size: " + std::to_string(options.bytes_max) + " is not " +
                    std::to_string(options.bytes_limit));
  // What cannot be given back must not lie scattered over more than may be used.
  const auto kind = options.sealed ? Arena::Kind::sealed : Arena::Kind::elastic;
  const std::uint64_t addresses = options.sealed ? bytes_max : bytes_max * kAddressFactor;
  auto arena = Arena::create("kvpool-arena", addresses, kind);
  if (!arena) return std::unexpected(arena.error());
  // A record for every page the pool may commit: slots are whole pages, so records never run out
  // before slots do.
  const auto records_max = static_cast<std::uint32_t>(std::min(
      kRecordsMax, units_of(bytes_max) * (kUnitBytes / kPageBytes) + options.ssd_entries_max));
  auto index = Arena::create("kvpool-index", IndexWriter::index_bytes(records_max), kind);
  if (!index) return std::unexpected(index.error());
  return std::unique_ptr<Store>(
      new Store(options, std::move(*arena), std::move(*index), records_max));
}

Store::Store(const StoreOptions& options, std::unique_ptr<Arena> arena,
             std::unique_ptr<Arena> index, std::uint32_t records_max)
    : bytes_max_(bytes_max_of(options)),
      blocks_limit_(options.blocks_limit),
      arena_(std::move(arena)),
      index_memory_(std::move(index)),
      index_(std::make_unique<IndexWriter>(*index_memory_, *arena_, records_max, options.salt)),
      slabs_(units_of(arena_->bytes()), units_of(options.bytes_limit)),
      policy_(make_policy(options.policy,
                          {.blocks_max = records_max, .ghosts_max = 0, .tau_s = options.tau_s})),
      private_(records_max),
      records_max_(records_max),
      departures_(Departures::entries_for(bytes_max_), options.salt),
      reuse_(options.salt) {
  fit_ghosts();
  fit_reach();
}

Store::~Store() = default;

Result<Namespace*> Store::open_namespace(const Hash128& id, std::uint64_t block_bytes) {
  if (block_bytes == 0 || block_bytes > kBlockBytesMax)
    return fail(Code::bad_argument, "block_bytes is " + std::to_string(block_bytes) +
                                        "; it must be 1.." + std::to_string(kBlockBytesMax));
  if (SlabPool::slot_bytes(block_bytes) > bytes_max_)
    return fail(Code::bad_argument, "one block of " + std::to_string(block_bytes) +
                                        " bytes does not fit into a pool of at most " +
                                        std::to_string(bytes_max_) + " bytes");
  // Before a size class is made: there are few of them, and they are never given back.
  if (namespaces_.contains(id))
    return namespaces_.open(id, static_cast<std::uint32_t>(block_bytes), 0);
  const auto klass = slabs_.class_of(block_bytes);
  if (!klass)
    return fail(Code::bad_argument,
                "a pool holds at most " + std::to_string(kClassesMax) + " different block sizes");
  steal_later_.resize(slabs_.class_count());
  fit_ghosts();
  auto opened = namespaces_.open(id, static_cast<std::uint32_t>(block_bytes), *klass);
  if (opened) announce(**opened);
  return opened;
}

void Store::drop(Namespace& space) {
  dead_ += space.blocks;
  if (space.blocks > 0) listeners_.for_each([](Changes& each) { each.lose(); });
  reuse_.drop_space(space.number);
  if (ssd_) ssd_->drop_space(space.incarnation.load(std::memory_order_relaxed));
  namespaces_.renew(space);
  announce(space);
}

void Store::announce(const Namespace& space) {
  index_->announce(space.number, space.incarnation.load(std::memory_order_relaxed));
}

// As many ghosts as the policy profits from, and never more than their share of the memory.
void Store::fit_ghosts() {
  std::uint64_t blocks = blocks_limit_;
  if (blocks == 0) {
    std::uint64_t smallest = std::numeric_limits<std::uint64_t>::max();
    for (ClassId id = 0; id < slabs_.class_count(); ++id)
      smallest = std::min(smallest, slabs_.slot_bytes_of(id));
    blocks = slabs_.class_count() == 0 ? 0 : bytes_limit() / smallest;
  }
  blocks = std::min<std::uint64_t>(blocks, records_max_);
  policy_->set_ghosts_max(
      std::min(blocks * kGhostsPerBlock, bytes_limit() / kGhostShareInverse / kGhostBytes));
}

// --- writing -------------------------------------------------------------------------------------

Store::Reserved Store::reserve(const Namespace& space, const Hash128& key, Seconds now) {
  using Outcome = Reserved::Outcome;
  const std::uint32_t incarnation = space.incarnation.load(std::memory_order_relaxed);
  Reserved answer{.outcome = Outcome::present};
  if (index_->find(key, incarnation, answer.record)) {
    ++counters_.present;
    return answer;
  }
  if (pending_.contains({key, incarnation})) return {.outcome = Outcome::pending};
  if (slabs_.slab_units(space.size_class) > slabs_.limit())
    return {.outcome = Outcome::no_room, .why = NoRoom::too_large};
  const Room room = make_room(space.size_class, now);
  if (room == Room::again) return {.outcome = Outcome::again};
  if (room == Room::none) return {.outcome = Outcome::no_room, .why = NoRoom::pool_pinned};
  // After the eviction, so that its record is the one that is used again.
  const auto record = take_record();
  if (!record) return {.outcome = Outcome::no_room, .why = NoRoom::index_full};
  const auto slot = slabs_.take(space.size_class, *record);
  private_[*record] = {.pins_or_next = 0,
                       .state = State::reserved,
                       .klass = static_cast<std::uint8_t>(space.size_class),
                       .parked = false,
                       .unworthy = false,
                       .copy = false,
                       .flags = kInDram};
  index_->prepare(*record, {key, incarnation, space.block_bytes, slot->offset});
  pending_.emplace(PendingKey{key, incarnation}, *record);
  answer.outcome = Outcome::reserved;
  answer.record = *record;
  answer.offset = slot->offset;
  claim_pages(*slot, space.size_class, answer);
  return answer;
}

void Store::claim_pages(const Slot& slot, ClassId klass, Reserved& answer) {
  switch (slabs_.claim_pages(slot.slab)) {
    case SlabPool::Pages::missing:
      answer.makes_slab = true;
      answer.pages_offset = slabs_.slab_offset(slot.slab);
      answer.pages_bytes = slabs_.slab_bytes(slot.slab);
      break;
    case SlabPool::Pages::being_made:
      answer.pages_offset = slot.offset;
      answer.pages_bytes = slabs_.slot_bytes_of(klass);
      break;
    case SlabPool::Pages::present:
      break;
  }
}

void Store::pages_made(BlockId record, bool made) {
  KVP_CHECK(private_[record].state == State::reserved);
  slabs_.pages_made(slabs_.slot_at(index_->fields(record).offset).slab, made);
}

Store::Committed Store::commit(BlockId record, const Hash128& sum, BlockId parent, Seconds now) {
  Private& mine = private_[record];
  KVP_CHECK(mine.state == State::reserved);
  const IndexWriter::Fields fields = index_->fields(record);
  Namespace* space = namespaces_.of(fields.incarnation);
  if (space == nullptr) {
    abort(record);
    return Committed::dropped;
  }
  const bool known = parent != kNoBlock && private_[parent].state == State::resident;
  bool is_remembered = false;
  if (!enter_orders(record, known ? parent : kNoBlock, is_remembered, now)) {
    abort(record);
    return Committed::no_memory;
  }
  index_->publish(record, sum);
  if (!index_->insert(fields.key, fields.incarnation, record)) {
    leave_orders(record, now);
    index_->withdraw(record);
    abort(record);
    return Committed::index_full;
  }
  pending_.erase({fields.key, fields.incarnation});
  mine.state = State::resident;
  ++resident_;
  ++in_dram_;
  ++space->blocks;
  ++counters_.puts;
  note_tiers(record, 0);
  const bool is_admitted = ssd_ && (ssd_->options().admit == SsdAdmit::all || is_remembered);
  if (is_admitted && !mine.copy) write_soon(record);  // whose the last copy is writes it
  reuse_.add(space->number, ReuseBook::name_of(fields.incarnation, fields.key), slot_bytes(*space),
             now);
  return Committed::stored;
}

// Of a resident block that came, or that lies elsewhere than before.
void Store::note_tiers(BlockId record, std::uint8_t before) const {
  if (!(before == 0 ? listeners_.is_any() : listeners_.hear_moves())) return;
  const IndexWriter::Fields fields = index_->fields(record);
  const Namespace* space = namespaces_.of(fields.incarnation);
  if (space == nullptr) return;  // whoever listens was told that it was dropped
  const Hash128 parent = listeners_.hear_moves() ? parent_key(record) : Hash128{};
  listeners_.note({space, fields.key, parent, before, tiers_of(record)});
}

Hash128 Store::parent_key(BlockId record) const {
  const BlockId parent = uses().parent(record);
  return parent == kNoBlock ? Hash128{} : index_->fields(parent).key;
}

// Before anybody can see the block, since either order may find no memory: then it is in neither.
bool Store::enter_orders(BlockId record, BlockId parent, bool& is_remembered, Seconds now) {
  try {
    is_remembered = enter_dram_order(record, parent, now);
  } catch (const std::bad_alloc&) {
    return false;
  }
  if (!ssd_) return true;
  const IndexWriter::Fields fields = index_->fields(record);
  const Fingerprint name = fingerprint(fields.incarnation, fields.key);
  try {
    is_remembered |= ssd_->heat().insert(record, name, parent, SsdBooks::kInDramOnly, now);
    return true;
  } catch (const std::bad_alloc&) {
    policy_->erase(record, name, Leave::removed, now);
    return false;
  }
}

void Store::leave_orders(BlockId record, Seconds now) {
  const IndexWriter::Fields fields = index_->fields(record);
  const Fingerprint name = fingerprint(fields.incarnation, fields.key);
  policy_->erase(record, name, Leave::removed, now);
  if (ssd_) ssd_->heat().erase(record, name, Leave::removed, now);
}

// Behind a parent that is in DRAM alone, a block keeps it there; one that is on the SSD as well may
// go first. True: the policy remembered the block.
bool Store::enter_dram_order(BlockId record, BlockId parent, Seconds now) {
  const IndexWriter::Fields fields = index_->fields(record);
  if (parent != kNoBlock && !is_in_dram(parent)) parent = kNoBlock;
  const bool is_remembered = policy_->insert(record, fingerprint(fields.incarnation, fields.key),
                                             parent, private_[record].klass, now);
  if (parent != kNoBlock && is_on_ssd(parent)) policy_->let_go(parent);
  return is_remembered;
}

void Store::abort(BlockId record) {
  KVP_CHECK(private_[record].state == State::reserved);
  const IndexWriter::Fields fields = index_->fields(record);
  pending_.erase({fields.key, fields.incarnation});
  vacate(fields.offset);  // one that found no place in the index was readable for a moment
  free_record(record);
  ++counters_.aborted;
}

std::optional<BlockId> Store::take_record() {
  if (free_head_ != 0) {
    const BlockId record = free_head_ - 1;
    free_head_ = private_[record].pins_or_next;
    --free_count_;
    return record;
  }
  if (records_used_ >= records_max_) return std::nullopt;
  private_.reach(records_used_ + 1);
  return records_used_++;
}

void Store::free_record(BlockId record) {
  private_[record] = {.pins_or_next = free_head_,
                      .state = State::free,
                      .klass = 0,
                      .parked = false,
                      .unworthy = false,
                      .copy = false,
                      .flags = 0};
  free_head_ = record + 1;
  ++free_count_;
}

// --- reading -------------------------------------------------------------------------------------

bool Store::find(const Namespace& space, const Hash128& key, BlockId& record) const {
  return index_->find(key, space.incarnation.load(std::memory_order_relaxed), record);
}

void Store::pin(BlockId record) {
  KVP_CHECK(private_[record].state == State::resident);
  ++private_[record].pins_or_next;
  ++pins_;
}

void Store::unpin(BlockId record) {
  Private& mine = private_[record];
  KVP_CHECK(mine.state == State::resident || mine.state == State::zombie);
  KVP_CHECK(mine.pins_or_next > 0);
  --pins_;
  if (--mine.pins_or_next > 0) return;
  if (mine.state == State::zombie) {
    --zombies_;
    release_slots(record);
    return;
  }
  if (mine.parked) {
    mine.parked = false;
    policy_->give_back(record);
  }
  if ((mine.flags & kSsdParked) != 0) {
    mine.flags &= static_cast<std::uint8_t>(~kSsdParked);
    ssd_->heat().give_back(record);
  }
}

void Store::touch(BlockId record, Seconds now) {
  const IndexWriter::Fields fields = index_->fields(record);
  if (const Namespace* space = namespaces_.of(fields.incarnation))
    reuse_.add(space->number, ReuseBook::name_of(fields.incarnation, fields.key),
               slot_bytes(*space), now);
  use(record, now);
}

void Store::refresh(BlockId record, Seconds now) {
  private_[record].copy = false;  // a writer relies on this node for it
  const IndexWriter::Fields fields = index_->fields(record);
  if (const Namespace* space = namespaces_.of(fields.incarnation))
    reuse_.refresh(space->number, ReuseBook::name_of(fields.incarnation, fields.key),
                   slot_bytes(*space), now);
  use(record, now);
}

void Store::use(BlockId record, Seconds now) {
  Private& mine = private_[record];
  if ((mine.flags & kInDram) != 0) policy_->touch(record, now);
  if (!ssd_) return;
  ssd_->heat().touch(record, now);
  counters_.restored_hits += (mine.flags & kRestored) != 0;
  if ((mine.flags & kOnSsd) == 0) {
    if (!mine.copy) write_soon(record);  // a second use
  } else if ((mine.flags & kUsed) == 0 && ssd_->note_use(record)) {
    mine.flags |= kUsed;
  }
}

void Store::touch(BlockId record, std::uint64_t generation, Seconds now) {
  if (record >= records_used_ || private_[record].state != State::resident) return;
  const Record& shared = view().record(record);
  if (shared.generation.load(std::memory_order_relaxed) == generation) touch(record, now);
}

// --- facts ---------------------------------------------------------------------------------------

std::uint64_t Store::bytes_taken() const {
  std::uint64_t bytes = 0;
  for (ClassId id = 0; id < slabs_.class_count(); ++id)
    bytes += slabs_.taken_slots(id) * slabs_.slot_bytes_of(id);
  return bytes;
}

std::uint64_t Store::bytes_of_books() const {
  const PolicyStats policy = policy_->stats();
  std::uint64_t owners = 0;
  for (ClassId id = 0; id < slabs_.class_count(); ++id)
    owners += (slabs_.taken_slots(id) + slabs_.free_slots(id)) * sizeof(std::uint32_t);
  return records_used_ * (sizeof(Record) + sizeof(Private)) + index_->table_bytes() + policy.bytes -
         policy.ghost_bytes + owners + namespaces_.bytes() + (ssd_ ? ssd_->bytes() : 0);
}

void Store::check_invariants() const {
  std::uint64_t count[4] = {}, taken = 0, pins = 0, dead = 0, in_dram = 0, loading = 0;
  std::unordered_map<std::uint32_t, std::uint64_t> per_space;
  for (BlockId record = 0; record < records_used_; ++record) {
    const Private& mine = private_[record];
    ++count[static_cast<int>(mine.state)];
    if (mine.state == State::free) continue;
    const IndexWriter::Fields fields = index_->fields(record);
    if (is_in_dram(record)) {
      ++taken;
      KVP_CHECK(slabs_.owner(slabs_.slot_at(fields.offset)) == record);
      KVP_CHECK(slabs_.slot_at(fields.offset).offset == fields.offset);
    }
    loading += (mine.flags & kLoading) != 0;
    const bool readable = view().record(record).generation.load(std::memory_order_relaxed) != 0;
    KVP_CHECK(readable == (mine.state == State::resident));
    if (mine.state != State::reserved) pins += mine.pins_or_next;
    if (mine.parked)
      KVP_CHECK(mine.state == State::resident &&
                (mine.pins_or_next > 0 || std::ranges::find(named_, record) != named_.end()));
    if (mine.state != State::resident) continue;
    in_dram += is_in_dram(record);
    KVP_CHECK((mine.flags & (kInDram | kOnSsd)) != 0);
    BlockId found = kNoBlock;
    KVP_CHECK(index_->find(fields.key, fields.incarnation, found) && found == record);
    ++per_space[fields.incarnation];
    dead += namespaces_.of(fields.incarnation) == nullptr;
  }
  KVP_CHECK(count[static_cast<int>(State::free)] == free_count_);
  KVP_CHECK(count[static_cast<int>(State::reserved)] == pending_.size());
  KVP_CHECK(count[static_cast<int>(State::resident)] == resident_);
  KVP_CHECK(count[static_cast<int>(State::zombie)] == zombies_);
  KVP_CHECK(pins == pins_ && dead == dead_ && index_->entries() == resident_);
  KVP_CHECK(in_dram == in_dram_ && loading == loading_);
  for (const auto& [incarnation, blocks] : per_space)
    if (const Namespace* space = namespaces_.of(incarnation)) KVP_CHECK(space->blocks == blocks);
  std::uint64_t slots = 0;
  for (ClassId id = 0; id < slabs_.class_count(); ++id) slots += slabs_.taken_slots(id);
  // free + held = total, with the slab pool's own count
  KVP_CHECK(slots == taken + loading_ + held_.size());
  for (const std::uint64_t offset : held_)
    KVP_CHECK(slabs_.owner(slabs_.slot_at(offset)) == kHeldOwner);
  KVP_CHECK(policy_->stats().resident == in_dram_);
  slabs_.check_invariants();
  index_->check_invariants();
  policy_->check_invariants();
  reuse_.check_invariants();
  if (ssd_) check_ssd_invariants();
}

}  // namespace kvpool
