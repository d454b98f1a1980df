// Looks at a tier that nobody has open: what its index says, and whether its blocks are whole.
//
// Promises:  1. nothing of the tier is changed (the lock file is, which names this process);
//            2. a tier that a process has open is refused, and while a scan stands no process can
//               open the tier;
//            3. whatever the files hold, the answer is a refusal or a list of damage: no number
//               in them is trusted;
//            4. every block of the index is read once, in the order of the slab file.
// Costs: 96 bytes of memory a block. Opening 1,000,000 blocks takes 1.5 s of one core.
// Thread rule: one thread at a time.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "tier/ssd.h"

namespace kvpool {

struct SsdScanFacts {
  TierMeta meta;
  std::uint64_t slab_file_bytes = 0;
  std::uint64_t index_used_bytes = 0;
  std::uint64_t entries_max = 0;      // what surely fits into the index
  std::uint64_t blocks = 0;           // entries of the index, damaged ones included
  std::uint64_t bytes = 0;            // of payload
  std::uint64_t slot_bytes = 0;       // the same in whole pages
  std::uint64_t missing_parents = 0;  // blocks whose parent is not in the tier; no damage
  // By number.
  struct Space {
    SsdSpace space;
    std::uint64_t blocks = 0, bytes = 0;
  };
  std::vector<Space> spaces;
  struct Class {
    SsdClass size;
    std::uint64_t slabs = 0, blocks = 0;
  };
  std::vector<Class> classes;
};

// Blocks by the time of their last use. The last bucket has no limit.
struct SsdScanAge {
  std::uint64_t seconds_max = 0;  // 0 = none
  std::uint64_t blocks = 0, bytes = 0;
  double heat = 0;  // of all of them together, as of now
};

struct SsdDamage {
  enum class Kind : std::uint8_t {
    entry,       // the entry's own check is wrong
    space,       // of a namespace that the index does not know
    outside,     // its place is not in the slab file, or in no slab of its size
    overlap,     // another entry has a part of its place
    payload,     // what was read is not what was written
    unreadable,  // the device gave no bytes, or less
  };
  Kind kind = Kind::entry;
  BlockKey key;
  Hash128 space_id;          // zero when not known
  std::uint64_t offset = 0;  // in the slab file
  std::uint64_t bytes = 0;
};
const char* name_of(SsdDamage::Kind kind);

class SsdScan {
 public:
  static constexpr std::size_t kDamageMax = 1000;  // that are told one by one

  static Result<std::unique_ptr<SsdScan>> open(const std::string& path);
  ~SsdScan();
  SsdScan(const SsdScan&) = delete;
  SsdScan& operator=(const SsdScan&) = delete;

  const SsdScanFacts& facts() const;
  std::vector<SsdScanAge> ages(std::uint64_t now_s) const;  // seconds since 1970

  // Reads the next so many blocks. Those whose entry is damaged are found at open(), count as done,
  // and are not read.
  void verify_some(std::size_t blocks);
  struct Progress {
    std::uint64_t blocks = 0, bytes = 0;  // done
    std::uint64_t damaged = 0;            // of them
  };
  Progress progress() const;
  bool is_done() const;
  // At most kDamageMax; those of the index come first.
  const std::vector<SsdDamage>& damage() const;

 private:
  struct Parts;
  explicit SsdScan(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

}  // namespace kvpool
