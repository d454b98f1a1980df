#include "net/ucx_library.h"

#include <dlfcn.h>
#include <signal.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <vector>

namespace kvpool {
namespace {

constexpr const char* kSoname = "libucp.so.0";
constexpr unsigned kApiMajor = 1, kApiMinor = 13;

class HandlersKept {
 public:
  HandlersKept() {
    for (int number = 1; number < NSIG; ++number)
      is_known_[at(number)] = sigaction(number, nullptr, &before_[at(number)]) == 0;
    has_stack_ = sigaltstack(nullptr, &stack_) == 0;
  }
  ~HandlersKept() {
    for (int number = 1; number < NSIG; ++number) {
      struct sigaction now{};
      const struct sigaction& before = before_[at(number)];
      if (!is_known_[at(number)] || sigaction(number, nullptr, &now) != 0) continue;
      if (now.sa_handler != before.sa_handler) sigaction(number, &before, nullptr);
    }
    if (has_stack_) sigaltstack(&stack_, nullptr);
  }
  HandlersKept(const HandlersKept&) = delete;
  HandlersKept& operator=(const HandlersKept&) = delete;

 private:
  static std::size_t at(int number) { return static_cast<std::size_t>(number); }

  std::array<struct sigaction, NSIG> before_{};
  std::array<bool, NSIG> is_known_{};
  stack_t stack_{};
  bool has_stack_ = false;
};

bool has_rdma_device() {
  std::error_code none;
  const std::filesystem::directory_iterator devices("/sys/class/infiniband", none);
  return !none && devices != std::filesystem::directory_iterator();
}

std::vector<std::string> candidates(const std::string& found) {
  if (const char* chosen = std::getenv("KVPOOL_UCX_LIB"); chosen != nullptr && *chosen != '\0')
    return {chosen};
  // The wheel has no RDMA in it; what belongs to the machine usually has.
  if (found.empty()) return {kSoname};
  if (has_rdma_device()) return {kSoname, found};
  return {found, kSoname};
}

}  // namespace

Result<std::shared_ptr<const UcxLibrary>> UcxLibrary::open(const std::string& found) {
  std::string reasons;
  for (const std::string& path : candidates(found)) {
    auto library = load(path);
    if (library) return library;
    reasons += (reasons.empty() ? "" : "; ") + library.error().message;
  }
  return fail(Code::refused, "no UCX library: " + reasons);
}

Result<std::shared_ptr<const UcxLibrary>> UcxLibrary::load(const std::string& path) {
  void* opened = nullptr;
  {
    const HandlersKept kept;
    opened = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  }
  if (opened == nullptr) {
    const char* why = dlerror();
    return fail(Code::refused, path + ": " + (why != nullptr ? why : "cannot be opened"));
  }
  const std::shared_ptr<UcxLibrary> library(new UcxLibrary);
  const char* missing = nullptr;
#define KVPOOL_UCX_FIND(name)                                                \
  library->name = reinterpret_cast<decltype(&::name)>(dlsym(opened, #name)); \
  if (library->name == nullptr) missing = #name;
  KVPOOL_UCX_FUNCTIONS(KVPOOL_UCX_FIND)
#undef KVPOOL_UCX_FIND
  if (missing != nullptr) return fail(Code::refused, path + " has no " + missing);
  unsigned patch = 0;
  library->ucp_get_version(&library->major_, &library->minor_, &patch);
  library->path_ = path;
  if (library->major_ != kApiMajor || library->minor_ < kApiMinor)
    return fail(Code::refused, path + " is UCX " + std::to_string(library->major_) + "." +
                                   std::to_string(library->minor_) + ", 1.13 or later is needed");
  return library;
}

std::unexpected<Error> UcxLibrary::failure(ucs_status_t status, const std::string& what) const {
  const Code code = status == UCS_ERR_NO_MEMORY || status == UCS_ERR_NO_RESOURCE ||
                            status == UCS_ERR_EXCEEDS_LIMIT
                        ? Code::no_resource
                        : Code::refused;
  return fail(code, "UCX: " + what + ": " + ucs_status_string(status));
}

}  // namespace kvpool
