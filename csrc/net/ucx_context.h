// One use of UCX: its configuration and the devices that it found. Everything else hangs on it.
//
// Thread rule: not thread-safe; UCX's own context may be used by one thread at a time.
// In a child of fork() nothing of UCX may be called, so whatever owns something of it asks
// is_child() first and lets go of nothing there.
#pragma once
#include <memory>

#include "base/fork_guard.h"
#include "net/ucx_library.h"
#include "net/ucx_options.h"

namespace kvpool {

class UcxContext {
 public:
  static Result<std::unique_ptr<UcxContext>> create(const UcxOptions& options);
  ~UcxContext();
  UcxContext(const UcxContext&) = delete;
  UcxContext& operator=(const UcxContext&) = delete;

  const UcxLibrary& library() const { return *library_; }
  ucp_context_h handle() const { return handle_; }
  bool is_child() const { return guard_.is_child(); }

 private:
  explicit UcxContext(std::shared_ptr<const UcxLibrary> library) : library_(std::move(library)) {}

  const std::shared_ptr<const UcxLibrary> library_;
  const ForkGuard guard_;
  ucp_context_h handle_ = nullptr;
};

}  // namespace kvpool
