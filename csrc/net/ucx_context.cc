#include "net/ucx_context.h"

namespace kvpool {
namespace {

struct ConfigCloser {
  const UcxLibrary& library;
  void operator()(ucp_config_t* config) const { library.ucp_config_release(config); }
};
using Config = std::unique_ptr<ucp_config_t, ConfigCloser>;

Result<void> set(const UcxLibrary& library, ucp_config_t* config, const std::string& name,
                 const std::string& value) {
  const ucs_status_t status = library.ucp_config_modify(config, name.c_str(), value.c_str());
  if (status != UCS_OK) return library.failure(status, "setting " + name + " to '" + value + "'");
  return {};
}

Result<Config> configure(const UcxLibrary& library, const UcxOptions& options) {
  ucp_config_t* read = nullptr;
  const ucs_status_t status = library.ucp_config_read(nullptr, nullptr, &read);
  if (status != UCS_OK) return library.failure(status, "reading its configuration");
  Config config(read, ConfigCloser{library});
  // UCX writes to the standard output of a process that is not its own; what fails comes back as a
  // status. Not every release lets a program set both.
  (void)library.ucp_config_modify(read, "WARN_UNUSED_ENV_VARS", "n");
  (void)library.ucp_config_modify(read, "LOG_LEVEL", "fatal");
  // A peer that is gone while nothing is asked of it is noticed in a second, not in 20.
  if (auto done = set(library, read, "KEEPALIVE_INTERVAL", "1s"); !done)
    return std::unexpected(done.error());
  if (auto done = set(library, read, "TLS", options.transports); !done)
    return std::unexpected(done.error());
  if (!options.devices.empty())
    if (auto done = set(library, read, "NET_DEVICES", options.devices); !done)
      return std::unexpected(done.error());
  for (const auto& [name, value] : options.settings)
    if (auto done = set(library, read, name, value); !done) return std::unexpected(done.error());
  return config;
}

}  // namespace

Result<std::unique_ptr<UcxContext>> UcxContext::create(const UcxOptions& options) {
  auto library = UcxLibrary::open(options.library);
  if (!library) return std::unexpected(library.error());
  std::unique_ptr<UcxContext> context(new UcxContext(*library));
  auto config = configure(**library, options);
  if (!config) return std::unexpected(config.error());
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP;
  const ucs_status_t status =
      (*library)->ucp_init_version(1, 13, &params, config->get(), &context->handle_);
  if (status != UCS_OK)
    return (*library)->failure(
        status, "opening " + (*library)->path() + " for the transports " + options.transports);
  return context;
}

UcxContext::~UcxContext() {
  if (handle_ != nullptr && !is_child()) library_->ucp_cleanup(handle_);
}

}  // namespace kvpool
