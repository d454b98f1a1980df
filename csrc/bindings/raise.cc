#include "bindings/raise.h"

#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace kvpool {

void raise_error(const Error& error) {
  switch (error.code) {
    case Code::bad_argument:
      throw Raised("BadArgument", error.message);
    case Code::no_resource:
      throw Raised("NoResource", error.message);
  }
  throw Raised("KvpoolError", error.message);
}

void register_translator() {
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Raised& raised) {
      nb::object type = nb::module_::import_("kvpool.errors").attr(raised.class_name());
      PyErr_SetString(type.ptr(), raised.what());
    }
  });
}

}  // namespace kvpool
