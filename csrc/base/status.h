// What can go wrong, as values. The core throws nothing but std::bad_alloc at construction.
//
// A Code exists only if some caller acts on it; they are grouped by the largest thing that is lost.
// A miss is not an error and has no Code: lookups and gets answer with counts.
#pragma once
#include <cstdint>
#include <expected>
#include <string>
#include <utility>

namespace kvpool {

enum class Code : std::uint8_t {
  // the request: fix the call
  bad_argument,
  // the machine: it refused memory, a descriptor or a mapping
  no_resource,
  // the files: locked by another process, foreign, damaged, or of another version
  refused,
};

struct Error {
  Code code;
  std::string message;
};

template <typename T>
using Result = std::expected<T, Error>;

inline std::unexpected<Error> fail(Code code, std::string message) {
  return std::unexpected(Error{code, std::move(message)});
}

}  // namespace kvpool
