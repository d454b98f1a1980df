// The directory of a tier: who has it, what lies in it, and what a format leaves when it fails.
//
// Promises:  1. of all processes, and of all opens in one process, one has the directory; a child
//               made by fork() shares that claim until it ends or the owner gives it up;
//            2. nothing is made in, or taken from, a directory that holds anything but our files
//               (the lost+found of a filesystem is nobody's);
//            3. unless keep() was called, what this claim made is gone when it ends: the files of
//               a format, the lock, the directory;
//            4. a format that was cut off, by kill or power, is known by its mark and is started
//               over; nothing can have been stored in it.
// Thread rule: one thread.
#pragma once
#include <memory>
#include <string>

#include "base/status.h"
#include "tier/descriptor.h"

namespace kvpool {

inline constexpr const char* kIndexFileName = "index.mdb";
inline constexpr const char* kIndexLockFileName = "index.mdb-lock";
inline constexpr const char* kTierLockFileName = "lock";
inline constexpr const char* kFormatMarkName = "formatting";

class SsdDirectory {
 public:
  // Makes the directory if only its last level is missing. The lock file holds the number of the
  // process that has it, for the message to the next one.
  static Result<std::unique_ptr<SsdDirectory>> claim(const std::string& path);
  ~SsdDirectory();
  SsdDirectory(const SsdDirectory&) = delete;
  SsdDirectory& operator=(const SsdDirectory&) = delete;

  enum class Content {
    nothing,  // to be formatted, what a cut-off format left included
    tier,     // slab file and index
  };
  Result<Content> content() const;

  // Takes away what a cut-off format left, and marks that one is under way.
  Result<void> start_format();
  Result<void> end_format();
  void keep() { kept_ = true; }

  int descriptor() const { return directory_.get(); }
  std::string index_path() const { return path_ + "/" + kIndexFileName; }

 private:
  explicit SsdDirectory(const std::string& path) : path_(path) {}
  Result<void> make_and_open();
  Result<bool> lock();  // false: the lock file was replaced meanwhile
  void remove_files();

  std::string path_;
  Descriptor directory_, lock_;
  bool made_directory_ = false, made_lock_ = false, formatting_ = false, kept_ = false;
};

}  // namespace kvpool
