#include "bindings/memory.h"

#include <nanobind/stl/string.h>

#include <cstring>
#include <limits>
#include <optional>
#include <utility>

#include "bindings/raise.h"

namespace kvpool {
namespace {

std::string type_of(nb::handle object) { return Py_TYPE(object.ptr())->tp_name; }

std::string number(std::size_t value) { return std::to_string(value); }

// Text of the Python error that is set, which is cleared.
std::string taken_error() {
  nb::python_error error;
  return error.what();
}

bool is_sequence(nb::handle object) {
  return PyList_Check(object.ptr()) || PyTuple_Check(object.ptr());
}

// Asking an item for its buffer may run Python code, which could shorten a list under us. Taken
// from where the items are, whatever a subclass says of its length.
nb::tuple snapshot(nb::handle object) {
  PyObject* items = PyList_Check(object.ptr())
                        ? PyList_AsTuple(object.ptr())
                        : PyTuple_GetSlice(object.ptr(), 0, PyTuple_GET_SIZE(object.ptr()));
  if (items == nullptr) throw nb::python_error();
  return nb::steal<nb::tuple>(items);
}

// For what a sequence raises when it has no such length or item; anything else is passed on.
void raise_unread(const char* name, PyObject* expected) {
  if (PyErr_ExceptionMatches(expected) == 0) throw nb::python_error();
  const std::string reason = taken_error();
  raise_bad_argument(std::string(name) + " cannot be read: " + reason);
}

// Whether a format of the struct module has an item 'O'. Names of fields stand between colons.
bool holds_objects(const char* format) {
  bool is_name = false;
  for (; format != nullptr && *format != '\0'; ++format) {
    if (*format == ':') is_name = !is_name;
    if (*format == 'O' && !is_name) return true;
  }
  return false;
}

// What counts as an integer in Python itself (int, numpy's integers), nothing that merely converts.
std::optional<std::int64_t> integer(nb::handle object) {
  if (!PyIndex_Check(object.ptr())) return std::nullopt;
  const nb::object exact = nb::steal(PyNumber_Index(object.ptr()));
  int overflow = 0;
  const long long value =
      exact.is_valid() ? PyLong_AsLongLongAndOverflow(exact.ptr(), &overflow) : -1;
  if (overflow != 0) return std::nullopt;
  if (value == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  return value;
}

void require_count(const char* name, std::size_t found, std::size_t wanted) {
  if (found != wanted)
    raise_bad_argument(std::string(name) + " has " + number(found) + " items; there must be " +
                       number(wanted));
}

std::vector<std::int64_t> integers_of_buffer(nb::handle object, const char* name) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(object.ptr(), &buffer, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) != 0)
    raise_bad_argument(std::string(name) + " must be contiguous: " + taken_error());
  const std::string format = buffer.format == nullptr ? "B" : buffer.format;
  const auto item = static_cast<std::size_t>(buffer.itemsize);
  const bool fits = format.size() == 1 && std::strchr("lqLQiI", format[0]) != nullptr;
  const std::size_t count = fits ? static_cast<std::size_t>(buffer.len) / item : 0;
  std::vector<std::int64_t> values(count);
  const bool is_signed = fits && std::strchr("lqi", format[0]) != nullptr;
  for (std::size_t i = 0; i < count; ++i) {
    const auto* at = static_cast<const char*>(buffer.buf) + i * item;
    if (item == 8) {
      std::memcpy(&values[i], at, 8);
    } else {
      std::uint32_t word;
      std::memcpy(&word, at, 4);
      values[i] = is_signed ? static_cast<std::int32_t>(word) : std::int64_t{word};
    }
  }
  PyBuffer_Release(&buffer);
  if (!fits)
    raise_bad_type(std::string(name) + " must be 32- or 64-bit integers, not items of format '" +
                   format + "'");
  return values;
}

}  // namespace

