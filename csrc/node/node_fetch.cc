// Reading blocks that lie on the SSD alone.
//
//   find and pin, choose where to (a slot of DRAM if warm enough, else a bounce) -> read -> compare
//   -> promote or not -> deliver -> unpin
//
// Runs of such blocks are read in windows, two of them under way at a time, so that the device is
// busy while the last window is being copied out. Nothing is ever read into memory of the caller: a
// read that is given up after its time may still write there.
#include <algorithm>
#include <deque>

#include "node/node.h"

namespace kvpool {
namespace {

constexpr std::uint64_t kWindowBytes = 16 << 20;
constexpr std::size_t kWindowBlocks = 64;
constexpr std::size_t kWindows = 2;
constexpr int kRoomAttempts = 64;  // of making room in pieces, for a lease

std::size_t window_of(const Namespace& space, std::size_t keys) {
  const std::uint64_t slot_bytes = SlabPool::slot_bytes(space.block_bytes);
  return std::min(keys, std::clamp<std::size_t>(kWindowBytes / slot_bytes, 1, kWindowBlocks));
}

}  // namespace

struct Node::Fetch {
  struct Part {
    BlockId record = kNoBlock;
    SsdPlace place;
    std::byte* into = nullptr;
    Store::Reserved room{};  // of DRAM, if in_slot
    bool in_slot = false;
    bool is_whole = false;   // once settled
    bool has_moved = false;  // it was read where it is no more: worth another try
  };
  std::size_t index = 0;  // of the first part in the call
  std::vector<Part> parts;
  std::vector<Bounce> bounces;
  std::shared_ptr<SsdReads> reads;
  std::uint32_t bytes = 0;  // of a block
  std::chrono::steady_clock::time_point deadline;
};

// Leading keys that are there and on the SSD only, up to a window; pinned and touched.
void Node::choose_parts(Fetch& fetch, const Namespace& space, std::span<const Hash128> keys) {
  for (const Hash128& key : keys.first(window_of(space, keys.size()))) {
    BlockId record = kNoBlock;
    if (!store_->find(space, key, record) || store_->is_in_dram(record)) break;
    store_->pin(record);
    fetch.parts.push_back({.record = record, .place = store_->ssd_place(record)});
  }
  const Seconds now = clock_->now();
  for (auto part = fetch.parts.rbegin(); part != fetch.parts.rend(); ++part)
    store_->touch(part->record, now);
}

// DRAM for those that are warm enough. `into_dram`: for all, or the window ends before that block.
void Node::find_places(Lock& lock, Fetch& fetch, bool into_dram) {
  using Outcome = Store::Reserved::Outcome;
  for (std::size_t i = 0; i < fetch.parts.size(); ++i) {
    Fetch::Part& part = fetch.parts[i];
    auto room = store_->reserve_promotion(part.record, into_dram, clock_->now());
    for (int left = into_dram ? kRoomAttempts : 0; left > 0 && room.outcome == Outcome::again;
         --left) {
      let_others_in(lock);
      room = store_->reserve_promotion(part.record, into_dram, clock_->now());
    }
    // Somebody else reads the block that is wanted next: it is there when they are done.
    if (into_dram && i == 0 && room.outcome == Outcome::pending)
      written_.wait_until(lock, fetch.deadline,
                          [&] { return stopping_ || !store_->is_loading(part.record); });
    if (room.outcome == Outcome::reserved) {
      part.in_slot = true;
      part.room = room;
      part.into = store_->arena().base() + room.offset;
    } else if (into_dram) {
      for (std::size_t j = i; j < fetch.parts.size(); ++j) store_->unpin(fetch.parts[j].record);
      fetch.parts.resize(i);
    }
  }
}

// nullptr: nothing to fetch here.
std::shared_ptr<Node::Fetch> Node::start_fetch(const Namespace& space,
                                               std::span<const Hash128> keys, std::size_t index,
                                               bool into_dram) {
  auto fetch = std::make_shared<Fetch>();
  fetch->index = index;
  fetch->bytes = space.block_bytes;
  fetch->deadline = std::chrono::steady_clock::now() + options_.ssd_timeout;
  // All memory for the window before anything is pinned: where there is none, nothing leaks.
  const std::size_t count = window_of(space, keys.size());
  fetch->parts.reserve(count);
  fetch->bounces.reserve(count);
  fetch->reads = std::make_shared<SsdReads>(count);  // those that stay empty end at once
  Lock lock(mutex_);
  if (stopping_ || !tier_) return nullptr;
  ++fetches_;  // from here on the tier stays, though find_places() lets others have the lock
  choose_parts(*fetch, space, keys);
  find_places(lock, *fetch, into_dram);
  if (fetch->parts.empty()) {
    --fetches_;
    written_.notify_all();
    return nullptr;
  }
  lock.unlock();

  const std::uint64_t slot_bytes = SlabPool::slot_bytes(fetch->bytes);
  for (std::size_t i = 0; i < fetch->parts.size(); ++i) {
    Fetch::Part& part = fetch->parts[i];
    if (part.in_slot && part.room.pages_bytes > 0) {
      const bool backed = back_with_pages(part.room);
      lock.lock();
      if (part.room.makes_slab) store_->promotion_pages_made(part.room.offset, backed);
      if (!backed) store_->abandon_promotion(part.record, part.room.offset);
      lock.unlock();
      part.in_slot = backed;
    }
    if (!part.in_slot) {
      fetch->bounces.push_back(bounces_.take(slot_bytes));
      part.into = fetch->bounces.back().memory();
    }
    SsdReads::Item& item = fetch->reads->items[i];
    item.place = part.place;
    item.sum = store_->sum_of(part.record);  // pinned: the record cannot become another block's
    item.into = part.into;
  }
  tier_->read(fetch->reads);
  return fetch;
}

// True: settled, parts say what is whole. False: given up; the thread that ends the last read will
// clean up.
bool Node::end_fetch(const std::shared_ptr<Fetch>& fetch) {
  if (!fetch->reads->wait(fetch->deadline)) {
    ssd_timeouts_.fetch_add(1, std::memory_order_relaxed);
    const auto clean_up = [this, fetch] {
      settle_fetch(*fetch);
      release_fetch(*fetch, 0);
    };
    if (fetch->reads->abandon(clean_up)) return false;
  }
  settle_fetch(*fetch);
  return true;
}

void Node::settle_fetch(Fetch& fetch) {
  Lock lock(mutex_);
  const Seconds now = clock_->now();
  for (std::size_t i = 0; i < fetch.parts.size(); ++i) {
    Fetch::Part& part = fetch.parts[i];
    const ReadOutcome outcome = fetch.reads->items[i].outcome.load(std::memory_order_acquire);
    part.is_whole = outcome == ReadOutcome::whole;
    if (part.in_slot && !part.is_whole) store_->abandon_promotion(part.record, part.room.offset);
    // Removed meanwhile: then the slot is somebody else's already, and this is a miss.
    if (part.in_slot && part.is_whole)
      part.is_whole = store_->promote(part.record, part.room.offset, now);
    if (outcome == ReadOutcome::whole) continue;
    if (part.into == nullptr) continue;
    // Moved inside the slab file while it was read: then its old slot proves nothing.
    const bool is_there = store_->is_on_ssd(part.record);
    part.has_moved = is_there && store_->ssd_place(part.record) != part.place;
    if (is_there && !part.has_moved)
      store_->lose_ssd_copy(part.record, /*quarantine=*/true, now);
    else if (outcome == ReadOutcome::damaged)
      ++ssd_stale_reads_;
  }
}

// `leased`: so many leading parts stay pinned, for the caller.
void Node::release_fetch(Fetch& fetch, std::size_t leased) {
  fetch.bounces.clear();
  Lock lock(mutex_);
  for (std::size_t i = leased; i < fetch.parts.size(); ++i) store_->unpin(fetch.parts[i].record);
  --fetches_;
  written_.notify_all();
}

std::size_t Node::get_from_ssd(const Namespace& space, std::span<const Hash128> keys,
                               std::size_t index, BlockSink& sink, Miss& why) {
  std::deque<std::shared_ptr<Fetch>> windows;
  std::size_t started = 0, delivered = 0;
  bool goes_on = true, elsewhere = false, is_late = false;
  for (;;) {
    while (goes_on && windows.size() < kWindows && started < keys.size()) {
      auto fetch = start_fetch(space, keys.subspan(started), index + started, false);
      if (!fetch) elsewhere |= started == 0;
      if (!fetch) break;
      started += fetch->parts.size();
      windows.push_back(std::move(fetch));
    }
    if (windows.empty()) break;
    const std::shared_ptr<Fetch> fetch = std::move(windows.front());
    windows.pop_front();
    if (!end_fetch(fetch)) {
      is_late |= goes_on;
      goes_on = false;
      continue;
    }
    for (std::size_t i = 0; i < fetch->parts.size() && goes_on; ++i) {
      const Fetch::Part& part = fetch->parts[i];
      elsewhere = part.has_moved;
      sink.from = kTierSsd;
      goes_on = part.is_whole && !faults_->fires("get.deliver") &&
                sink.deliver_whole(fetch->index + i, {part.into, fetch->bytes});
      delivered += goes_on;
    }
    release_fetch(*fetch, 0);
  }
  if (delivered < keys.size() && !elsewhere) why = is_late ? Miss::ssd_late : Miss::ssd_damaged;
  ssd_hits_.fetch_add(delivered, std::memory_order_relaxed);
  ssd_hit_bytes_.fetch_add(delivered * space.block_bytes, std::memory_order_relaxed);
  return delivered;
}

std::size_t Node::lease_from_ssd(const Namespace& space, std::span<const Hash128> keys,
                                 Lease* leases, Miss& why) {
  const auto fetch = start_fetch(space, keys, 0, true);
  if (!fetch) return 0;
  if (!end_fetch(fetch)) {
    why = Miss::ssd_late;
    return 0;
  }
  std::size_t count = 0;
  // One whose slot got no pages was read past DRAM: there is nothing to look at.
  const auto is_there = [&](const Fetch::Part& part) { return part.is_whole && part.in_slot; };
  for (; count < fetch->parts.size() && is_there(fetch->parts[count]); ++count) {
    const Fetch::Part& part = fetch->parts[count];
    const Lock lock(mutex_);
    leases[count] = leased(part.record, fetch->bytes, part.room.offset);
  }
  if (count < fetch->parts.size() && !fetch->parts[count].has_moved)
    why = fetch->parts[count].is_whole ? Miss::no_room : Miss::ssd_damaged;
  release_fetch(*fetch, count);
  ssd_hits_.fetch_add(count, std::memory_order_relaxed);
  ssd_hit_bytes_.fetch_add(count * space.block_bytes, std::memory_order_relaxed);
  return count;
}

}  // namespace kvpool
