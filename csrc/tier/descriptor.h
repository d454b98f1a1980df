// A file descriptor with an owner, and errno as an Error.
#pragma once
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/status.h"

namespace kvpool {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }
  int get() const { return number_; }
  bool is_open() const { return number_ >= 0; }

 private:
  int number_ = -1;
};

// What the machine lacks is Code::no_resource; all else is something about the files.
inline std::unexpected<Error> fail_for(int error, const std::string& what) {
  const bool lacks_room = error == ENOSPC || error == EDQUOT || error == EFBIG || error == ENOMEM ||
                          error == EMFILE || error == ENFILE;
  return fail(lacks_room ? Code::no_resource : Code::refused, what + ": " + std::strerror(error));
}

// Calls `step(done)`, which answers as write(2) does, until `bytes` are moved. 0, or why not as an
// errno: a step of nothing (end of file, a device that takes no more) is EIO.
template <typename Step>
int transfer_whole(std::size_t bytes, Step step) {
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t more = step(done);
    if (more > 0)
      done += static_cast<std::size_t>(more);
    else if (more == 0)
      return EIO;
    else if (errno != EINTR)
      return errno;
  }
  return 0;
}

}  // namespace kvpool