Memory::Memory(nb::handle object, Access access, const char* name) {
  if (PyObject_CheckBuffer(object.ptr()))
    take_buffer(object, access, name);
  else if (!take_tensor(object, name))
    raise_bad_type(std::string(name) + " is " + type_of(object) +
                   "; it must offer the buffer protocol (bytes, numpy, ...) or be a torch tensor");
}

void Memory::take_buffer(nb::handle object, Access access, const char* name) {
  const int flags = PyBUF_ND | PyBUF_FORMAT | (access == Access::write ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(object.ptr(), &buffer_, flags) != 0)
    raise_bad_argument(std::string(name) + " must be contiguous" +
                       (access == Access::write ? " and writable: " : ": ") + taken_error());
  if (holds_objects(buffer_.format)) {
    PyBuffer_Release(&buffer_);
    raise_bad_type(std::string(name) + " is an array of Python objects; it must hold plain bytes");
  }
  has_buffer_ = true;
  data_ = static_cast<std::byte*>(buffer_.buf);
  bytes_ = static_cast<std::size_t>(buffer_.len);
  item_bytes_ = static_cast<std::size_t>(buffer_.itemsize);
}

// A torch tensor has no buffer protocol (and numpy knows no bfloat16), so it is asked itself. Its
// answers come from Python code that may be anybody's.
bool Memory::take_tensor(nb::handle object, const char* name) {
  if (!nb::hasattr(object, "data_ptr") || !nb::hasattr(object, "is_contiguous")) return false;
  std::string device;
  bool is_contiguous = false;
  std::uintptr_t address = 0;
  std::size_t items = 0;
  try {
    device = nb::cast<std::string>(nb::str(object.attr("device").attr("type")));
    is_contiguous = nb::cast<bool>(object.attr("is_contiguous")());
    address = nb::cast<std::uintptr_t>(object.attr("data_ptr")());
    items = nb::cast<std::size_t>(object.attr("numel")());
    item_bytes_ = nb::cast<std::size_t>(object.attr("element_size")());
  } catch (const std::exception& error) {  // nb::cast_error, or what the object itself raised
    raise_bad_type(std::string(name) + " is " + type_of(object) +
                   ", which does not answer as a torch tensor does: " + error.what());
  }
  if (device != "cpu")
    raise_bad_argument(std::string(name) + " is a tensor on " + device +
                       "; only CPU tensors can be used here");
  if (!is_contiguous) raise_bad_argument(std::string(name) + " must be a contiguous tensor");
  if (__builtin_mul_overflow(items, item_bytes_, &bytes_))
    raise_bad_argument(std::string(name) + " is a tensor of more than 2^64 bytes");
  data_ = reinterpret_cast<std::byte*>(address);
  owner_ = nb::borrow(object);
  return true;
}

Memory::~Memory() {
  if (has_buffer_) PyBuffer_Release(&buffer_);
}

Memory::Memory(Memory&& other) noexcept
    : buffer_(other.buffer_),
      has_buffer_(std::exchange(other.has_buffer_, false)),
      owner_(std::move(other.owner_)),
      data_(other.data_),
      bytes_(other.bytes_),
      item_bytes_(other.item_bytes_) {}

bool Region::can_write(nb::handle object) {
  if (!PyObject_CheckBuffer(object.ptr())) return true;  // torch tensors always
  Py_buffer buffer;
  if (PyObject_GetBuffer(object.ptr(), &buffer, PyBUF_SIMPLE | PyBUF_WRITABLE) != 0) {
    PyErr_Clear();
    return false;
  }
  PyBuffer_Release(&buffer);
  return true;
}

Region::Region(nb::handle object)
    : writable_(can_write(object)),
      memory_(object, writable_ ? Access::write : Access::read, "the region") {}

Keys::Keys(nb::handle object, Hold hold) {
  if (is_sequence(object)) {
    take_each(object);
  } else {
    packed_.emplace_back(object, Access::read, "keys");
    take_packed(hold);
  }
}

