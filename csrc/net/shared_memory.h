// A memfd and its mapping: what a node and a client of its host share beside arena and index.
//
// Promises:  1. the file has its size for good (sealed), so that no access to it can fault, whoever
//               else holds it;
//            2. the mapping is not inherited by a child of fork().
// Thread rule: none of its own; the bytes belong to a protocol.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/status.h"
#include "tier/descriptor.h"

namespace kvpool {

class SharedMemory {
 public:
  SharedMemory() = default;
  SharedMemory(SharedMemory&& other) noexcept { swap(other); }
  SharedMemory& operator=(SharedMemory&& other) noexcept {
    swap(other);
    return *this;
  }
  ~SharedMemory();  // not in a child of fork(): forget() first

  // Zeroed, sealed, writable for whoever is given the descriptor; of this uid alone.
  static Result<SharedMemory> create(const char* name, std::uint64_t bytes);
  // One that was received. Its size must be `bytes` and sealed.
  enum class Access : std::uint8_t { read, write };
  static Result<SharedMemory> map(const Descriptor& file, std::uint64_t bytes, Access access);

  std::byte* base() const { return base_; }
  std::uint64_t bytes() const { return bytes_; }
  // Of one that was created.
  int descriptor() const { return file_.get(); }
  void forget() { base_ = nullptr; }

 private:
  void swap(SharedMemory& other) noexcept {
    std::swap(file_, other.file_);
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
  }
  Descriptor file_;
  std::byte* base_ = nullptr;
  std::uint64_t bytes_ = 0;
};

}  // namespace kvpool
