// The readers' side. No lock of the tier and nothing of the index is touched here.
#include <array>
#include <cerrno>
#include <utility>

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
  if (item.is_behind_end.load(std::memory_order_relaxed))
    outcome = ReadOutcome::damaged;
  else if (!item.io_failed.load(std::memory_order_relaxed))
    outcome = checksum(item.into, bytes) == item.sum ? ReadOutcome::whole : ReadOutcome::damaged;
  if (outcome == ReadOutcome::whole) {
    read_blocks.fetch_add(1, std::memory_order_relaxed);
    read_bytes.fetch_add(bytes, std::memory_order_relaxed);
  } else if (outcome == ReadOutcome::damaged) {
    damaged.fetch_add(1, std::memory_order_relaxed);
  }
  item.outcome.store(outcome, std::memory_order_release);
  reads.item_done();
}

bool Ssd::Parts::read_together(std::span<SsdReads::Item> run) {
  std::array<iovec, kIoSlotsMax> into;
  for (std::size_t i = 0; i < run.size(); ++i) into[i] = {run[i].into, run[i].place.slot_bytes()};
  return slabs->read_run(run[0].place.offset(), {into.data(), run.size()});
}

void Ssd::Parts::read_cut(const IoTask& task) {
  Parts& parts = *static_cast<Parts*>(task.owner);
  const std::span run(static_cast<SsdReads::Item*>(task.item), task.cut.slots);
  const bool is_done = run.size() > 1 && parts.read_together(run);
  bool is_counted = false;
  for (SsdReads::Item& item : run) {
    const std::uint64_t bytes = run.size() > 1 ? item.place.slot_bytes() : task.cut.bytes;
    const int error = is_done ? 0
                              : parts.slabs->read_at(item.place.offset() + task.cut.offset,
                                                     item.into + task.cut.offset, bytes);
    if (error == ENODATA) {
      // The file has become shorter than when the place was looked up: no fault of the device.
      item.is_behind_end.store(true, std::memory_order_relaxed);
      item.io_failed.store(true, std::memory_order_relaxed);
    } else if (error != 0) {
      // One fault, whether the device failed for many small slots or for many pieces of one.
      const bool is_first = !item.io_failed.exchange(true, std::memory_order_relaxed);
      if (is_first && !std::exchange(is_counted, true))
        parts.count_fault(parts.read_faults, "a slot could not be read");
    }
    // The thread that brings the last piece sees what the others brought.
    if (item.pieces_left.fetch_sub(1, std::memory_order_acq_rel) == 1)
      parts.end_read(*static_cast<SsdReads*>(task.alive.get()), item);
  }
}

void Ssd::read(const std::shared_ptr<SsdReads>& reads) {
  std::vector<SsdReads::Item>& items = reads->items;
  {
    std::lock_guard lock(reads->mutex_);
    reads->left_ = items.size();
  }
  const auto cuts = cut_into_transfers(items.size(), [&](std::size_t i) {
    return items[i].into == nullptr ? SsdPlace{} : items[i].place;
  });
  std::vector<IoTask> tasks;
  tasks.reserve(cuts.size());
  for (const IoCut& cut : cuts) {
    for (std::size_t i = cut.first; i < cut.first + cut.slots; ++i) ++items[i].pieces_left;
    tasks.push_back({Parts::read_cut, parts_.get(), &items[cut.first], cut, reads});
  }
  for (SsdReads::Item& item : items)
    // No block is empty: there is no memory to read it to, or no such place. The device is not to
    // blame, so it counts as no fault.
    if (item.pieces_left == 0) {
      item.io_failed = true;
      parts_->end_read(*reads, item);
    }
  parts_->pool->submit(IoPool::Kind::read, tasks);
}

}  // namespace kvpool
