#include "bindings/raise.h"

#include <nanobind/nanobind.h>

#include <new>
#include <string>
#include <system_error>

namespace nb = nanobind;

namespace kvpool {

void raise_error(const Error& error) {
  switch (error.code) {
    case Code::bad_argument:
      throw Raised("BadArgument", error.message);
    case Code::no_resource:
      throw Raised("NoResource", error.message);
    case Code::refused:
      throw Raised("TierRefused", error.message);
  }
  throw Raised("KvpoolError", error.message);
}

void register_translator() {
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    const auto raise = [](const char* class_name, const std::string& message) {
      nb::object type = nb::module_::import_("kvpool.errors").attr(class_name);
      PyErr_SetString(type.ptr(), message.c_str());
    };
    try {
      std::rethrow_exception(pointer);
    } catch (const Raised& raised) {
      raise(raised.class_name(), raised.what());
    } catch (const std::bad_alloc&) {
      raise("NoResource", "the machine refused memory for the books of the pool");
    } catch (const std::system_error& error) {
      raise("NoResource", std::string("the machine refused a thread or a lock: ") + error.what());
    }
  });
}

}  // namespace kvpool
