#include "net/ucx_options.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace kvpool {
namespace {

constexpr std::size_t kTextMax = 1024;
constexpr std::size_t kSettingsMax = 32;

// Those whose reads the network card does by itself, after it has looked at the remote key. ud is
// not one: over it UCX does reads in software, by whatever address it is told.
constexpr std::array<std::string_view, 8> kChecked = {"rc",      "rc_v", "rc_verbs", "rc_x",
                                                      "rc_mlx5", "dc",   "dc_x",     "dc_mlx5"};

bool is_plain(const std::string& text) {
  return text.size() <= kTextMax && text.find('\0') == std::string::npos;
}

std::unexpected<Error> bad(std::string what) { return fail(Code::bad_argument, std::move(what)); }

Result<void> check_transports(const std::string& list) {
  for (std::size_t begin = 0; begin <= list.size();) {
    const std::size_t end = std::min(list.find(',', begin), list.size());
    const std::string_view name = std::string_view(list).substr(begin, end - begin);
    if (std::ranges::find(kChecked, name) == kChecked.end())
      return bad("UCX transport '" + std::string(name) +
                 "' cannot be used: remote keys are checked by rc and dc only");
    begin = end + 1;
  }
  return {};
}

}  // namespace

Result<void> check(const UcxOptions& options) {
  if (!is_plain(options.library) || !is_plain(options.transports) || !is_plain(options.devices))
    return bad("a text of the UCX options is longer than " + std::to_string(kTextMax) +
               " bytes or holds a zero");
  if (options.settings.size() > kSettingsMax)
    return bad("more than " + std::to_string(kSettingsMax) + " settings for UCX");
  for (const auto& [name, value] : options.settings) {
    if (name.empty() || !is_plain(name) || !is_plain(value)) return bad("a bad setting for UCX");
    // Each has an option of its own, which is looked at.
    if (name == "TLS" || name == "NET_DEVICES") return bad("UCX setting " + name + " is an option");
  }
  if (options.takes_unchecked) return {};
  return check_transports(options.transports);
}

}  // namespace kvpool
