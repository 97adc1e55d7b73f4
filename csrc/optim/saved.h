#pragma once

#include <memory>
#include <vector>

#include "optim/core.h"

namespace shoestring::optim::detail {

/// What an archive or a file holds.
struct Saved {
  struct Group {
    std::unique_ptr<torch::optim::OptimizerOptions> options;
    std::vector<ParamState> states;  // of each parameter; one without entries: none
  };
  std::vector<Group> groups;
  Tensor grad_norm;  // that clips the next backward, or undefined
};

/// Takes all of it over, or raises c10::Error before anything has changed.
void restore(LowMemoryOptimizer& optimizer, Saved saved);

inline constexpr int64_t kFormatVersion = 1;

}  // namespace shoestring::optim::detail
