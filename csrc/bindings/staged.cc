// Memory in which the payload of blocks is born, to be put without a copy by the caller.
#include <nanobind/nanobind.h>

#include <optional>

#include "bindings/bind.h"
#include "bindings/gil.h"
#include "bindings/handles.h"
#include "bindings/memory.h"
#include "block/checksum.h"
#include "block/copy.h"
#include "net/shm_channel.h"

namespace kvpool {
namespace {

using nb::literals::operator""_a;

constexpr std::size_t kAlignBytes = 64;  // of a block in ordinary memory, as vector copies like it

// Through shared memory the node reads the blocks where they are. Through any other channel they
// lie in ordinary memory, and putting them costs the copy that it always does.
class Staged {
 public:
  Staged(SpaceHandle space, std::unique_ptr<StagedBlocks> shared)
      : space_(std::move(space)),
        shared_(std::move(shared)),
        memory_(shared_->memory(0)),
        count_(shared_->count()),
        stride_(shared_->stride()) {}
  Staged(SpaceHandle space, std::size_t count)
      : space_(std::move(space)),
        count_(count),
        stride_((space_.space->block_bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes) {
    own_.resize(count_ * stride_ + kAlignBytes);
    const auto at = reinterpret_cast<std::uintptr_t>(own_.data());
    memory_ = own_.data() + (kAlignBytes - at % kAlignBytes) % kAlignBytes;
  }
  Staged(const Staged&) = delete;
  Staged& operator=(const Staged&) = delete;

  const SpaceHandle& space() const { return space_; }
  StagedBlocks* shared() { return shared_.get(); }
  std::size_t count() const { return count_; }
  std::size_t stride() const { return stride_; }
  std::byte* block(std::size_t index) const { return memory_ + index * stride_; }
  std::size_t bytes() const { return count_ * stride_; }

 private:
  SpaceHandle space_;
  std::unique_ptr<StagedBlocks> shared_;
  std::vector<std::byte> own_;
  std::byte* memory_ = nullptr;
  std::size_t count_, stride_;
};

class StagedSource final : public BlockSource {
 public:
  explicit StagedSource(const Staged& staged) : staged_(staged) {}
  bool fill(std::size_t index, std::byte* slot, Hash128& sum) override {
    sum = copy_with_checksum(slot, staged_.block(index), staged_.space().space->block_bytes,
                             Stores::streaming);
    return true;
  }
  const std::byte* place(std::size_t index) const override { return staged_.block(index); }

 private:
  const Staged& staged_;
};

int staged_get(PyObject* self, Py_buffer* buffer, int flags) {
  const Staged* staged = nb::inst_ptr<Staged>(self);
  return PyBuffer_FillInfo(buffer, self, staged->block(0), static_cast<Py_ssize_t>(staged->bytes()),
                           /*readonly=*/0, flags);
}

PyType_Slot staged_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(staged_get)}, {0, nullptr}};

// (status, Staged or None)
nb::typed<nb::tuple, nb::int_, nb::any> stage(const SpaceHandle& space, std::size_t count) {
  Channel& channel = space.use();
  if (count == 0 || count > kKeysPerLane)
    raise_bad_argument("staging is for 1.." + std::to_string(kKeysPerLane) + " blocks, not " +
                       std::to_string(count));
  nb::object staged = nb::none();
  PutStatus status = PutStatus::stored;
  if (auto* memory = dynamic_cast<ShmChannel*>(&channel)) {
    std::unique_ptr<StagedBlocks> blocks;
    {
      const GilReleased released;
      blocks = memory->reserve_many(*space.space, count, status);
    }
    if (blocks)
      staged = nb::cast(new Staged(space, std::move(blocks)), nb::rv_policy::take_ownership);
  } else {
    staged = nb::cast(new Staged(space, count), nb::rv_policy::take_ownership);
  }
  return nb::typed<nb::tuple, nb::int_, nb::any>(nb::make_tuple(static_cast<int>(status), staged));
}

nb::bytes put_staged(const SpaceHandle& self, nb::handle keys_object, Staged& staged,
                     nb::handle parent_object, nb::handle timeout_s) {
  Channel& channel = self.use();
  const Keys keys(keys_object, Keys::Hold::copied);
  if (staged.space().space != self.space)
    raise_bad_argument("these blocks were staged for another namespace");
  if (keys.count() > staged.count())
    raise_bad_argument(std::to_string(keys.count()) + " keys for " +
                       std::to_string(staged.count()) + " staged blocks");
  Hash128 parent;
  if (!parent_object.is_none()) parent = one_key(parent_object, "parent");
  const PutCall call{*self.space, keys.span(), parent_object.is_none() ? nullptr : &parent,
                     deadline_after(timeout_s)};
  std::vector<PutStatus> statuses(keys.count());
  {
    const GilReleased released;
    if (staged.shared() != nullptr) {
      static_cast<ShmChannel&>(channel).put_staged(call, *staged.shared(), statuses.data());
    } else {
      StagedSource source(staged);
      channel.put(call, source, statuses.data());
    }
  }
  return nb::bytes(statuses.data(), statuses.size());
}

}  // namespace

void bind_staged(nb::module_& m) {
  nb::class_<Staged>(m, "Staged", nb::type_slots(staged_slots),
                     "Writable memory for blocks that are to be put; one buffer over all of them.")
      .def_prop_ro("count", &Staged::count)
      .def_prop_ro("stride", &Staged::stride);
  m.def("stage", &stage, "space"_a, "count"_a);
  m.def("put_staged", &put_staged, "space"_a, "keys"_a.none(), "staged"_a, "parent"_a.none(),
        "timeout_s"_a.none());
}

}  // namespace kvpool
