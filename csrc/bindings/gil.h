// Work without the GIL, that is safe while Python ends.
//
// A thread that asks for the GIL back while the interpreter shuts down is unwound by force, through
// frames that cannot be unwound: the process would abort at exit because some daemon thread was in
// the middle of a copy. So the end of the process waits until nobody is in such a section, and
// calls that come later keep the GIL.
//
// The state is the process's, as the GIL is. Thread rule: made and destroyed with the GIL held.
#pragma once
#include <nanobind/nanobind.h>

#include <chrono>

namespace kvpool {

class GilReleased {
 public:
  GilReleased();
  ~GilReleased();
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_ = nullptr;  // none when the GIL was kept
};

// At exit, with the GIL held: lets nobody into a section any more and waits for those inside.
// False: somebody still is after `at_most`.
bool end_gil_sections(std::chrono::milliseconds at_most);

// Once, when the module is loaded.
void watch_forks_for_gil_sections();

}  // namespace kvpool
