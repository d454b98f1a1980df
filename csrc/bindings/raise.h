// The one border between the core's values and Python's exceptions.
#pragma once
#include <exception>
#include <string>
#include <utility>

#include "base/status.h"

namespace kvpool {

// Becomes the class of that name in kvpool.errors, wherever it is thrown in the bindings.
class Raised : public std::exception {
 public:
  Raised(const char* class_name, std::string message)
      : class_name_(class_name), message_(std::move(message)) {}
  const char* class_name() const { return class_name_; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  const char* class_name_;
  std::string message_;
};

[[noreturn]] inline void raise_bad_argument(std::string message) {
  throw Raised("BadArgument", std::move(message));
}
[[noreturn]] inline void raise_bad_type(std::string message) {
  throw Raised("BadType", std::move(message));
}
[[noreturn]] void raise_error(const Error& error);

template <typename T>
T value_or_raise(Result<T> result) {
  if (!result) raise_error(result.error());
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}

void register_translator();

}  // namespace kvpool
