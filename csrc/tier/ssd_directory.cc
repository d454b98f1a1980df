#include "tier/ssd_directory.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "tier/slab_file.h"

namespace kvpool {
namespace {

constexpr int kClaimsMax = 16;
constexpr const char* kFormatFiles[] = {kSlabFileName, kIndexFileName, kIndexLockFileName};

// Empty when the lock file does not say.
std::string owner_of(int lock) {
  char text[16] = {};
  const ssize_t bytes = pread(lock, text, sizeof text - 1, 0);
  const long owner = bytes > 0 ? std::strtol(text, nullptr, 10) : 0;
  if (owner <= 0) return {};
  return owner == getpid() ? " (this one, " + std::to_string(owner) + ")"
                           : " (" + std::to_string(owner) + ")";
}

bool is_named(int directory, const char* name) {
  struct stat facts{};
  return fstatat(directory, name, &facts, AT_SYMLINK_NOFOLLOW) == 0;
}

// The first name that is not ours; empty = none.
Result<std::string> foreign_name(int directory) {
  const int again = openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* const listing = again >= 0 ? fdopendir(again) : nullptr;
  if (listing == nullptr) return fail_for(errno, "cannot be listed");
  std::string found;
  while (const dirent* entry = readdir(listing)) {
    const std::string_view name = entry->d_name;
    const bool is_ours = name == "." || name == ".." || name == "lost+found" ||
                         name == kTierLockFileName || name == kFormatMarkName ||
                         std::ranges::find(kFormatFiles, name) != std::end(kFormatFiles);
    if (!is_ours) found = name;
  }
  closedir(listing);
  return found;
}

}  // namespace

Result<std::unique_ptr<SsdDirectory>> SsdDirectory::claim(const std::string& path) {
  if (path.empty()) return fail(Code::bad_argument, "no directory is named");
  std::unique_ptr<SsdDirectory> directory(new SsdDirectory(path));
  if (auto done = directory->make_and_open(); !done) return std::unexpected(done.error());
  for (int tries = 0; tries < kClaimsMax; ++tries) {
    auto locked = directory->lock();
    if (!locked) return std::unexpected(locked.error());
    if (*locked) return directory;
  }
  return fail(Code::refused, "other processes make and remove its lock file all the time");
}

Result<void> SsdDirectory::make_and_open() {
  if (mkdir(path_.c_str(), 0700) == 0)
    made_directory_ = true;
  else if (errno == ENOENT)
    return fail(Code::bad_argument, "the directory above it does not exist");
  else if (errno != EEXIST)
    return fail_for(errno, "cannot be made");
  directory_ = Descriptor(open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (directory_.is_open()) return {};
  return fail_for(errno, errno == ENOTDIR ? "is not a directory" : "cannot be opened");
}

Result<bool> SsdDirectory::lock() {
  const int flags = O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC;
  Descriptor file(openat(directory_.get(), kTierLockFileName, flags | O_EXCL, 0600));
  const bool made = file.is_open();
  if (!made && errno == EEXIST)
    file = Descriptor(openat(directory_.get(), kTierLockFileName, flags, 0600));
  if (!file.is_open())
    return fail_for(errno, errno == ELOOP ? "its lock file is a symbolic link"
                                          : "its lock file cannot be opened");
  while (flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno == EWOULDBLOCK)
      return fail(Code::refused, "another process" + owner_of(file.get()) +
                                     " has it open; close it there, or name another directory");
    return fail_for(errno, "cannot be locked");
  }
  // The holder before may have removed the file after we opened it: that lock protects nothing.
  struct stat locked{}, named{};
  if (fstat(file.get(), &locked) != 0 ||
      fstatat(directory_.get(), kTierLockFileName, &named, AT_SYMLINK_NOFOLLOW) != 0 ||
      locked.st_ino != named.st_ino || locked.st_dev != named.st_dev)
    return false;
  lock_ = std::move(file);
  made_lock_ = made;
  // For a message only: that it cannot be written on a full disk hurts nothing.
  const std::string owner = std::to_string(getpid()) + "\n";
  if (ftruncate(lock_.get(), 0) == 0) (void)!pwrite(lock_.get(), owner.data(), owner.size(), 0);
  return true;
}

Result<SsdDirectory::Content> SsdDirectory::content() const {
  const int directory = directory_.get();
  for (const char* name : kFormatFiles) {
    struct stat facts{};
    if (fstatat(directory, name, &facts, AT_SYMLINK_NOFOLLOW) == 0 && !S_ISREG(facts.st_mode))
      return fail(Code::refused, std::string(name) + " in it is not an ordinary file");
  }
  const bool has_slabs = is_named(directory, kSlabFileName);
  const bool has_index = is_named(directory, kIndexFileName);
  if (is_named(directory, kFormatMarkName)) return Content::nothing;
  if (has_slabs && has_index) return Content::tier;
  if (has_slabs)
    return fail(Code::refused,
                "holds a slab file but no index.mdb, without which nobody knows "
                "what lies in it; put the index back, or empty the directory");
  if (has_index)
    return fail(Code::refused,
                "holds an index.mdb but no slab file, which had the blocks; put "
                "it back, or empty the directory");
  auto foreign = foreign_name(directory);
  if (!foreign) return std::unexpected(foreign.error());
  if (!foreign->empty())
    return fail(Code::refused, "holds other files (" + *foreign +
                                   ") and no tier of kvpool; name an empty directory");
  return Content::nothing;
}

Result<void> SsdDirectory::start_format() {
  remove_files();
  formatting_ = true;
  const Descriptor mark(
      openat(directory_.get(), kFormatMarkName, O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!mark.is_open() || fsync(directory_.get()) != 0)
    return fail_for(errno, "no file can be made in it");
  return {};
}

Result<void> SsdDirectory::end_format() {
  // The files' names must be on the device before the mark may be missing there.
  if (fsync(directory_.get()) != 0) return fail_for(errno, "cannot be synced");
  if (made_directory_) {
    const Descriptor above(openat(directory_.get(), "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (above.is_open() && fsync(above.get()) != 0)
      return fail_for(errno, "the directory above it cannot be synced");
  }
  if (unlinkat(directory_.get(), kFormatMarkName, 0) != 0 || fsync(directory_.get()) != 0)
    return fail_for(errno, "the mark of an unfinished format cannot be removed");
  formatting_ = false;
  return {};
}

void SsdDirectory::remove_files() {
  for (const char* name : kFormatFiles) unlinkat(directory_.get(), name, 0);
}

SsdDirectory::~SsdDirectory() {
  if (!kept_ && formatting_) {
    remove_files();
    unlinkat(directory_.get(), kFormatMarkName, 0);
  }
  if (!kept_ && made_lock_) unlinkat(directory_.get(), kTierLockFileName, 0);
  // Closing would leave the lock to a forked child that still has the descriptor.
  if (lock_.is_open()) flock(lock_.get(), LOCK_UN);
  if (!kept_ && made_directory_) rmdir(path_.c_str());
}

}  // namespace kvpool
