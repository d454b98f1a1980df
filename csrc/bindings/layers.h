// An engine's paged KV tensors, checked and planned once.
#pragma once
#include <nanobind/nanobind.h>

#include <string>
#include <utility>

#include "block/layout.h"

namespace kvpool {

class Layers {
 public:
  Layers(std::string layout, CopyPlan plan, nanobind::object tensors, bool writable)
      : layout_(std::move(layout)),
        plan_(std::move(plan)),
        tensors_(std::move(tensors)),
        writable_(writable) {}
  const std::string& layout() const { return layout_; }
  const CopyPlan& plan() const { return plan_; }
  bool writable() const { return writable_; }

 private:
  std::string layout_;  // blocks of two layouts may have one size, and different bytes
  CopyPlan plan_;
  nanobind::object tensors_;  // kept alive; their addresses are in the plan
  bool writable_;
};

}  // namespace kvpool
