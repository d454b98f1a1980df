// What the Python objects hold, and the checks every call begins with.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include <chrono>
#include <memory>
#include <string>

#include "bindings/raise.h"
#include "net/channel.h"

namespace kvpool {

// Shared by the pool, its namespaces and the views of its blocks: memory that somebody looks at
// stays mapped after the pool is closed. In a forked child nothing may be torn down.
using NodeHandle = std::shared_ptr<Node>;

template <typename Owner>  // a Node or a Channel
Owner& usable(const std::shared_ptr<Owner>& owner) {
  if (owner->is_forked())
    throw Raised("ForkedProcess",
                 "this pool was opened by the parent process and cannot be used after fork; open "
                 "one in the child, or start children with the spawn method");
  if (owner->is_closed()) throw Raised("PoolClosed", "the pool is closed");
  return *owner;
}

// A day is for ever here: a longer wait is a mistake, an infinite one is not to be had.
inline constexpr double kTimeoutMaxSeconds = 86400;

inline Node::Deadline deadline_after(nanobind::handle timeout_s) {
  const double seconds = PyFloat_AsDouble(timeout_s.ptr());
  if (seconds == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    raise_bad_type(std::string("timeout is ") + Py_TYPE(timeout_s.ptr())->tp_name +
                   "; it must be a number of seconds");
  }
  if (!(seconds >= 0 && seconds <= kTimeoutMaxSeconds))
    raise_bad_argument("timeout is " + std::to_string(seconds) + " s; it must be 0..86400");
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(
             std::chrono::duration<double>(seconds));
}

// A namespace and how it is reached.
struct SpaceHandle {
  std::shared_ptr<Channel> channel;
  std::shared_ptr<Space> space;
  Channel& use() const { return usable(channel); }
};

// Given to Python to make a Namespace of.
struct Opened {
  SpaceHandle handle;
};

}  // namespace kvpool
