// UCX, opened at run time: kvpool is built against its headers (API 1.13) and linked to nothing.
//
// Promises: what runs in this process afterwards has the signal handlers it had before. UCX takes
//           over SIGSEGV and SIGHUP, among others, as soon as it is loaded, unless its environment
//           says no; and no environment of a process with threads can be changed safely.
// A library stays loaded for good: UCX has threads and exit handlers of its own.
#pragma once
#include <ucp/api/ucp.h>

#include <memory>
#include <string>

#include "base/status.h"

// All that is called, and so all that a library must have.
// clang-format off
#define KVPOOL_UCX_FUNCTIONS(X) \
  X(ucp_get_version) \
  X(ucp_config_read) \
  X(ucp_config_modify) \
  X(ucp_config_release) \
  X(ucp_init_version) \
  X(ucp_cleanup) \
  X(ucp_worker_create) \
  X(ucp_worker_destroy) \
  X(ucp_worker_get_efd) \
  X(ucp_worker_arm) \
  X(ucp_worker_progress) \
  X(ucp_worker_get_address) \
  X(ucp_worker_release_address) \
  X(ucp_mem_map) \
  X(ucp_mem_unmap) \
  X(ucp_rkey_pack) \
  X(ucp_rkey_buffer_release) \
  X(ucp_ep_create) \
  X(ucp_ep_close_nbx) \
  X(ucp_ep_rkey_unpack) \
  X(ucp_rkey_destroy) \
  X(ucp_get_nbx) \
  X(ucp_request_free) \
  X(ucs_status_string)
// clang-format on

namespace kvpool {

class UcxLibrary {
 public:
  // In this order: $KVPOOL_UCX_LIB, and then nothing else; where the machine has an RDMA device the
  // system's libucp.so.0; `found`, if it is not empty; libucp.so.0, wherever the loader finds it.
  static Result<std::shared_ptr<const UcxLibrary>> open(const std::string& found);

  const std::string& path() const { return path_; }
  unsigned major() const { return major_; }
  unsigned minor() const { return minor_; }

#define KVPOOL_UCX_MEMBER(name) decltype(&::name) name = nullptr;
  KVPOOL_UCX_FUNCTIONS(KVPOOL_UCX_MEMBER)
#undef KVPOOL_UCX_MEMBER

  // What went wrong, in UCX's words.
  std::unexpected<Error> failure(ucs_status_t status, const std::string& what) const;

 private:
  UcxLibrary() = default;
  static Result<std::shared_ptr<const UcxLibrary>> load(const std::string& path);

  std::string path_;
  unsigned major_ = 0, minor_ = 0;
};

}  // namespace kvpool
