// An array that costs address space at once and memory only where it has been used.
//
// Relies on: an element of all zero bytes is a valid fresh element; T is trivially copyable.
// Promises:  1. elements start as zero bytes and never move, except in extend();
//            2. memory follows the highest element used, never `length_max`;
//            3. growing copies nothing and frees nothing: no pause that grows with the length.
// Thread rule: as a plain array. Construction and extend() throw std::bad_alloc when the machine
// refuses the addresses; touching an element cannot fail, save by the machine's own OOM.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <type_traits>
#include <utility>

#include "base/check.h"

namespace kvpool {

template <typename T>
class LazyArray {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

 public:
  LazyArray() = default;
  explicit LazyArray(std::size_t length_max) { extend(length_max); }
  LazyArray(const LazyArray&) = delete;
  LazyArray& operator=(const LazyArray&) = delete;
  LazyArray(LazyArray&& other) noexcept { swap(other); }
  LazyArray& operator=(LazyArray&& other) noexcept {
    swap(other);
    return *this;
  }
  ~LazyArray() {
    if (elements_ != nullptr) ::munmap(elements_, mapped_bytes(length_max_));
  }

  T& operator[](std::size_t i) {
    KVP_DCHECK(i < length_max_);
    return elements_[i];
  }
  const T& operator[](std::size_t i) const {
    KVP_DCHECK(i < length_max_);
    return elements_[i];
  }

  std::size_t length_max() const { return length_max_; }
  std::size_t length_reached() const { return reached_; }

  // Says that elements below `length` are, or were, in use. Only bytes() needs to know.
  void reach(std::size_t length) {
    KVP_DCHECK(length <= length_max_);
    if (length > reached_) reached_ = length;
  }

  // Forgets the elements from `length` on: their whole pages go back and read as zero again.
  void trim(std::size_t length) {
    if (length >= reached_) return;
    const std::size_t keep = mapped_bytes(length);
    const std::size_t end = mapped_bytes(reached_);
    if (keep < end) {
      KVP_CHECK(::madvise(reinterpret_cast<char*>(elements_) + keep, end - keep, MADV_DONTNEED) ==
                0);
    }
    reached_ = length;
  }

  // Room for more elements. The array may move; its pages are moved, not copied.
  void extend(std::size_t length_max) {
    if (length_max <= length_max_) return;
    if (length_max > kBytesMax / sizeof(T)) throw std::bad_alloc();
    void* at = elements_ == nullptr
                   ? ::mmap(nullptr, mapped_bytes(length_max), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
                   : ::mremap(elements_, mapped_bytes(length_max_), mapped_bytes(length_max),
                              MREMAP_MAYMOVE);
    if (at == MAP_FAILED) throw std::bad_alloc();
    elements_ = static_cast<T*>(at);
    length_max_ = length_max;
  }

  // Memory held: every page up to the highest element reached.
  std::size_t bytes() const { return mapped_bytes(reached_); }

 private:
  static constexpr std::size_t kPageBytes = 4096;
  static constexpr std::size_t kBytesMax = std::size_t{1} << 46;

  static std::size_t mapped_bytes(std::size_t length) {
    return (length * sizeof(T) + kPageBytes - 1) / kPageBytes * kPageBytes;
  }
  void swap(LazyArray& other) noexcept {
    std::swap(elements_, other.elements_);
    std::swap(length_max_, other.length_max_);
    std::swap(reached_, other.reached_);
  }

  T* elements_ = nullptr;
  std::size_t length_max_ = 0;
  std::size_t reached_ = 0;
};

}  // namespace kvpool
