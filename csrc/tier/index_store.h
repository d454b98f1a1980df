// The only code that knows LMDB. One environment, one file, fully preallocated.
//
// Flags are MDB_NOSUBDIR | MDB_NOTLS, and MDB_NOMETASYNC for `relaxed`; nothing that trades safety
// for speed. A read transaction lives no longer than one call. LMDB trusts its file, so open()
// looks at every page first (tier/index_check.h).
//
// Promises:  1. apply() is all or nothing, and after true survives power loss (but for `relaxed`:
//               the last one may be lost, whole);
//            2. with at most entries_max() entries and spaces together, and kChangesMax changes in
//               a call, the map never fills up, deletes included;
//            3. what cannot be trusted is refused or left out, never served: every record carries
//               a check of itself.
// Thread rule: apply(), grow() from one thread; the others before the first of these.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "tier/ssd.h"
#include "tier/ssd_format.h"

namespace kvpool {

// BlockEntry::check as it must be.
std::uint32_t entry_check(const BlockKey& key, const BlockEntry& entry);

class IndexStore {
 public:
  static constexpr std::size_t kChangesMax = 4096;  // of one group: blocks, stamps, spaces
  static constexpr std::uint64_t kBytesMin = 4 << 20;

  // Bytes of index for a tier of that many bytes in all, and what surely fits into so many.
  static std::uint64_t bytes_for(std::uint64_t capacity_bytes);
  static std::uint64_t entries_max(std::uint64_t index_bytes);

  // A new file with this meta record. The path must not exist. meta.index_bytes is its size.
  static Result<std::unique_ptr<IndexStore>> create(const std::string& path, const TierMeta& meta,
                                                    bool relaxed);
  // Code::refused for a file that is damaged, foreign, or of another version, saying which.
  enum class Access : std::uint8_t { write, read_only };
  static Result<std::unique_ptr<IndexStore>> open(const std::string& path, bool relaxed,
                                                  Access access);
  ~IndexStore();
  IndexStore(const IndexStore&) = delete;
  IndexStore& operator=(const IndexStore&) = delete;

  const TierMeta& meta() const;  // as last committed
  std::vector<SsdSpace> spaces() const;
  std::vector<SsdClass> classes() const;
  // `check_holds`: the entry's own check and a sane place; false = not to be trusted.
  using Visit = std::function<void(const BlockKey&, const BlockEntry&, bool check_holds)>;
  Result<void> for_each_entry(const Visit& visit) const;

  // Writes only what group.writes[i].written says is in the slab file. `also_delete`: keys whose
  // entries go whatever they hold. Sets meta.groups + 1, next_space past every new space, tau.
  // An error means that nothing of it is in the index, or (said by is_broken()) that LMDB does not
  // know: then nothing may be written any more.
  Result<void> apply(const SsdGroup& group, const std::vector<BlockKey>& also_delete);
  bool is_broken() const;
  // `relaxed`: the last commit survives power loss too from here on. False: the device said no.
  bool sync();

  // A larger file; new capacity and units are recorded in the same commit. Smaller is never given.
  Result<void> grow(std::uint64_t index_bytes, std::uint64_t capacity_bytes, std::uint64_t units);

  std::uint64_t used_bytes() const;     // pages in use
  std::uint64_t written_bytes() const;  // pages that commits have written, since open
  std::uint64_t entries() const;

  struct Parts;  // tier/index_parts.h

 private:
  explicit IndexStore(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

}  // namespace kvpool
