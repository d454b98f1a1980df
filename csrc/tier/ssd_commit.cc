// The writer's side: payload, flush, index, in that order.
#include <algorithm>
#include <array>

#include "base/check.h"
#include "tier/ssd_parts.h"

namespace kvpool {
namespace {

// A slot that is being written, in pieces.
struct Writing {
  SlabFile* slabs = nullptr;
  const SsdWrite* write = nullptr;
  std::atomic<int> error{0};  // the last one

  void move(std::uint64_t offset, std::uint64_t bytes) {
    const int failed =
        slabs->write_at(write->place.offset() + offset, write->payload + offset, bytes);
    if (failed != 0) error.store(failed, std::memory_order_relaxed);
  }
};

bool write_together(std::span<Writing> run) {
  std::array<iovec, kIoSlotsMax> slots;
  for (std::size_t i = 0; i < run.size(); ++i)
    slots[i] = {const_cast<std::byte*>(run[i].write->payload), run[i].write->place.slot_bytes()};
  return run[0].slabs->write_run(run[0].write->place.offset(), {slots.data(), run.size()});
}

void write_cut(const IoTask& task) {
  const std::span run(static_cast<Writing*>(task.item), task.cut.slots);
  if (run.size() == 1)
    run[0].move(task.cut.offset, task.cut.bytes);
  else if (!write_together(run))
    for (Writing& writing : run) writing.move(0, writing.write->place.slot_bytes());
  static_cast<IoBatch*>(task.owner)->one_done();
}

// What its owner could not provide is not written.
SsdPlace place_to_write(const SsdWrite& write) {
  return write.payload == nullptr ? SsdPlace{} : write.place;
}

void write_nothing(SsdGroup& group) {
  for (SsdWrite& write : group.writes) write.written = false;
}

std::size_t changes_of(const SsdGroup& group) {
  return group.deletes.size() + group.writes.size() + group.stamps.size() + group.new_spaces.size();
}

bool has_records(const SsdGroup& group) {
  return !group.new_spaces.empty() || !group.dropped_spaces.empty() || !group.new_classes.empty() ||
         !group.deletes.empty() || !group.stamps.empty() || group.tau_s > 0;
}

}  // namespace

bool Ssd::commit(SsdGroup& group) {
  Parts& p = *parts_;
  KVP_CHECK(changes_of(group) <= IndexStore::kChangesMax);
  for (SsdWrite& write : group.writes) write.written = write.failed_io = false;
  if (p.read_only) return false;
  p.write_payloads(group);
  if (!p.sync_payloads(group) || !p.commit_index(group)) {
    write_nothing(group);
    return false;
  }
  p.count_written(group);
  return true;
}

void Ssd::Parts::write_payloads(SsdGroup& group) {
  const auto cuts = cut_into_transfers(
      group.writes.size(), [&](std::size_t i) { return place_to_write(group.writes[i]); });
  std::vector<Writing> writings(group.writes.size());
  for (std::size_t i = 0; i < writings.size(); ++i) {
    writings[i].slabs = slabs.get();
    writings[i].write = &group.writes[i];
  }
  IoBatch batch(cuts.size());
  std::vector<IoTask> tasks;
  tasks.reserve(cuts.size());
  for (const IoCut& cut : cuts)
    tasks.push_back({write_cut, &batch, &writings[cut.first], cut, nullptr});
  pool->submit(IoPool::Kind::write, tasks);
  if (!cuts.empty()) batch.wait();

  for (std::size_t i = 0; i < writings.size(); ++i) {
    SsdWrite& write = group.writes[i];
    const int error = writings[i].error.load(std::memory_order_relaxed);
    write.failed_io = error != 0;
    if (write.failed_io) count_fault(write_faults, std::strerror(error));
    // Parents come first, so a chain falls out in one pass.
    KVP_CHECK(write.after == SsdWrite::kNone || write.after < i);
    write.written = write.payload != nullptr && !write.failed_io &&
                    (write.after == SsdWrite::kNone || group.writes[write.after].written);
  }
}

bool Ssd::Parts::sync_payloads(const SsdGroup& group) {
  if (std::ranges::none_of(group.writes, &SsdWrite::written)) return true;
  const int error = slabs->sync();
  syncs.fetch_add(1, std::memory_order_relaxed);
  if (error == 0) return true;
  // The kernel may have dropped what it could not write and forgets the failure once told, so a
  // second flush that works would mean nothing.
  write_faults.fetch_add(1, std::memory_order_relaxed);
  make_read_only(std::string("a flush of the slab file failed: ") + std::strerror(error));
  return false;
}

std::vector<BlockKey> Ssd::Parts::keys_to_forget(std::size_t changes) const {
  const std::size_t left = IndexStore::kChangesMax - std::min(changes, IndexStore::kChangesMax);
  const std::size_t count = std::min(to_forget.size(), left);
  return {to_forget.end() - static_cast<std::ptrdiff_t>(count), to_forget.end()};
}

bool Ssd::Parts::commit_index(const SsdGroup& group) {
  const std::vector<BlockKey> forget =
      keys_to_forget(changes_of(group) + group.dropped_spaces.size());
  const bool has_writes = std::ranges::any_of(group.writes, &SsdWrite::written);
  if (!has_writes && !has_records(group) && forget.empty()) return true;
  if (fires("ssd.commit")) {
    count_fault(commit_faults, "the index was not tried");
    return false;
  }
  if (auto applied = index->apply(group, forget); !applied) {
    count_fault(commit_faults, applied.error().message);
    if (index->is_broken())
      make_read_only("the index does not know whether it was written: " + applied.error().message);
    return false;
  }
  to_forget.resize(to_forget.size() - forget.size());
  groups.fetch_add(1, std::memory_order_relaxed);
  take_facts();
  return true;
}

bool Ssd::has_forgotten() const { return !parts_->to_forget.empty(); }

bool Ssd::sync() {
  Parts& p = *parts_;
  if (p.options.durability != Durability::relaxed) return true;
  if (p.index->sync()) return true;
  p.count_fault(p.commit_faults, "the index could not be flushed");
  return false;
}

void Ssd::Parts::count_written(const SsdGroup& group) {
  for (const SsdWrite& write : group.writes)
    if (write.written) {
      written_blocks.fetch_add(1, std::memory_order_relaxed);
      written_bytes.fetch_add(write.place.bytes, std::memory_order_relaxed);
    }
}

void Ssd::Parts::count_fault(Counter& counter, const std::string& what) {
  counter.fetch_add(1, std::memory_order_relaxed);
  if (read_faults + write_faults + commit_faults > kSsdFaultsMax)
    make_read_only("more than " + std::to_string(kSsdFaultsMax) +
                   " reads, writes or commits failed since it was opened; the last: " + what);
}

// The first reason stays: what follows is often its consequence.
void Ssd::Parts::make_read_only(const std::string& why) {
  std::lock_guard lock(mutex);
  if (read_only) return;
  why_read_only = why;
  read_only = true;
}

}  // namespace kvpool