void Keys::take_packed(Hold hold) {
  const Memory& packed = packed_.front();
  // Token ids in the place of their keys are an easy mistake, and no array of keys looks like them.
  if (packed.item_bytes() != 1 && packed.item_bytes() != kHashBytes)
    raise_bad_type("keys are items of " + number(packed.item_bytes()) +
                   " bytes; packed keys are bytes, or items of 16 (are these token ids? make keys "
                   "of them with keys())");
  if (packed.bytes() % kHashBytes != 0)
    raise_bad_argument("packed keys take 16 bytes each; got " + number(packed.bytes()) + " bytes");
  const std::size_t count = packed.bytes() / kHashBytes;
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(packed.data()) % alignof(Hash128) == 0;
  if (hold == Hold::in_place && is_aligned) {
    keys_ = {reinterpret_cast<const Hash128*>(packed.data()), count};
    return;
  }
  copies_.resize(count);
  if (count > 0) std::memcpy(copies_.data(), packed.data(), packed.bytes());
  keys_ = copies_;
}

void Keys::take_each(nb::handle object) {
  const nb::tuple items = snapshot(object);
  const std::size_t count = items.size();
  copies_.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    PyObject* item = PyTuple_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i));
    if (PyBytes_CheckExact(item) && PyBytes_GET_SIZE(item) == kHashBytes) {
      copies_.push_back(Hash128::from_bytes(PyBytes_AS_STRING(item)));
      continue;
    }
    const Memory key(item, Access::read, "a key");
    if (key.bytes() != kHashBytes)
      raise_bad_argument("key " + number(i) + " has " + number(key.bytes()) +
                         " bytes; a key has 16");
    copies_.push_back(Hash128::from_bytes(key.data()));
  }
  keys_ = copies_;
}

Hash128 one_key(nb::handle object, const char* name) {
  const Memory key(object, Access::read, name);
  if (key.bytes() != kHashBytes)
    raise_bad_argument(std::string(name) + " is a key of 16 bytes, not " + number(key.bytes()));
  return Hash128::from_bytes(key.data());
}

std::vector<std::int64_t> integers(nb::handle object, const char* name, std::size_t wanted) {
  if (PyObject_CheckBuffer(object.ptr())) {
    std::vector<std::int64_t> values = integers_of_buffer(object, name);
    require_count(name, values.size(), wanted);
    return values;
  }
  // A tensor of integers without the buffer protocol (torch) offers a list.
  nb::object list = nb::borrow(object);
  if (!is_sequence(object) && nb::hasattr(object, "tolist")) list = object.attr("tolist")();
  if (!PySequence_Check(list.ptr()) || PyUnicode_Check(list.ptr()))
    raise_bad_type(std::string(name) + " is " + type_of(object) +
                   "; it must be an integer array or a list of ints");
  const Py_ssize_t count = PySequence_Size(list.ptr());
  if (count < 0) raise_unread(name, PyExc_OverflowError);
  require_count(name, static_cast<std::size_t>(count), wanted);  // a range may have any length
  std::vector<std::int64_t> values;
  for (Py_ssize_t i = 0; i < count; ++i) {
    const nb::object item = nb::steal(PySequence_GetItem(list.ptr(), i));
    if (!item.is_valid()) raise_unread(name, PyExc_IndexError);  // it became shorter meanwhile
    const auto value = integer(item);
    if (!value)
      raise_bad_type(std::string(name) + " must hold integers below 2^63; item " +
                     number(static_cast<std::size_t>(i)) + " is of type " + type_of(item));
    values.push_back(*value);
  }
  return values;
}

