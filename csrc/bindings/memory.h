// Python objects as memory, checked before the GIL is let go.
//
// Thread rule: made and destroyed with the GIL held; the bytes may be used without it in between.
#pragma once
#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "block/key.h"

namespace kvpool {

namespace nb = nanobind;

enum class Access : std::uint8_t { read, write };

// The bytes of one object: anything with the buffer protocol, C-contiguous, or a torch CPU tensor.
// What has the buffer protocol cannot be resized or freed while this lives. A tensor is only kept
// alive: that nobody gives it other storage meanwhile is the caller's promise. Arrays of Python
// objects are refused: their items are pointers, which must neither be stored nor overwritten.
class Memory {
 public:
  // `name`: what the caller calls it, for messages. Raises BadType or BadArgument.
  Memory(nb::handle object, Access access, const char* name);
  ~Memory();
  Memory(Memory&& other) noexcept;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  Memory& operator=(Memory&&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  std::size_t item_bytes() const { return item_bytes_; }

 private:
  bool take_tensor(nb::handle object, const char* name);
  void take_buffer(nb::handle object, Access access, const char* name);

  Py_buffer buffer_{};
  bool has_buffer_ = false;
  nb::object owner_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::size_t item_bytes_ = 1;
};

// A tensor registered once; later calls name places in it by offset.
class Region {
 public:
  explicit Region(nb::handle object);
  std::byte* data() const { return memory_.data(); }
  std::size_t bytes() const { return memory_.bytes(); }
  bool writable() const { return writable_; }

 private:
  static bool can_write(nb::handle object);
  bool writable_;
  Memory memory_;
};

// Keys in chain order: packed (n * 16 bytes, in items of 1 or 16) or a sequence of 16-byte keys.
class Keys {
 public:
  // in_place: packed keys are read where they lie, and another thread may change them meanwhile.
  // Only for a reader that survives that; a writer reads a key more than once and takes a copy.
  enum class Hold : std::uint8_t { in_place, copied };
  Keys(nb::handle object, Hold hold);
  std::span<const Hash128> span() const { return keys_; }
  std::size_t count() const { return keys_.size(); }

 private:
  void take_packed(Hold hold);
  void take_each(nb::handle object);

  std::vector<Memory> packed_;   // none or one; keeps the bytes alive
  std::vector<Hash128> copies_;  // where they lie apart or unaligned, or may change
  std::span<const Hash128> keys_;
};

// One key: a buffer of 16 bytes.
Hash128 one_key(nb::handle object, const char* name);

// Page numbers or offsets: a contiguous array of 64- or 32-bit integers, a tensor of integers, or a
// list of ints. There must be `count` of them. A negative one is kept as it is; who uses it checks
// the range.
std::vector<std::int64_t> integers(nb::handle object, const char* name, std::size_t count);

// One place per block in memory of the caller.
class Places {
 public:
  struct Shape {
    std::size_t count = 0;  // blocks
    std::size_t block_bytes = 0;
    nb::handle stride;   // None or int
    nb::handle offsets;  // None or integers
  };
  Places(nb::handle object, Access access, const char* name, const Shape& shape);

  std::byte* at(std::size_t index) const {
    if (!each_.empty()) return each_[index];
    return first_ + index * stride_;
  }

 private:
  void by_offsets(const Region& region, const char* name, const Shape& shape);
  void one_buffer(nb::handle object, Access access, const char* name, const Shape& shape);
  void many_buffers(nb::handle object, Access access, const char* name, const Shape& shape);

  std::vector<Memory> held_;
  nb::object region_;
  std::byte* first_ = nullptr;
  std::size_t stride_ = 0;
  std::vector<std::byte*> each_;
};

}  // namespace kvpool
