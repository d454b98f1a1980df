#include "tier/index_store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string_view>
#include <utility>

#include "block/checksum.h"
#include "tier/descriptor.h"
#include "tier/index_check.h"
#include "tier/index_parts.h"

namespace kvpool {
namespace {

constexpr std::uint64_t kIndexPageBytes = 4096;
constexpr unsigned kReadersMax = 126;
constexpr off_t kLockBytes = 8192;  // as large as LMDB makes it for that many readers
constexpr const char* kLockSuffix = "-lock";
constexpr MDB_dbi kDatabasesMax = 8;
constexpr std::string_view kFile = "index file: ";
constexpr const char* kRemedy = "; moving the directory away or removing it starts an empty tier";

Error refused(const std::string& what) {
  return {Code::refused, std::string(kFile) + what + kRemedy};
}

Hash128 sum_of(const TierMeta& meta) { return checksum(&meta, offsetof(TierMeta, sum)); }

// Why a record of meta cannot be used; empty = it can.
std::string flaw_of(const MDB_val& value, TierMeta& meta) {
  // Of another version even the size may differ, but where magic and version lie is for ever.
  constexpr std::size_t kHeadBytes = offsetof(TierMeta, align_bytes);
  if (value.mv_size < kHeadBytes) return "is damaged: its meta record is cut short";
  std::memcpy(static_cast<void*>(&meta), value.mv_data, kHeadBytes);
  if (meta.magic != kSsdMagic) return "is not the index of a kvpool tier";
  if (meta.version != kSsdFormatVersion)
    return "has format version " + std::to_string(meta.version) + "; this kvpool reads version " +
           std::to_string(kSsdFormatVersion);
  if (!copy_out(value, meta) || meta.sum != sum_of(meta))
    return "is damaged: its meta record has a wrong checksum";
  return "";
}

// The environment on an existing file; nothing of it has been read by us yet.
int open_environment(IndexStore::Parts& parts, std::uint64_t map_bytes, unsigned flags);

}  // namespace

void seal(TierMeta& meta) { meta.sum = sum_of(meta); }

SpaceRecord space_record(const SsdSpace& space) {
  SpaceRecord record{space.id, space.block_bytes, 0};
  ChecksumStream stream;
  stream.update(&space.number, sizeof(space.number));
  stream.update(&record, offsetof(SpaceRecord, check));
  record.check = stream.digest().low;
  return record;
}

std::uint32_t entry_check(const BlockKey& key, const BlockEntry& entry) {
  struct {
    BlockKey key;
    std::byte entry[offsetof(BlockEntry, check)];
  } checked;
  static_assert(sizeof(checked) == 80);
  checked.key = key;
  std::memcpy(checked.entry, &entry, sizeof(checked.entry));
  return static_cast<std::uint32_t>(checksum(&checked, sizeof(checked)).low);
}

Error IndexStore::Parts::error(int code, const std::string& doing) const {
  const std::string message = std::string(kFile) + doing + ": " + mdb_strerror(code);
  switch (code) {
    case EACCES:
    case EPERM:
    case EROFS:
    case ENOENT:
      return {Code::refused, message};
    case MDB_MAP_FULL:
      return {Code::no_resource, message};
    default:
      return code > 0 ? Error{Code::no_resource, message} : Error{Code::refused, message + kRemedy};
  }
}

// --- sizes ---------------------------------------------------------------------------------------

std::uint64_t IndexStore::bytes_for(std::uint64_t capacity_bytes) {
  const std::uint64_t base =
      std::clamp<std::uint64_t>(capacity_bytes / 8, kBytesMin / 4, kBytesMin);
  const std::uint64_t bytes = base + capacity_bytes / 64;
  return (bytes + kIndexPageBytes - 1) / kIndexPageBytes * kIndexPageBytes;
}

std::uint64_t IndexStore::entries_max(std::uint64_t index_bytes) {
  // Bytes of index per entry at worst. LMDB joins a leaf with its neighbour only when less than a
  // quarter of it is used: 11 entries of 94 bytes each stay behind when a namespace cools down.
  // The rest is for branches.
  constexpr std::uint64_t kEntryBytes = 400;
  // Pages that are in the way besides: those the last transaction has freed, which the next one
  // may not use yet, and those that the next one writes; each at most one leaf and its share of
  // branches and free list a change, and never more than there are.
  constexpr std::uint64_t kTransactionBytes = (kChangesMax + kChangesMax / 8) * kIndexPageBytes;
  constexpr std::uint64_t kFixedBytes = 64 * kIndexPageBytes;  // roots, meta, classes
  if (index_bytes <= kFixedBytes) return 0;
  const std::uint64_t bytes = index_bytes - kFixedBytes;
  const std::uint64_t large = bytes > 3 * kTransactionBytes ? bytes - 2 * kTransactionBytes : 0;
  return std::max(bytes / 3, large) / kEntryBytes;
}

// --- opening -------------------------------------------------------------------------------------

namespace {

// LMDB makes its lock file with a hole in it and writes there through a map: on a full disk that
// would end the process with SIGBUS.
int take_lock_room(const std::string& path) {
  const Descriptor file(
      ::open((path + kLockSuffix).c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
  return file.is_open() ? posix_fallocate(file.get(), 0, kLockBytes) : errno;
}

int open_environment(IndexStore::Parts& parts, std::uint64_t map_bytes, unsigned flags) {
  if ((flags & MDB_NOLOCK) == 0)
    if (const int code = take_lock_room(parts.path)) return code;
  if (const int code = mdb_env_create(&parts.env)) return code;
  if (const int code = mdb_env_set_mapsize(parts.env, map_bytes)) return code;
  if (const int code = mdb_env_set_maxreaders(parts.env, kReadersMax)) return code;
  if (const int code = mdb_env_set_maxdbs(parts.env, kDatabasesMax)) return code;
  return mdb_env_open(parts.env, parts.path.c_str(), flags, 0600);
}

unsigned flags_of(bool relaxed) {
  return MDB_NOSUBDIR | MDB_NOTLS | (relaxed ? MDB_NOMETASYNC : 0u);
}

int open_databases(IndexStore::Parts& parts, MDB_txn* txn, unsigned flags) {
  const std::pair<const char*, MDB_dbi*> databases[] = {{"meta", &parts.meta_db},
                                                        {"spaces", &parts.spaces_db},
                                                        {"classes", &parts.classes_db},
                                                        {"blocks", &parts.blocks_db}};
  for (const auto& [name, db] : databases)
    if (const int code = mdb_dbi_open(txn, name, flags, db)) return code;
  return 0;
}

// A file with nothing in it but the record.
Result<void> format(IndexStore::Parts& parts, int fd, bool relaxed) {
  const auto failed = [&](int code) { return std::unexpected(parts.error(code, "cannot format")); };
  if (const int code = open_environment(parts, parts.meta.index_bytes, flags_of(relaxed)))
    return failed(code);
  // Only now: LMDB would take a file that has bytes for one with pages.
  if (const int code = posix_fallocate(fd, 0, static_cast<off_t>(parts.meta.index_bytes)))
    return failed(code);
  IndexTxn txn(parts.env, 0);
  if (txn.begin_code() != 0) return failed(txn.begin_code());
  if (const int code = open_databases(parts, txn, MDB_CREATE)) return failed(code);
  seal(parts.meta);
  if (const int code = put(txn, parts.meta_db, value_of(kMetaKey), parts.meta)) return failed(code);
  if (const int code = txn.commit()) return failed(code);
  if (const int code = mdb_env_sync(parts.env, 1)) return failed(code);
  return {};
}

Result<void> read_meta(IndexStore::Parts& parts) {
  IndexTxn txn(parts.env, MDB_RDONLY);
  if (txn.begin_code() != 0)
    return std::unexpected(parts.error(txn.begin_code(), "cannot be read"));
  const int opened = open_databases(parts, txn, 0);
  if (opened == MDB_NOTFOUND || opened == MDB_INCOMPATIBLE)
    return std::unexpected(refused("is not the index of a kvpool tier"));
  if (opened != 0) return std::unexpected(parts.error(opened, "cannot be read"));
  MDB_val key = value_of(kMetaKey), value;
  if (const int code = mdb_get(txn, parts.meta_db, &key, &value))
    return std::unexpected(parts.error(code, "its meta record cannot be read"));
  const std::string flaw = flaw_of(value, parts.meta);
  if (!flaw.empty()) return std::unexpected(refused(flaw));
  txn.commit();  // keeps the handles of the databases
  return {};
}

}  // namespace

Result<std::unique_ptr<IndexStore>> IndexStore::create(const std::string& path,
                                                       const TierMeta& meta, bool relaxed) {
  auto parts = std::make_unique<Parts>();
  parts->path = path;
  parts->meta = meta;
  if (meta.index_bytes % kIndexPageBytes != 0 || entries_max(meta.index_bytes) == 0)
    return fail(Code::bad_argument, "an index of " + std::to_string(meta.index_bytes) +
                                        " bytes is too small, or not in whole pages");
  const Descriptor file(
      ::open(path.c_str(), O_CREAT | O_EXCL | O_RDWR | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!file.is_open()) return std::unexpected(parts->error(errno, "cannot be created"));
  if (const auto formatted = format(*parts, file.get(), relaxed); !formatted) {
    parts.reset();
    ::unlink(path.c_str());
    ::unlink((path + kLockSuffix).c_str());
    return std::unexpected(formatted.error());
  }
  parts->refresh_figures(0);
  return std::unique_ptr<IndexStore>(new IndexStore(std::move(parts)));
}

Result<std::unique_ptr<IndexStore>> IndexStore::open(const std::string& path, bool relaxed,
                                                     Access access) {
  auto parts = std::make_unique<Parts>();
  parts->path = path;
  const bool writes = access == Access::write;
  const Descriptor file(
      ::open(path.c_str(), (writes ? O_RDWR : O_RDONLY) | O_NOFOLLOW | O_CLOEXEC));
  if (!file.is_open()) return std::unexpected(parts->error(errno, "cannot be opened"));
  struct stat status;
  if (::fstat(file.get(), &status) != 0)
    return std::unexpected(parts->error(errno, "cannot be opened"));
  if (const auto checked = check_index(file.get()); !checked) {
    if (checked.error().code == Code::refused)
      return std::unexpected(refused(checked.error().message));
    return fail(checked.error().code, std::string(kFile) + checked.error().message);
  }
  const auto bytes = static_cast<std::uint64_t>(status.st_size) / kIndexPageBytes * kIndexPageBytes;

  // Read-only needs no lock of LMDB's: the directory is locked, and nothing in it is touched.
  const unsigned flags = writes ? flags_of(relaxed) : flags_of(false) | MDB_RDONLY | MDB_NOLOCK;
  if (const int code = open_environment(*parts, bytes, flags))
    return std::unexpected(parts->error(code, "cannot be opened"));
  if (writes) {
    mdb_reader_check(parts->env, nullptr);
    // The last commit may still be in the page cache: with `relaxed`, or of a process that was
    // killed in it. It leaves slots free that the one before it has blocks in; they are written
    // soon, and a power cut that took it back would leave those entries with other bytes.
    if (const int code = mdb_env_sync(parts->env, 1))
      return std::unexpected(parts->error(code, "cannot be flushed"));
  }
  if (const auto read = read_meta(*parts); !read) return std::unexpected(read.error());
  if (bytes < parts->meta.index_bytes)
    return std::unexpected(refused("is cut short: it has " + std::to_string(bytes) + " bytes of " +
                                   std::to_string(parts->meta.index_bytes)));
  // Larger: a growth was under way when the process ended.
  parts->meta.index_bytes = bytes;
  // What was copied by a tool that leaves holes gets its room back before anything relies on it.
  if (writes)
    if (const int code = posix_fallocate(file.get(), 0, static_cast<off_t>(bytes)))
      return std::unexpected(parts->error(code, "cannot get its full size on the disk"));
  parts->refresh_figures(0);
  return std::unique_ptr<IndexStore>(new IndexStore(std::move(parts)));
}

IndexStore::IndexStore(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}

// With `relaxed` a process that ends in peace leaves nothing that the power could take.
IndexStore::~IndexStore() {
  unsigned flags = 0;
  if (!is_broken() && mdb_env_get_flags(parts_->env, &flags) == 0 && (flags & MDB_NOMETASYNC) != 0)
    (void)mdb_env_sync(parts_->env, 1);
}

// --- reading -------------------------------------------------------------------------------------

namespace {

// Every record of a database, in order; stops at an answer other than 0.
template <typename Record>
int for_each_record(const IndexStore::Parts& parts, MDB_dbi db, const Record& record) {
  IndexTxn txn(parts.env, MDB_RDONLY);
  if (txn.begin_code() != 0) return txn.begin_code();
  MDB_cursor* cursor = nullptr;
  if (const int code = mdb_cursor_open(txn, db, &cursor)) return code;
  MDB_val key, value;
  int code = mdb_cursor_get(cursor, &key, &value, MDB_FIRST);
  while (code == 0) {
    code = record(key, value);
    if (code == 0) code = mdb_cursor_get(cursor, &key, &value, MDB_NEXT);
  }
  mdb_cursor_close(cursor);
  return code == MDB_NOTFOUND ? 0 : code;
}

bool is_sane_place(const BlockEntry& entry, std::uint64_t units) {
  if (entry.bytes == 0 || entry.slab_unit >= units) return false;
  const std::uint64_t slots =
      (units - entry.slab_unit) * kUnitBytes / SlabPool::slot_bytes(entry.bytes);
  return entry.slot < slots;
}

}  // namespace

const TierMeta& IndexStore::meta() const { return parts_->meta; }

std::vector<SsdSpace> IndexStore::spaces() const {
  std::vector<SsdSpace> spaces;
  for_each_record(*parts_, parts_->spaces_db, [&](const MDB_val& key, const MDB_val& value) {
    SsdSpace space;
    SpaceRecord record;
    if (!copy_out(key, space.number) || !copy_out(value, record)) return 0;
    space.id = record.id;
    space.block_bytes = record.block_bytes;
    if (space_record(space).check == record.check) spaces.push_back(space);
    return 0;
  });
  return spaces;
}

std::vector<SsdClass> IndexStore::classes() const {
  std::vector<SsdClass> classes;
  for_each_record(*parts_, parts_->classes_db, [&](const MDB_val& key, const MDB_val& value) {
    SsdClass each;
    if (copy_out(key, each.slot_bytes) && copy_out(value, each.slab_units)) classes.push_back(each);
    return 0;
  });
  return classes;
}

Result<void> IndexStore::for_each_entry(const Visit& visit) const {
  const int code =
      for_each_record(*parts_, parts_->blocks_db, [&](const MDB_val& key, const MDB_val& value) {
        BlockKey block;
        BlockEntry entry;
        if (!copy_out(key, block) || !copy_out(value, entry)) return MDB_CORRUPTED;
        visit(block, entry,
              entry.check == entry_check(block, entry) && is_sane_place(entry, parts_->meta.units));
        return 0;
      });
  if (code != 0) return std::unexpected(parts_->error(code, "its entries cannot be read"));
  return {};
}

bool IndexStore::is_broken() const { return parts_->is_broken; }

bool IndexStore::sync() { return !parts_->is_broken && mdb_env_sync(parts_->env, 1) == 0; }
std::uint64_t IndexStore::used_bytes() const { return parts_->used_bytes; }
std::uint64_t IndexStore::written_bytes() const { return parts_->written_bytes; }
std::uint64_t IndexStore::entries() const { return parts_->entries; }

namespace {

constexpr MDB_dbi kFreeDb = 0, kMainDb = 1;

// As long as no later transaction has used them up.
std::uint64_t pages_freed_by(MDB_txn* txn, std::size_t id) {
  MDB_cursor* cursor = nullptr;  // mdb_get() does not show the free list
  if (mdb_cursor_open(txn, kFreeDb, &cursor) != 0) return 0;
  MDB_val key = value_of(id), value{};
  std::uint64_t count = 0;
  if (mdb_cursor_get(cursor, &key, &value, MDB_SET) == 0 && value.mv_size >= sizeof(count))
    std::memcpy(&count, value.mv_data, sizeof(count));
  mdb_cursor_close(cursor);
  return count;
}

}  // namespace

void IndexStore::Parts::refresh_figures(std::size_t committed) {
  IndexTxn txn(env, MDB_RDONLY);
  if (txn.begin_code() != 0) return;
  std::uint64_t pages = 2;
  for (const MDB_dbi db : {kFreeDb, kMainDb, meta_db, spaces_db, classes_db, blocks_db}) {
    MDB_stat stat;
    if (mdb_stat(txn, db, &stat) != 0) return;
    pages += stat.ms_branch_pages + stat.ms_leaf_pages + stat.ms_overflow_pages;
    if (db == blocks_db) entries = stat.ms_entries;
  }
  if (committed != 0) {
    // Every page that was written is new, or stands for one that was freed in its favour.
    const std::uint64_t freed = pages_freed_by(txn, committed);
    const std::uint64_t before = used_bytes / kIndexPageBytes;
    const std::uint64_t written = pages + freed > before ? pages + freed - before : 0;
    written_bytes += (written + 1) * kIndexPageBytes;  // and the meta page
  }
  used_bytes = pages * kIndexPageBytes;
}

}  // namespace kvpool
