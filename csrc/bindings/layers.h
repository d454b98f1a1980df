// An engine's paged KV tensors, checked and planned once.
#pragma once
#include <nanobind/nanobind.h>

#include <utility>

#include "block/layout.h"

namespace kvpool {

class Layers {
 public:
  Layers(CopyPlan plan, nanobind::object tensors, bool writable)
      : plan_(std::move(plan)), tensors_(std::move(tensors)), writable_(writable) {}
  const CopyPlan& plan() const { return plan_; }
  bool writable() const { return writable_; }

 private:
  CopyPlan plan_;
  nanobind::object tensors_;  // kept alive; their addresses are in the plan
  bool writable_;
};

}  // namespace kvpool
