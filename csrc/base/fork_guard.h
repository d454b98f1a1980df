// Tells a process that it is a forked child of the one that made this object.
//
// A fork copies locks in whatever state they are and none of the threads, so nothing that needs
// them may run in the child. The mark lies on a page that the kernel wipes at fork: asking is one
// load, where getpid() would be a system call.
#pragma once
#include <sys/mman.h>

#include <cstddef>

#include "base/check.h"

namespace kvpool {

class ForkGuard {
 public:
  ForkGuard() {
    void* page = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    KVP_CHECK(page != MAP_FAILED);
    KVP_CHECK(madvise(page, kBytes, MADV_WIPEONFORK) == 0);  // Linux 4.14
    mark_ = static_cast<volatile char*>(page);
    *mark_ = 1;
  }
  ~ForkGuard() { munmap(const_cast<char*>(mark_), kBytes); }
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;

  bool is_child() const { return *mark_ == 0; }

 private:
  static constexpr std::size_t kBytes = 4096;
  volatile char* mark_;
};

}  // namespace kvpool
