// One namespace of a node, as Python calls it. Checks arguments, lets the GIL go, translates.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <vector>

#include "bindings/bind.h"
#include "bindings/gil.h"
#include "bindings/handles.h"
#include "bindings/layers.h"
#include "bindings/memory.h"
#include "bindings/pinned.h"
#include "block/checksum.h"
#include "block/copy.h"

namespace kvpool {
namespace {

using nb::literals::operator""_a;

// Below this a lookup takes less than 10 us and the GIL is kept.
constexpr std::size_t kLookupWithGil = 128;

class BufferSource final : public BlockSource {
 public:
  BufferSource(const Places& places, std::size_t block_bytes)
      : places_(places), block_bytes_(block_bytes) {}
  bool fill(std::size_t index, std::byte* slot, Hash128& sum) override {
    sum = copy_with_checksum(slot, places_.at(index), block_bytes_, Stores::streaming);
    return true;
  }
  const std::byte* place(std::size_t index) const override { return places_.at(index); }

 private:
  const Places& places_;
  std::size_t block_bytes_;
};

class BufferSink final : public BlockSink {
 public:
  BufferSink(const Places& places, std::size_t block_bytes)
      : places_(places), block_bytes_(block_bytes) {}
  bool deliver(std::size_t index, const IndexReader& reader, const Found& found) override {
    return found.bytes == block_bytes_ && reader.copy(found, places_.at(index));
  }
  bool deliver_whole(std::size_t index, std::span<const std::byte> payload) override {
    racy_copy(places_.at(index), payload.data(), payload.size());
    return payload.size() == block_bytes_;
  }
  std::byte* place(std::size_t index) override { return places_.at(index); }

 private:
  const Places& places_;
  std::size_t block_bytes_;
};

class PagedSource final : public BlockSource {
 public:
  PagedSource(const CopyPlan& plan, std::span<const std::int64_t> pages)
      : plan_(plan), pages_(pages) {}
  bool fill(std::size_t index, std::byte* slot, Hash128& sum) override {
    const std::size_t per_block = plan_.pages_per_block();
    const auto result = gather_with_checksum(plan_, pages_.subspan(index * per_block, per_block),
                                             {slot, plan_.block_bytes()}, Stores::streaming);
    if (result) sum = *result;
    return result.has_value();
  }

 private:
  const CopyPlan& plan_;
  std::span<const std::int64_t> pages_;
};

class PagedSink final : public BlockSink {
 public:
  PagedSink(const CopyPlan& plan, std::span<const std::int64_t> pages)
      : plan_(plan), pages_(pages) {}
  bool deliver(std::size_t index, const IndexReader& reader, const Found& found) override {
    if (found.bytes != plan_.block_bytes()) return false;
    struct Question {
      const IndexReader& reader;
      const Found& found;
    } question{reader, found};
    const auto ask = [](void* context) {
      const auto& q = *static_cast<Question*>(context);
      return q.reader.still_there(q.found);
    };
    const std::size_t per_block = plan_.pages_per_block();
    const auto result = scatter_while_valid(plan_, pages_.subspan(index * per_block, per_block),
                                            {reader.payload(found), plan_.block_bytes()},
                                            StillValid{ask, &question});
    return result && *result;
  }
  bool deliver_whole(std::size_t index, std::span<const std::byte> payload) override {
    const std::size_t per_block = plan_.pages_per_block();
    return payload.size() == plan_.block_bytes() &&
           scatter(plan_, pages_.subspan(index * per_block, per_block), payload).has_value();
  }

