// Who has which part of a client's staging memory.
//
// Invariant: free runs are page-aligned, apart and never adjacent; runs handed out and free runs
//            together are the whole.
// Thread rule: any thread. A run belongs to one at a time and must not outlive its room.
#pragma once
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

namespace kvpool {

class StagingRoom;

class StagingRun {
 public:
  StagingRun() = default;
  StagingRun(StagingRoom& room, std::uint64_t offset, std::uint64_t bytes)
      : room_(&room), offset_(offset), bytes_(bytes) {}
  StagingRun(StagingRun&& other) noexcept { swap(other); }
  StagingRun& operator=(StagingRun&& other) noexcept {
    swap(other);
    return *this;
  }
  ~StagingRun();
  std::uint64_t offset() const { return offset_; }
  std::uint64_t bytes() const { return bytes_; }
  explicit operator bool() const { return room_ != nullptr; }
  // In a child of fork(), where the room's lock may be held for ever.
  void forget() { room_ = nullptr; }

 private:
  void swap(StagingRun& other) noexcept {
    std::swap(room_, other.room_);
    std::swap(offset_, other.offset_);
    std::swap(bytes_, other.bytes_);
  }
  StagingRoom* room_ = nullptr;
  std::uint64_t offset_ = 0, bytes_ = 0;
};

class StagingRoom {
 public:
  explicit StagingRoom(std::uint64_t bytes);
  StagingRoom(const StagingRoom&) = delete;
  StagingRoom& operator=(const StagingRoom&) = delete;

  // First fit, so that the pages that were used last are used next. Empty: no run is that long.
  StagingRun take(std::uint64_t bytes);
  std::uint64_t bytes_free() const;
  // Taken for good at the start or not: what one caller could ever get.
  std::uint64_t bytes_max() const { return bytes_max_; }
  void keep(std::uint64_t bytes) { bytes_max_ -= bytes; }

 private:
  friend class StagingRun;
  void give(std::uint64_t offset, std::uint64_t bytes);

  std::uint64_t bytes_max_;
  mutable std::mutex mutex_;
  std::map<std::uint64_t, std::uint64_t> free_;  // offset -> bytes
};

}  // namespace kvpool
