// How a UCX lane is opened. No type of UCX's in here: this header is there without UCX as well.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"

namespace kvpool {

struct UcxOptions {
  // A library that was found by others, such as the libucx wheel's libucp.so; may be empty.
  std::string library = {};
  std::string transports = "rc,dc";  // UCX_TLS, without "all", "^" and auxiliary ones
  std::string devices = {};          // UCX_NET_DEVICES; empty: all there are
  // More of UCX's settings, named without UCX_. They come last.
  std::vector<std::pair<std::string, std::string>> settings = {};
  // Takes transports that do not check remote keys (tcp, posix, cma, ...): whoever reaches such a
  // worker reads, writes and crashes this process. For tests.
  bool takes_unchecked = false;
};

// Code::bad_argument: a transport that is none of those above, a text or list that is too long.
Result<void> check(const UcxOptions& options);

}  // namespace kvpool
