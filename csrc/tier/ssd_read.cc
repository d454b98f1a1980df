// The readers' side. No lock of the tier and nothing of the index is touched here.
#include <algorithm>

#include "block/checksum.h"
#include "tier/ssd_parts.h"

namespace kvpool {

bool SsdReads::wait(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  return done_.wait_until(lock, deadline, [this] { return left_ == 0; });
}

bool SsdReads::abandon(std::function<void()> clean_up) {
  std::lock_guard lock(mutex_);
  if (left_ == 0) return false;
  clean_up_ = std::move(clean_up);
  return true;
}

void SsdReads::item_done() {
  std::function<void()> clean_up;
  {
    std::lock_guard lock(mutex_);
    if (--left_ > 0) return;
    clean_up.swap(clean_up_);
    done_.notify_all();
  }
  // Without the lock: it may let go of the last reference but the task's.
  if (clean_up) clean_up();
}

void Ssd::Parts::end_read(SsdReads& reads, SsdReads::Item& item) {
  const std::uint32_t bytes = item.place.bytes;
  ReadOutcome outcome = ReadOutcome::failed;
  if (!item.io_failed.load(std::memory_order_relaxed))
    outcome = checksum(item.into, bytes) == item.sum ? ReadOutcome::whole : ReadOutcome::damaged;
  if (outcome == ReadOutcome::whole) {
    read_blocks.fetch_add(1, std::memory_order_relaxed);
    read_bytes.fetch_add(bytes, std::memory_order_relaxed);
  } else {
    Counter& counter = outcome == ReadOutcome::failed ? read_faults : damaged;
    counter.fetch_add(1, std::memory_order_relaxed);
  }
  item.outcome.store(outcome, std::memory_order_release);
  reads.item_done();
}

void Ssd::Parts::read_piece(const IoTask& task) {
  Parts& parts = *static_cast<Parts*>(task.owner);
  SsdReads::Item& item = *static_cast<SsdReads::Item*>(task.item);
  const int error =
      parts.slabs->read_at(item.place.offset() + task.offset, item.into + task.offset, task.bytes);
  if (error != 0) item.io_failed.store(true, std::memory_order_relaxed);
  // The thread that brings the last piece sees what the others brought.
  if (item.pieces_left.fetch_sub(1, std::memory_order_acq_rel) == 1)
    parts.end_read(*static_cast<SsdReads*>(task.alive.get()), item);
}

void Ssd::read(const std::shared_ptr<SsdReads>& reads) {
  std::vector<IoTask> tasks;
  tasks.reserve(reads->items.size());
  {
    std::lock_guard lock(reads->mutex_);
    reads->left_ = reads->items.size();
  }
  for (SsdReads::Item& item : reads->items) {
    const std::uint64_t bytes = item.place.slot_bytes();
    const std::uint64_t pieces =
        item.into == nullptr ? 0 : (bytes + kIoPieceBytes - 1) / kIoPieceBytes;
    item.pieces_left.store(static_cast<std::uint32_t>(pieces), std::memory_order_relaxed);
    if (pieces == 0) {  // no block is empty: nowhere to read it to, or the place is wrong
      item.io_failed.store(true, std::memory_order_relaxed);
      parts_->end_read(*reads, item);
      continue;
    }
    for (std::uint64_t at = 0; at < bytes; at += kIoPieceBytes)
      tasks.push_back(
          {Parts::read_piece, parts_.get(), &item, at, std::min(kIoPieceBytes, bytes - at), reads});
  }
  parts_->pool->submit(IoPool::Kind::read, tasks);
}

}  // namespace kvpool
