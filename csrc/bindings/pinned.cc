#include "bindings/pinned.h"

#include <utility>
#include <vector>

#include "bindings/bind.h"
#include "bindings/gil.h"
#include "bindings/memory.h"
#include "block/checksum.h"

namespace kvpool {
namespace {

using nb::literals::operator""_a;

// The pins of one view. It exports the arena read-only; the memoryviews of the blocks are slices
// of one export, so the pins go when the last slice, or anything made from one, has gone. Another
// export (of a memoryview's `obj`) holds the pins as well; once they are gone there is no new one.
class Pinned {
 public:
  Pinned(std::shared_ptr<Channel> channel, std::unique_ptr<Pins> pins)
      : channel_(std::move(channel)), pins_(std::move(pins)) {}
  ~Pinned() { release(); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

  void release() {
    if (!pins_ || channel_->is_forked()) return;
    // Taken out first: without the GIL another thread may come by.
    std::unique_ptr<Pins> pins = std::move(pins_);
    const GilReleased released;
    pins.reset();
  }

  int export_memory(PyObject* self, Py_buffer* buffer, int flags) {
    if (!pins_) {
      PyErr_SetString(PyExc_BufferError, "the blocks of this view were released");
      return -1;
    }
    const int rc =
        PyBuffer_FillInfo(buffer, self, const_cast<std::byte*>(pins_->base),
                          static_cast<Py_ssize_t>(pins_->base_bytes), /*readonly=*/1, flags);
    if (rc == 0) ++exports_;
    return rc;
  }
  void end_export() {
    if (--exports_ == 0) release();
  }

 private:
  std::shared_ptr<Channel> channel_;
  std::unique_ptr<Pins> pins_;
  std::size_t exports_ = 0;
};

int pinned_get(PyObject* self, Py_buffer* buffer, int flags) {
  return nb::inst_ptr<Pinned>(self)->export_memory(self, buffer, flags);
}
void pinned_release(PyObject* self, Py_buffer*) { nb::inst_ptr<Pinned>(self)->end_export(); }

PyType_Slot pinned_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(pinned_get)},
                              {Py_bf_releasebuffer, reinterpret_cast<void*>(pinned_release)},
                              {0, nullptr}};

// For the SSD to take a block, where the pool promises that it does.
constexpr auto kCommitTimeout = std::chrono::seconds(5);

// A slot of ours that the caller fills in place.
class Reservation {
 public:
  Reservation(SpaceHandle space, std::unique_ptr<Room> room)
      : space_(std::move(space)), room_(std::move(room)), memory_(room_->memory) {}
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;
  ~Reservation() {
    if (!room_) return;
    if (space_.channel->is_forked()) {
      static_cast<void>(room_.release());  // nothing may be torn down in a child
      return;
    }
    const GilReleased released;
    room_.reset();
  }

  std::uint8_t commit() {
    require_committable();
    space_.use();
    const std::unique_ptr<Room> room = std::move(room_);
    const GilReleased released;
    return static_cast<std::uint8_t>(
        room->commit(std::chrono::steady_clock::now() + kCommitTimeout));
  }
  bool is_open() const { return room_ != nullptr; }

  int export_slot(PyObject* self, Py_buffer* buffer, int flags) {
    if (!room_) {
      PyErr_SetString(PyExc_BufferError, "this reservation was committed");
      return -1;
    }
    const int rc =
        PyBuffer_FillInfo(buffer, self, memory_, static_cast<Py_ssize_t>(space_.space->block_bytes),
                          /*readonly=*/0, flags);
    if (rc == 0) ++exports_;
    return rc;
  }
  void end_export() { --exports_; }

 private:
  // Whoever still holds the slot's memory could write into a block that others read.
  void require_committable() const {
    if (!room_) raise_bad_argument("this reservation was committed already");
    if (exports_ > 0)
      raise_bad_argument("cannot commit while " + std::to_string(exports_) +
                         " buffer(s) made from the slot's are in use: their owner could write into "
                         "a block that others read; delete them first");
  }

