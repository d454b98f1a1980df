// What a disk would hold if the power went now.
//
// Hears of every write and flush of the files that lie directly in one directory (disk_calls.cc)
// and can make an image of them as a power cut would leave it:
//   - what a flush that has returned covers (fdatasync, fsync), and what was written through
//     a descriptor with O_DSYNC, is there;
//   - of what was written since, any part may be there: by pages of 4 KiB or by sectors of 512
//     bytes, in any order, each in any of the versions that were written;
//   - a file has one of the lengths that it had since, with zeros where nothing arrived.
// Not modelled: a sector torn within, a disk that lies about flushes, names (files are there).
//
// Flushes are not carried out: the page cache shows the program what it wrote either way, so a run
// is as fast as memory, and what it proves does not depend on the disk below.
// Thread rule: the calls from any thread, one at a time; the rest before they begin, or in `act`.
#pragma once
#include <sys/types.h>
#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <string>
#include <vector>

namespace kvpool::test {

class Dice {
 public:
  explicit Dice(std::uint64_t seed) : engine_(seed) {}
  std::uint64_t below(std::uint64_t end) { return end == 0 ? 0 : engine_() % end; }
  // Both ends included.
  std::uint64_t between(std::uint64_t low, std::uint64_t high) {
    return low + below(high - low + 1);
  }
  bool chance(double probability) {
    return static_cast<double>(engine_() >> 11) < probability * 9007199254740992.0;  // 2^53
  }

 private:
  std::mt19937_64 engine_;
};

class DiskFile {
 public:
  // What is there now counts as flushed.
  DiskFile(std::string name, std::vector<std::byte> content)
      : name_(std::move(name)), flushed_(std::move(content)) {}

  const std::string& name() const { return name_; }
  void heard_write(std::span<const iovec> from, std::uint64_t at);
  // Of the write heard last: how much of it took place, and whether it is on the disk by itself.
  void write_ended(std::size_t moved, bool is_flushed);
  void heard_length(std::uint64_t bytes);
  void flush();

  std::vector<std::byte> after_power_cut(Dice& dice) const;
  std::vector<std::byte> now() const;

 private:
  struct Change {
    std::uint64_t at = 0;          // or the new length
    std::vector<std::byte> bytes;  // of a write
    bool is_length = false;
    bool is_certain = false;
  };
  static void apply(const Change& change, std::vector<std::byte>& content);

  std::string name_;
  std::vector<std::byte> flushed_;
  std::vector<Change> since_;
};

class Disk {
 public:
  // There is one, as there is one `pwrite` in a process.
  static Disk& instance();

  enum class Deaf : std::uint8_t { no, to_slab_flushes, to_index_flushes };
  // Files of these names in the directory are followed from now on, whoever opens them.
  void watch(const std::string& directory, std::span<const std::string> names, Deaf deaf);
  // `act` runs between two calls, or while one is under way, with that probability at each.
  void at_moments(double probability, std::uint64_t seed, std::function<void()> act);
  // Such a moment that is not a call.
  void moment();
  void write_image(const std::string& directory, Dice& dice) const;
  // Bytes in which the files differ from what was heard of them; not 0: a call was not heard.
  std::uint64_t unheard_bytes() const;
  // In a forked child: no call is followed any more, and nothing is worth a flush.
  void let_go() { is_off_ = has_let_go_ = true; }
  bool has_let_go() const { return has_let_go_; }

  // --- for disk_calls.cc ---
  struct Call {
    std::unique_lock<std::mutex> lock;
    DiskFile* file = nullptr;  // nullptr: none of ours
  };
  Call starts(int fd);
  void heard_write(Call& call, std::span<const iovec> from, std::uint64_t at);
  bool hears_flushes(const Call& call) const;

 private:
  using FileId = std::pair<dev_t, ino_t>;
  void roll();

  std::mutex mutex_;
  std::string directory_;
  std::map<FileId, std::unique_ptr<DiskFile>> files_;
  Deaf deaf_ = Deaf::no;
  std::atomic<bool> is_off_{true}, has_let_go_{false};
  double probability_ = 0;
  Dice dice_{0};
  std::function<void()> act_;
};

// Names of the two files that matter.
inline const std::string kSlabsName = "slabs", kIndexName = "index.mdb";

}  // namespace kvpool::test