Places::Places(nb::handle object, Access access, const char* name, const Shape& shape) {
  if (nb::isinstance<Region>(object)) {
    if (!nb::inst_ready(object)) raise_bad_type(std::string(name) + " is a region never made");
    if (!shape.stride.is_none())
      raise_bad_argument("stride goes with one buffer, not with a region and offsets");
    region_ = nb::borrow(object);
    const auto& region = nb::cast<const Region&>(object);
    if (access == Access::write && !region.writable())
      raise_bad_argument(std::string(name) + " is a region over read-only memory");
    by_offsets(region, name, shape);
  } else if (!shape.offsets.is_none()) {
    raise_bad_argument("offsets go with a registered region, not with " + type_of(object));
  } else if (is_sequence(object)) {
    many_buffers(object, access, name, shape);
  } else {
    one_buffer(object, access, name, shape);
  }
}

void Places::by_offsets(const Region& region, const char* name, const Shape& shape) {
  if (shape.offsets.is_none())
    raise_bad_argument(std::string(name) + " is a region: say where with offsets=");
  const std::vector<std::int64_t> offsets = integers(shape.offsets, "offsets", shape.count);
  each_.reserve(shape.count);
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    const auto offset = static_cast<std::uint64_t>(offsets[i]);
    if (offset > region.bytes() || shape.block_bytes > region.bytes() - offset)
      raise_bad_argument("offset " + number(i) + " is " + std::to_string(offsets[i]) +
                         ": a block of " + number(shape.block_bytes) +
                         " bytes there does not lie inside the region of " +
                         number(region.bytes()) + " bytes");
    each_.push_back(region.data() + offset);
  }
}

void Places::one_buffer(nb::handle object, Access access, const char* name, const Shape& shape) {
  const Memory& memory = held_.emplace_back(object, access, name);
  stride_ = shape.block_bytes;
  std::int64_t stride = 0;
  if (!shape.stride.is_none()) {
    const auto given = integer(shape.stride);
    if (!given)
      raise_bad_type("stride is of type " + type_of(shape.stride) +
                     "; it must be an int below 2^63 (bytes) or None");
    stride = *given;
    if (stride < static_cast<std::int64_t>(shape.block_bytes))
      raise_bad_argument("stride is " + std::to_string(stride) +
                         "; it must be at least the block of " + number(shape.block_bytes) +
                         " bytes");
    stride_ = static_cast<std::size_t>(stride);
  }
  first_ = memory.data();
  const std::size_t steps = shape.count > 0 ? shape.count - 1 : 0;
  std::size_t needed = 0;
  if (__builtin_mul_overflow(steps, stride_, &needed) ||
      __builtin_add_overflow(needed, shape.count > 0 ? shape.block_bytes : 0, &needed))
    needed = std::numeric_limits<std::size_t>::max();
  // Data to be stored must be meant for these keys: more of it than they take is a mistake.
  const bool exact = access == Access::write || stride != 0 || memory.bytes() == needed;
  if (needed > memory.bytes() || !exact)
    raise_bad_argument(std::string(name) + " has " + number(memory.bytes()) + " bytes; " +
                       number(shape.count) + " blocks of " + number(shape.block_bytes) + " bytes" +
                       (stride != 0 ? " with a stride of " + std::to_string(stride) : "") +
                       " take " + number(needed));
}

void Places::many_buffers(nb::handle object, Access access, const char* name, const Shape& shape) {
  const nb::tuple items = snapshot(object);
  const std::size_t count = items.size();
  if (count != shape.count)
    raise_bad_argument(std::string(name) + " is a list of " + number(count) + " buffers for " +
                       number(shape.count) + " keys");
  if (!shape.stride.is_none()) raise_bad_argument("stride goes with one buffer, not with a list");
  held_.reserve(count);
  each_.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    const Memory& memory =
        held_.emplace_back(PyTuple_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i)), access, name);
    if (memory.bytes() != shape.block_bytes)
      raise_bad_argument("buffer " + number(i) + " has " + number(memory.bytes()) +
                         " bytes; a block has " + number(shape.block_bytes));
    each_.push_back(memory.data());
  }
}

}  // namespace kvpool