  SpaceHandle space_;
  std::unique_ptr<Room> room_;
  std::byte* memory_;
  std::size_t exports_ = 0;
};

int reservation_get(PyObject* self, Py_buffer* buffer, int flags) {
  return nb::inst_ptr<Reservation>(self)->export_slot(self, buffer, flags);
}
void reservation_release(PyObject* self, Py_buffer*) {
  nb::inst_ptr<Reservation>(self)->end_export();
}

PyType_Slot reservation_slots[] = {
    {Py_bf_getbuffer, reinterpret_cast<void*>(reservation_get)},
    {Py_bf_releasebuffer, reinterpret_cast<void*>(reservation_release)},
    {0, nullptr}};

}  // namespace

// A list of read-only memoryviews, one per leading block that is present.
nb::typed<nb::list, nb::any> view_blocks(const SpaceHandle& space, nb::handle keys_object) {
  Channel& channel = space.use();
  const Keys keys(keys_object, Keys::Hold::in_place);
  std::unique_ptr<Pins> pins;
  {
    const GilReleased released;
    Miss why = Miss::none;
    pins = channel.acquire(*space.space, keys.span(), why);
  }
  nb::typed<nb::list, nb::any> blocks;
  if (pins->places.empty()) return blocks;
  const std::vector<Pins::Place> places = pins->places;
  nb::object pinned =
      nb::cast(new Pinned(space.channel, std::move(pins)), nb::rv_policy::take_ownership);
  nb::object whole = nb::steal(PyMemoryView_FromObject(pinned.ptr()));
  if (!whole.is_valid()) throw nb::python_error();
  for (const Pins::Place& place : places) {
    nb::object slice = nb::steal(PySlice_New(nb::int_(place.offset).ptr(),
                                             nb::int_(place.offset + place.bytes).ptr(), nullptr));
    nb::object block = nb::steal(PyObject_GetItem(whole.ptr(), slice.ptr()));
    if (!block.is_valid()) throw nb::python_error();
    blocks.append(block);
  }
  return blocks;
}

// Those from which something else was made stay, and with them the pins of all.
void release_blocks(const nb::typed<nb::list, nb::any>& blocks) {
  static PyObject* const release = PyUnicode_InternFromString("release");
  for (const nb::handle block : blocks) {
    PyObject* const done = PyObject_CallMethodNoArgs(block.ptr(), release);
    if (done == nullptr && !PyErr_ExceptionMatches(PyExc_BufferError)) throw nb::python_error();
    if (done == nullptr) PyErr_Clear();
    Py_XDECREF(done);
  }
}

nb::typed<nb::tuple, nb::int_, nb::any> reserve_block(const SpaceHandle& space,
                                                      nb::handle key_object,
                                                      nb::handle parent_object,
                                                      nb::handle timeout_s) {
  Channel& channel = space.use();
  const Hash128 key = one_key(key_object, "key");
  Hash128 parent;
  if (!parent_object.is_none()) parent = one_key(parent_object, "parent");
  PutStatus status;
  std::unique_ptr<Room> room;
  const PutCall call{*space.space,
                     {&key, 1},
                     parent_object.is_none() ? nullptr : &parent,
                     deadline_after(timeout_s)};
  {
    const GilReleased released;
    room = channel.reserve(call, status);
  }
  nb::object reservation = nb::none();
  if (room)
    reservation = nb::cast(new Reservation(space, std::move(room)), nb::rv_policy::take_ownership);
  return nb::typed<nb::tuple, nb::int_, nb::any>(
      nb::make_tuple(static_cast<std::uint8_t>(status), reservation));
}

void bind_pinned(nb::module_& m) {
  m.def("release_blocks", &release_blocks, "blocks"_a,
        "Release memoryviews, but those that something else was made from.");
  nb::class_<Pinned>(m, "Pinned", nb::type_slots(pinned_slots),
                     "Pins of the blocks of one view; lives as long as a memoryview of them.");
  nb::class_<Reservation>(m, "Reservation", nb::type_slots(reservation_slots),
                          "A slot to be filled in place (writable buffer), then committed.\n\n"
                          "Aborted when it, and every buffer over it, is gone without commit.")
      .def("commit", &Reservation::commit)
      .def_prop_ro("is_open", &Reservation::is_open);
  nb::class_<Region>(m, "Region", "Memory registered once; calls then carry offsets into it.")
      .def(nb::init<nb::handle>(), "memory"_a.none())
      .def_prop_ro("nbytes", &Region::bytes)
      .def_prop_ro("writable", &Region::writable);
}

}  // namespace kvpool