 private:
  const CopyPlan& plan_;
  std::span<const std::int64_t> pages_;
};

// One Miss per key, into a buffer of the caller.
void tell_misses(const Memory& misses, std::size_t keys, std::size_t done, Miss why) {
  auto* places = reinterpret_cast<std::uint8_t*>(misses.data());
  for (std::size_t i = 0; i < keys; ++i)
    places[i] = static_cast<std::uint8_t>(i < done ? Miss::none : i == done ? why : Miss::behind);
}

std::optional<Memory> misses_of(nb::handle object, std::size_t keys) {
  if (object.is_none()) return std::nullopt;
  std::optional<Memory> memory(std::in_place, object, Access::write, "misses");
  if (memory->bytes() != keys || memory->item_bytes() != 1)
    raise_bad_argument("misses has " + std::to_string(memory->bytes()) +
                       " bytes; it must have one for each of the " + std::to_string(keys) +
                       " keys");
  return memory;
}

// (leading blocks present, one tier byte per key, Miss of the first that is not)
nb::typed<nb::tuple, nb::int_, nb::bytes, nb::int_> lookup(const SpaceHandle& self,
                                                           nb::handle keys_object) {
  Channel& channel = self.use();
  const Keys keys(keys_object, Keys::Hold::in_place);
  // Nobody has seen this object yet, so its bytes may be written, also without the GIL.
  nb::bytes tiers = nb::steal<nb::bytes>(
      PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(keys.count())));
  auto* places = reinterpret_cast<std::uint8_t*>(PyBytes_AS_STRING(tiers.ptr()));
  std::size_t count = 0;
  Miss why = Miss::none;
  {
    std::optional<GilReleased> released;
    if (keys.count() > kLookupWithGil || !channel.looks_up_at_once()) released.emplace();
    count = channel.lookup(*self.space, keys.span(), places, why);
  }
  return nb::typed<nb::tuple, nb::int_, nb::bytes, nb::int_>(
      nb::make_tuple(count, tiers, static_cast<int>(why)));
}

std::size_t get(const SpaceHandle& self, const Keys& keys, BlockSink& sink,
                const std::optional<Memory>& misses) {
  Channel& channel = self.use();
  const GilReleased released;
  Miss why = Miss::none;
  const std::size_t done = channel.get(*self.space, keys.span(), sink, why);
  if (misses) tell_misses(*misses, keys.count(), done, why);
  return done;
}

std::size_t get_into(const SpaceHandle& self, nb::handle keys_object, nb::handle out,
                     nb::handle stride, nb::handle offsets, nb::handle misses_object) {
  self.use();
  const Keys keys(keys_object, Keys::Hold::in_place);
  const Places places(out, Access::write, "out",
                      {keys.count(), self.space->block_bytes, stride, offsets});
  BufferSink sink(places, self.space->block_bytes);
  return get(self, keys, sink, misses_of(misses_object, keys.count()));
}

// One status byte per key.
template <typename Source>
nb::bytes put_from(const SpaceHandle& self, const Keys& keys, nb::handle parent_object,
                   nb::handle timeout_s, Source& source) {
  Channel& channel = self.use();
  Hash128 parent;
  if (!parent_object.is_none()) parent = one_key(parent_object, "parent");
  const PutCall call{*self.space, keys.span(), parent_object.is_none() ? nullptr : &parent,
                     deadline_after(timeout_s)};
  std::vector<PutStatus> statuses(keys.count());
  {
    const GilReleased released;
    channel.put(call, source, statuses.data());
  }
  return nb::bytes(statuses.data(), statuses.size());
}

nb::bytes put(const SpaceHandle& self, nb::handle keys_object, nb::handle data, nb::handle stride,
              nb::handle offsets, nb::handle parent, nb::handle timeout_s) {
  const Keys keys(keys_object, Keys::Hold::copied);
  const Places places(data, Access::read, "data",
                      {keys.count(), self.space->block_bytes, stride, offsets});
  BufferSource source(places, self.space->block_bytes);
  return put_from(self, keys, parent, timeout_s, source);
}

std::vector<std::int64_t> checked_pages(const SpaceHandle& self, const Layers& layers,
                                        nb::handle block_table, std::size_t keys) {
  const CopyPlan& plan = layers.plan();
  if (plan.block_bytes() != self.space->block_bytes)
    raise_bad_argument("a block of these layers takes " + std::to_string(plan.block_bytes()) +
                       " bytes; this namespace has blocks of " +
                       std::to_string(self.space->block_bytes));
  std::vector<std::int64_t> pages =
      integers(block_table, "block_table", keys * plan.pages_per_block());
  value_or_raise(plan.check_pages(pages));
  return pages;
}

nb::bytes save(const SpaceHandle& self, const Layers& layers, nb::handle block_table,
               nb::handle keys_object, nb::handle parent, nb::handle timeout_s) {
  const Keys keys(keys_object, Keys::Hold::copied);
  const auto pages = checked_pages(self, layers, block_table, keys.count());
  PagedSource source(layers.plan(), pages);
  return put_from(self, keys, parent, timeout_s, source);
}

std::size_t load(const SpaceHandle& self, const Layers& layers, nb::handle block_table,
                 nb::handle keys_object, nb::handle misses_object) {
  self.use();
  const Keys keys(keys_object, Keys::Hold::in_place);
  if (!layers.writable()) raise_bad_argument("a layer is read-only; load writes into all of them");
  const auto pages = checked_pages(self, layers, block_table, keys.count());
  PagedSink sink(layers.plan(), pages);
  return get(self, keys, sink, misses_of(misses_object, keys.count()));
}

std::size_t remove(const SpaceHandle& self, nb::handle keys_object) {
  Channel& channel = self.use();
  const Keys keys(keys_object, Keys::Hold::in_place);
  const GilReleased released;
  return channel.remove(*self.space, keys.span());
}

std::size_t wait(const SpaceHandle& self, nb::handle keys_object, nb::handle timeout_s) {
  Channel& channel = self.use();
  const Keys keys(keys_object, Keys::Hold::copied);
  const auto deadline = deadline_after(timeout_s);
  const GilReleased released;
  return channel.wait(*self.space, keys.span(), deadline);
}

}  // namespace

