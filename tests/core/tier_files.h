// What the tests of the tiers share: real directories, pages, and ways to look at files.
#pragma once
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "block_random.h"
#include "tier/tier.h"

namespace kvpool::test {

// A directory that is gone with its content when the test ends. `above` must exist.
class TempDirectory {
 public:
  explicit TempDirectory(const std::string& above = std::filesystem::temp_directory_path()) {
    std::string name = above + "/kvpool-test-XXXXXX";
    REQUIRE(mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~TempDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// Whole pages, at a page's start, of bytes that a seed makes. Copies share them.
class Pages {
 public:
  explicit Pages(std::size_t bytes) : bytes_(bytes) {
    REQUIRE(bytes % kSlotAlignBytes == 0);
    at_.reset(static_cast<std::byte*>(std::aligned_alloc(kSlotAlignBytes, bytes)), Free{});
    REQUIRE(at_ != nullptr);
    std::memset(at_.get(), 0, bytes);
  }
  Pages(std::size_t bytes, std::uint64_t seed) : Pages(bytes) {
    for (std::size_t at = 0; at < bytes; at += 8) {
      const std::uint64_t word = mix64(seed * 0x9e37'79b9'7f4a'7c15 + at + 1);
      std::memcpy(at_.get() + at, &word, 8);
    }
  }
  std::byte* data() const { return at_.get(); }
  std::size_t size() const { return bytes_; }
  bool operator==(const Pages& other) const {
    return bytes_ == other.bytes_ && std::memcmp(data(), other.data(), bytes_) == 0;
  }

 private:
  struct Free {
    void operator()(std::byte* at) const { std::free(at); }
  };
  std::size_t bytes_;
  std::shared_ptr<std::byte> at_;
};

// Changes bytes of a file behind the back of whoever has it.
inline void overwrite(const std::string& path, std::uint64_t offset, const void* bytes,
                      std::size_t count) {
  const int file = open(path.c_str(), O_WRONLY | O_CLOEXEC);
  REQUIRE(file >= 0);
  REQUIRE(pwrite(file, bytes, count, static_cast<off_t>(offset)) == static_cast<ssize_t>(count));
  close(file);
}

inline struct stat stat_of(const std::string& path) {
  struct stat facts{};
  REQUIRE(stat(path.c_str(), &facts) == 0);
  return facts;
}

inline std::size_t files_in(const std::string& path) {
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(path)) count += entry.exists();
  return count;
}

}  // namespace kvpool::test
