#include "disk.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>

#include "base/check.h"

namespace kvpool::test {
namespace {

// Set while `act` runs: what it does to files is its own affair.
thread_local bool is_acting = false;

std::vector<std::byte> content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  KVP_CHECK(file.good());
  const std::vector<char> read{std::istreambuf_iterator<char>(file), {}};
  std::vector<std::byte> content(read.size());
  std::memcpy(content.data(), read.data(), read.size());
  return content;
}

}  // namespace

// --- one file ------------------------------------------------------------------------------------

void DiskFile::heard_write(std::span<const iovec> from, std::uint64_t at) {
  Change change{.at = at, .bytes = {}, .is_length = false, .is_certain = false};
  for (const iovec& piece : from) {
    const auto* begin = static_cast<const std::byte*>(piece.iov_base);
    change.bytes.insert(change.bytes.end(), begin, begin + piece.iov_len);
  }
  since_.push_back(std::move(change));
}

void DiskFile::write_ended(std::size_t moved, bool is_flushed) {
  since_.back().bytes.resize(moved);
  since_.back().is_certain = is_flushed;
}

void DiskFile::heard_length(std::uint64_t bytes) {
  since_.push_back({.at = bytes, .bytes = {}, .is_length = true, .is_certain = false});
}

void DiskFile::apply(const Change& change, std::vector<std::byte>& content) {
  if (change.is_length) {
    content.resize(change.at);
    return;
  }
  if (content.size() < change.at + change.bytes.size())
    content.resize(change.at + change.bytes.size());
  std::ranges::copy(change.bytes, content.begin() + static_cast<std::ptrdiff_t>(change.at));
}

void DiskFile::flush() {
  for (const Change& change : since_) apply(change, flushed_);
  since_.clear();
}

std::vector<std::byte> DiskFile::now() const {
  std::vector<std::byte> content = flushed_;
  for (const Change& change : since_) apply(change, content);
  return content;
}

// The share of what arrived is drawn anew for each image, with its extremes, for they are the
// likely ones: a cut right after a flush, and a disk that had written all it was given.
std::vector<std::byte> DiskFile::after_power_cut(Dice& dice) const {
  static constexpr double kShares[] = {0, 0.1, 0.5, 0.9, 1};
  const double share = kShares[dice.below(std::size(kShares))];
  const std::uint64_t grain = dice.chance(0.5) ? 4096 : 512;
  // A journal keeps changes of length in order: those up to here are there.
  const std::uint64_t lengths = dice.between(0, since_.size());
  std::vector<std::byte> content = flushed_;
  for (std::size_t i = 0; i < since_.size(); ++i) {
    const Change& change = since_[i];
    if (change.is_certain || (change.is_length && i < lengths)) apply(change, content);
    if (change.is_certain || change.is_length) continue;
    for (std::uint64_t from = change.at; from < change.at + change.bytes.size();) {
      const std::uint64_t to =
          std::min(from / grain * grain + grain, change.at + change.bytes.size());
      if (dice.chance(share) && to <= content.size())
        std::memcpy(content.data() + from, change.bytes.data() + (from - change.at), to - from);
      from = to;
    }
  }
  return content;
}

// --- all of them ---------------------------------------------------------------------------------

Disk& Disk::instance() {
  static Disk disk;
  return disk;
}

void Disk::watch(const std::string& directory, std::span<const std::string> names, Deaf deaf) {
  std::lock_guard lock(mutex_);
  directory_ = directory;
  deaf_ = deaf;
  for (const std::string& name : names) {
    struct stat facts{};
    KVP_CHECK(stat((directory + "/" + name).c_str(), &facts) == 0);
    files_[{facts.st_dev, facts.st_ino}] =
        std::make_unique<DiskFile>(name, content_of(directory + "/" + name));
  }
  is_off_ = false;
}

void Disk::at_moments(double probability, std::uint64_t seed, std::function<void()> act) {
  std::lock_guard lock(mutex_);
  probability_ = probability;
  dice_ = Dice(seed);
  act_ = std::move(act);
}

void Disk::moment() {
  std::lock_guard lock(mutex_);
  roll();
}

void Disk::roll() {
  if (!act_ || !dice_.chance(probability_)) return;
  is_acting = true;
  act_();
  is_acting = false;
}

void Disk::write_image(const std::string& directory, Dice& dice) const {
  for (const auto& [id, file] : files_) {
    const std::vector<std::byte> content = file->after_power_cut(dice);
    const std::string path = directory + "/" + file->name();
    // Over the last image: ext4 flushes what is written into a file that was cut to nothing.
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    KVP_CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(content.size())) == 0);
    KVP_CHECK(pwrite(fd, content.data(), content.size(), 0) ==
              static_cast<ssize_t>(content.size()));
    close(fd);
  }
}

std::uint64_t Disk::unheard_bytes() const {
  std::uint64_t count = 0;
  for (const auto& [id, file] : files_) {
    const std::vector<std::byte> heard = file->now();
    const std::vector<std::byte> is = content_of(directory_ + "/" + file->name());
    const std::size_t both = std::min(heard.size(), is.size());
    count += heard.size() + is.size() - 2 * both;
    for (std::size_t i = 0; i < both; ++i) count += heard[i] != is[i];
  }
  return count;
}

Disk::Call Disk::starts(int fd) {
  struct stat facts{};
  if (is_off_ || is_acting || fstat(fd, &facts) != 0) return {};
  Call call{std::unique_lock(mutex_), nullptr};
  const auto known = files_.find({facts.st_dev, facts.st_ino});
  if (known == files_.end()) return {};
  call.file = known->second.get();
  roll();
  return call;
}

void Disk::heard_write(Call& call, std::span<const iovec> from, std::uint64_t at) {
  call.file->heard_write(from, at);
  roll();
}

bool Disk::hears_flushes(const Call& call) const {
  return !(deaf_ == Deaf::to_slab_flushes && call.file->name() == kSlabsName) &&
         !(deaf_ == Deaf::to_index_flushes && call.file->name() == kIndexName);
}

}  // namespace kvpool::test