void bind_space(nb::module_& m) {
  nb::class_<Opened>(m, "OpenedSpace", "A namespace, as a channel has opened it.");
  nb::class_<SpaceHandle>(m, "Space", "One namespace of a pool. Thread-safe.")
      .def(
          "__init__",
          [](SpaceHandle* self, const Opened& opened) { new (self) SpaceHandle(opened.handle); },
          "opened"_a)
      .def_prop_ro("number", [](const SpaceHandle& s) { return s.space->number.load(); })
      .def_prop_ro("block_bytes", [](const SpaceHandle& s) { return s.space->block_bytes; })
      .def("count_present", &lookup, "keys"_a.none())
      .def(
          "get_into", &get_into, "keys"_a.none(), "out"_a.none(), "stride"_a = nb::none(),
          nb::kw_only(), "offsets"_a = nb::none(), "misses"_a = nb::none(),
          "Copy the leading blocks that are present into `out` and return how many there were.\n\n"
          "keys: n keys in chain order, packed (n * 16 bytes) or a list. out: one writable buffer\n"
          "with block i at i * stride bytes (stride: block_bytes unless given), a list of n\n"
          "buffers of block_bytes each, or a Region with one byte offset per key.\n"
          "Delivered blocks hold exactly the bytes that were put. What lies at the places of the\n"
          "others is undefined. A missing block is not an error. Heats what it delivers.\n"
          "misses: a writable buffer of n bytes that receives a Miss per block.\n"
          "Raises BadArgument for wrong sizes, PoolClosed. Thread-safe, releases the GIL, takes\n"
          "no lock; cost: one copy.")
      .def("put_codes", &put, "keys"_a.none(), "data"_a.none(), "stride"_a.none(),
           "offsets"_a.none(), "parent"_a.none(), "timeout_s"_a.none())
      .def("save_codes", &save, "layers"_a, "block_table"_a.none(), "keys"_a.none(),
           "parent"_a.none(), "timeout_s"_a.none())
      .def("load_pages", &load, "layers"_a, "block_table"_a.none(), "keys"_a.none(),
           "misses"_a.none())
      .def("wait_present", &wait, "keys"_a.none(), "timeout_s"_a.none())
      .def("view_blocks", &view_blocks, "keys"_a.none())
      .def("reserve_slot", &reserve_block, "key"_a.none(), "parent"_a.none(), "timeout_s"_a.none())
      .def("remove", &remove, "keys"_a.none(),
           "Take these keys out of the pool and return how many were there.\n\n"
           "Blocks that somebody views keep their bytes until released. Thread-safe, releases the\n"
           "GIL; O(n).");
}

}  // namespace kvpool
