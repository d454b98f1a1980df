// What the disk gives without us: whole blocks between aligned memory and a file of its own, past
// the page cache. The floor that `kvpool bench ssd` prints beside the SSD tier, and nothing else.
//
// One call per block, several in flight, as a tier would do it; shares no code with the tier.
// Thread rule: one caller at a time. The caller works too, so that a single block costs no wake-up.
#include <fcntl.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bindings/bind.h"
#include "bindings/gil.h"
#include "bindings/raise.h"

namespace kvpool {
namespace {

namespace nb = nanobind;
using nb::literals::operator""_a;

constexpr std::uint64_t kAlignBytes = 4096;
constexpr std::uint64_t kBytesMax = std::uint64_t{1} << 40;

struct Shape {
  std::uint64_t blocks, block_bytes, batch, threads;
};

void check_shape(const Shape& shape) {
  if (shape.block_bytes == 0 || shape.block_bytes % kAlignBytes != 0)
    raise_bad_argument("block_bytes must be a multiple of 4096");
  if (shape.block_bytes > kBytesMax || shape.blocks > kBytesMax / shape.block_bytes)
    raise_bad_argument("the file would be larger than 1 TiB");
  if (shape.batch == 0 || shape.batch > shape.blocks)
    raise_bad_argument("a batch is 1 block to all of them");
  if (shape.threads == 0 || shape.threads > 64) raise_bad_argument("threads must be 1..64");
}

[[noreturn]] void raise_errno(const std::string& what, int error) {
  throw Raised("NoResource", what + ": " + std::strerror(error));
}

class RawDisk {
 public:
  RawDisk(const std::string& path, const Shape& shape) : shape_(shape), memory_(nullptr, &free) {
    check_shape(shape);
    file_ = ::open(path.c_str(), O_CREAT | O_EXCL | O_RDWR | O_DIRECT | O_CLOEXEC, 0600);
    if (file_ < 0) raise_errno("cannot open " + path + " past the page cache", errno);
    const auto file_bytes = static_cast<off_t>(shape.blocks * shape.block_bytes);
    if (const int error = ::posix_fallocate(file_, 0, file_bytes); error != 0)
      fail_open("no room for " + path, error);
    const std::uint64_t bytes = shape.batch * shape.block_bytes;
    memory_.reset(static_cast<std::byte*>(std::aligned_alloc(kAlignBytes, bytes)));
    if (memory_ == nullptr) fail_open("no memory for a batch", ENOMEM);
    // A disk may be quicker with zeros.
    std::mt19937_64 random(shape.block_bytes);
    for (std::uint64_t at = 0; at < bytes; at += sizeof(std::uint64_t)) {
      const std::uint64_t word = random();
      std::memcpy(memory_.get() + at, &word, sizeof word);
    }
    for (std::uint64_t i = 1; i < shape.threads; ++i) threads_.emplace_back([this] { work(); });
  }
  ~RawDisk() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    ::close(file_);
  }
  RawDisk(const RawDisk&) = delete;
  RawDisk& operator=(const RawDisk&) = delete;

  // `blocks`: where in the file, one per block of the batch.
  void write(const std::vector<std::uint64_t>& blocks) {
    run(blocks, true);
    if (::fdatasync(file_) != 0) raise_errno("fdatasync", errno);
  }
  void read(const std::vector<std::uint64_t>& blocks) { run(blocks, false); }

 private:
  [[noreturn]] void fail_open(const std::string& what, int error) {
    ::close(file_);
    raise_errno(what, error);
  }

  void run(const std::vector<std::uint64_t>& blocks, bool is_write) {
    if (blocks.size() > shape_.batch) raise_bad_argument("more blocks than a batch has");
    for (const std::uint64_t block : blocks)
      if (block >= shape_.blocks) raise_bad_argument("no such block in the file");
    {
      const std::lock_guard lock(mutex_);
      places_ = &blocks;
      is_write_ = is_write;
      next_.store(0, std::memory_order_relaxed);
      error_.store(0, std::memory_order_relaxed);
      // None for a single block: the caller does it.
      wanted_ = std::min(threads_.size(), blocks.empty() ? 0 : blocks.size() - 1);
    }
    if (wanted_ > 0) work_.notify_all();
    move_blocks();
    std::unique_lock lock(mutex_);
    wanted_ = 0;  // who has not come yet need not
    done_.wait(lock, [this] { return working_ == 0; });
    if (const int error = error_.load(std::memory_order_relaxed); error != 0)
      raise_errno(is_write ? "pwrite" : "pread", error);
  }

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      work_.wait(lock, [this] { return stopping_ || wanted_ > 0; });
      if (stopping_) return;
      --wanted_;
      ++working_;
      lock.unlock();
      move_blocks();
      lock.lock();
      if (--working_ == 0) done_.notify_one();
    }
  }

  // Blocks of the batch, one after the other, until none is left.
  void move_blocks() {
    const std::vector<std::uint64_t>& places = *places_;
    while (true) {
      const std::size_t i = next_.fetch_add(1, std::memory_order_relaxed);
      if (i >= places.size()) return;
      std::byte* at = memory_.get() + i * shape_.block_bytes;
      const auto offset = static_cast<off_t>(places[i] * shape_.block_bytes);
      const ssize_t moved = is_write_ ? ::pwrite(file_, at, shape_.block_bytes, offset)
                                      : ::pread(file_, at, shape_.block_bytes, offset);
      if (moved != static_cast<ssize_t>(shape_.block_bytes))
        error_.store(moved < 0 ? errno : EIO, std::memory_order_relaxed);
    }
  }

  const Shape shape_;
  int file_ = -1;
  std::unique_ptr<std::byte, decltype(&free)> memory_;  // one batch

  std::mutex mutex_;  // guards the fields up to stopping_; places_ stands still while working_ > 0
  std::condition_variable work_, done_;
  const std::vector<std::uint64_t>* places_ = nullptr;
  bool is_write_ = false;
  std::size_t wanted_ = 0;   // threads that may join the batch
  std::size_t working_ = 0;  // threads in it, but for the caller
  bool stopping_ = false;
  std::atomic<std::size_t> next_{0};
  std::atomic<int> error_{0};
  std::vector<std::thread> threads_;
};

}  // namespace

void bind_raw_disk(nb::module_& m) {
  nb::class_<RawDisk>(m, "RawDisk",
                      "A new file, read and written past the page cache: the floor of the SSD "
                      "bench.\n\nOne call per block, `threads` in flight, from and to one batch "
                      "of aligned memory.\nOne caller at a time; releases the GIL.")
      .def(
          "__init__",
          [](RawDisk* self, const std::string& path, std::uint64_t blocks,
             std::uint64_t block_bytes, std::uint64_t batch, std::uint64_t threads) {
            new (self) RawDisk(path, {blocks, block_bytes, batch, threads});
          },
          "path"_a, "blocks"_a, "block_bytes"_a, "batch"_a, "threads"_a)
      .def(
          "write",
          [](RawDisk& disk, const std::vector<std::uint64_t>& blocks) {
            const GilReleased released;
            disk.write(blocks);
          },
          "blocks"_a, "Write these blocks of the file, then one fdatasync.")
      .def(
          "read",
          [](RawDisk& disk, const std::vector<std::uint64_t>& blocks) {
            const GilReleased released;
            disk.read(blocks);
          },
          "blocks"_a, "Read these blocks of the file.");
}

}  // namespace kvpool
