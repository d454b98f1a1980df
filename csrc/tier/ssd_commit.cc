// The writer's side: payload, flush, index, in that order.
#include <algorithm>

#include "base/check.h"
#include "tier/ssd_parts.h"

namespace kvpool {
namespace {

// A slot that is being written, in pieces.
struct Writing {
  SlabFile* slabs = nullptr;
  const SsdWrite* write = nullptr;
  IoBatch* batch = nullptr;
  std::atomic<int> error{0};  // the last one
};

void write_piece(const IoTask& task) {
  Writing& writing = *static_cast<Writing*>(task.item);
  const int error = writing.slabs->write_at(writing.write->place.offset() + task.offset,
                                            writing.write->payload + task.offset, task.bytes);
  if (error != 0) writing.error.store(error, std::memory_order_relaxed);
  writing.batch->one_done();
}

// What its owner could not provide is not written.
std::uint64_t bytes_of(const SsdWrite& write) {
  return write.payload == nullptr ? 0 : write.place.slot_bytes();
}

std::size_t pieces_of(const SsdWrite& write) {
  return (bytes_of(write) + kIoPieceBytes - 1) / kIoPieceBytes;
}

void write_nothing(SsdGroup& group) {
  for (SsdWrite& write : group.writes) write.written = false;
}

std::size_t changes_of(const SsdGroup& group) {
  return group.deletes.size() + group.writes.size() + group.stamps.size();
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
  std::vector<Writing> writings(group.writes.size());
  std::vector<IoTask> tasks;
  std::size_t pieces = 0;
  for (const SsdWrite& write : group.writes) pieces += pieces_of(write);
  tasks.reserve(pieces);
  IoBatch batch(pieces);
  for (std::size_t i = 0; i < writings.size(); ++i) {
    const std::uint64_t bytes = bytes_of(group.writes[i]);
    writings[i].slabs = slabs.get();
    writings[i].write = &group.writes[i];
    writings[i].batch = &batch;
    for (std::uint64_t at = 0; at < bytes; at += kIoPieceBytes)
      tasks.push_back(
          {write_piece, nullptr, &writings[i], at, std::min(kIoPieceBytes, bytes - at), nullptr});
  }
  pool->submit(IoPool::Kind::write, tasks);
  if (pieces > 0) batch.wait();

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
  const std::size_t count = std::min(to_forget.size(), IndexStore::kChangesMax - changes);
  return {to_forget.end() - static_cast<std::ptrdiff_t>(count), to_forget.end()};
}

bool Ssd::Parts::commit_index(const SsdGroup& group) {
  const std::vector<BlockKey> forget = keys_to_forget(changes_of(group));
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

void Ssd::Parts::count_written(const SsdGroup& group) {
  for (const SsdWrite& write : group.writes)
    if (write.written) {
      written_blocks.fetch_add(1, std::memory_order_relaxed);
      written_bytes.fetch_add(write.place.bytes, std::memory_order_relaxed);
    }
}

void Ssd::Parts::count_fault(Counter& counter, const std::string& what) {
  counter.fetch_add(1, std::memory_order_relaxed);
  if (write_faults + commit_faults > kSsdFaultsMax)
    make_read_only("more than " + std::to_string(kSsdFaultsMax) +
                   " writes or commits failed since it was opened; the last: " + what);
}

// The first reason stays: what follows is often its consequence.
void Ssd::Parts::make_read_only(const std::string& why) {
  std::lock_guard lock(mutex);
  if (read_only) return;
  why_read_only = why;
  read_only = true;
}

}  // namespace kvpool
