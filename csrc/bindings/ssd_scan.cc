// A tier that no pool has open, for `kvpool ssd inspect` and `kvpool ssd verify`.
#include "tier/ssd_scan.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <memory>
#include <mutex>
#include <string>
#include <tuple>

#include "bindings/bind.h"
#include "bindings/gil.h"
#include "bindings/raise.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace kvpool {
namespace {

using Dict = nb::typed<nb::dict, nb::str, nb::any>;
using Dicts = nb::typed<nb::list, Dict>;

std::string hex(const std::uint8_t (&bytes)[16]) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::uint8_t byte : bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}
std::string hex(const Hash128& hash) {
  std::uint8_t bytes[16];
  hash.to_bytes(bytes);
  return hex(bytes);
}

class Scan {
 public:
  explicit Scan(const std::string& path) {
    const GilReleased released;
    auto opened = SsdScan::open(path);
    if (opened)
      scan_ = std::move(*opened);
    else
      error_ = std::make_unique<Error>(opened.error());
  }
  // Not in the constructor: nothing is thrown while the GIL is released.
  static Scan* open(const std::string& path) {
    auto scan = std::make_unique<Scan>(path);
    if (scan->error_ != nullptr) raise_error(*scan->error_);
    return scan.release();
  }

  Dict facts() {
    const std::lock_guard lock(mutex_);
    const SsdScanFacts& facts = use().facts();
    Dict out;
    out["format_version"] = facts.meta.version;
    out["tier_id"] = hex(facts.meta.tier_id);
    out["node_id"] = hex(facts.meta.node_id);
    out["capacity_bytes"] = facts.meta.capacity_bytes;
    out["payload_bytes_max"] = facts.meta.units * kUnitBytes;
    out["slab_file_bytes"] = facts.slab_file_bytes;
    out["index_bytes"] = facts.meta.index_bytes;
    out["index_used_bytes"] = facts.index_used_bytes;
    out["blocks_max"] = facts.entries_max;
    out["commits"] = facts.meta.groups;
    out["tau_s"] = facts.meta.tau_s;
    out["blocks"] = facts.blocks;
    out["bytes"] = facts.bytes;
    out["slot_bytes"] = facts.slot_bytes;
    out["missing_parents"] = facts.missing_parents;
    out["namespaces"] = spaces(facts);
    out["classes"] = classes(facts);
    return out;
  }

  Dicts ages(std::uint64_t now_s) {
    const std::lock_guard lock(mutex_);
    Dicts out;
    for (const SsdScanAge& age : use().ages(now_s)) {
      Dict row;
      row["seconds_max"] =
          age.seconds_max == 0 ? nb::none() : nb::object(nb::int_(age.seconds_max));
      row["blocks"] = age.blocks;
      row["bytes"] = age.bytes;
      row["heat"] = age.heat;
      out.append(row);
    }
    return out;
  }

  std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, bool> verify_some(std::size_t blocks) {
    SsdScan::Progress progress;
    bool done = false, is_closed = false;
    {
      const GilReleased released;
      const std::lock_guard lock(mutex_);
      is_closed = scan_ == nullptr;
      if (!is_closed) {
        scan_->verify_some(blocks);
        progress = scan_->progress();
        done = scan_->is_done();
      }
    }
    if (is_closed) raise_closed();
    return {progress.blocks, progress.bytes, progress.damaged, done};
  }

  Dicts damage() {
    const std::lock_guard lock(mutex_);
    Dicts out;
    for (const SsdDamage& each : use().damage()) {
      Dict row;
      row["kind"] = name_of(each.kind);
      row["namespace"] = hex(each.space_id);
      row["hash"] = hex(each.key.hash);
      row["offset"] = each.offset;
      row["bytes"] = each.bytes;
      out.append(row);
    }
    return out;
  }

  void close() {
    const GilReleased released;
    const std::lock_guard lock(mutex_);
    scan_.reset();
  }

 private:
  [[noreturn]] static void raise_closed() { throw Raised("PoolClosed", "this scan is closed"); }
  SsdScan& use() {
    if (scan_ == nullptr) raise_closed();
    return *scan_;
  }

  static Dicts spaces(const SsdScanFacts& facts) {
    Dicts out;
    for (const SsdScanFacts::Space& each : facts.spaces) {
      Dict row;
      row["id"] = hex(each.space.id);
      row["block_bytes"] = each.space.block_bytes;
      row["blocks"] = each.blocks;
      row["bytes"] = each.bytes;
      out.append(row);
    }
    return out;
  }
  static Dicts classes(const SsdScanFacts& facts) {
    Dicts out;
    for (const SsdScanFacts::Class& each : facts.classes) {
      Dict row;
      row["slot_bytes"] = each.size.slot_bytes;
      row["slab_bytes"] = each.size.slab_units * kUnitBytes;
      row["slabs"] = each.slabs;
      row["blocks"] = each.blocks;
      out.append(row);
    }
    return out;
  }

  // Held without the GIL by verify_some(): whoever waits for it with the GIL waits a step of it.
  std::mutex mutex_;
  std::unique_ptr<SsdScan> scan_;
  std::unique_ptr<Error> error_;
};

}  // namespace

void bind_ssd_scan(nb::module_& m) {
  nb::class_<Scan>(m, "SsdScan",
                   "A tier directory that no pool has open; see kvpool.ssd.\n\n"
                   "Locks it until close(). Raises TierRefused when it is in use, damaged or no "
                   "tier. Releases\n"
                   "the GIL; about 1.5 s and 96 MB for 1,000,000 blocks.")
      .def(nb::new_(&Scan::open), "path"_a)
      .def("facts", &Scan::facts, "What the index says, and what was counted from it.")
      .def("ages", &Scan::ages, "now_s"_a,
           "Blocks, bytes and heat by seconds since the last use. O(blocks).")
      .def("verify_some", &Scan::verify_some, "blocks"_a,
           "Reads and checks so many more blocks: (blocks done, bytes done, damaged, all done).\n\n"
           "Releases the GIL.")
      .def("damage", &Scan::damage, "What was found, the first 1,000 of it.")
      .def("close", &Scan::close, "Gives the directory back. Again does nothing.");
}

}  // namespace kvpool
