#pragma once

#include <memory>
#include <vector>

#include "optim/core.h"

namespace shoestring::optim::detail {

/// The contents of an archive or a file.
struct Saved {
  struct Group {
    std::unique_ptr<torch::optim::OptimizerOptions> options;
    std::vector<ParamState> states;  // one state per parameter; without entries if the parameter has none
  };
  std::vector<Group> groups;
  Tensor grad_norm;  // gradient norm that clips the next backward, or undefined
};

/// Restores the saved contents, or raises c10::Error before anything has changed.
void restore(LowMemoryOptimizer& optimizer, Saved saved);

inline constexpr int64_t kFormatVersion = 1;

}  // namespace shoestring::optim::detail
