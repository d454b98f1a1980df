#include "bindings/gil.h"

#include <pthread.h>

#include <atomic>
#include <thread>

namespace kvpool {
namespace {

std::atomic<int> inside{0};  // threads between release and return of the GIL
bool ending = false;         // guarded by the GIL

}  // namespace

GilReleased::GilReleased() {
  if (ending) return;
  inside.fetch_add(1, std::memory_order_relaxed);
  state_ = PyEval_SaveThread();
}

GilReleased::~GilReleased() {
  if (state_ == nullptr) return;
  PyEval_RestoreThread(state_);
  inside.fetch_sub(1, std::memory_order_relaxed);
}

bool end_gil_sections(std::chrono::milliseconds at_most) {
  ending = true;
  const auto deadline = std::chrono::steady_clock::now() + at_most;
  PyThreadState* state = PyEval_SaveThread();
  while (inside.load(std::memory_order_relaxed) > 0 && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  PyEval_RestoreThread(state);
  return inside.load(std::memory_order_relaxed) == 0;
}

void watch_forks_for_gil_sections() {
  // A child has none of its parent's other threads, and the forking one holds the GIL.
  pthread_atfork(nullptr, nullptr, [] { inside.store(0, std::memory_order_relaxed); });
}

}  // namespace kvpool
