#pragma once

#include <memory>
#include <vector>

#include "optim/core/core.h"

namespace shoestring::optim::detail {

/// The contents of a LibTorch archive or a safetensors file with optimizer state.
struct Saved {
  struct Group {
    std::unique_ptr<torch::optim::OptimizerOptions> options;
    std::vector<ParamState> states;  // one state per parameter; empty for a parameter without state
  };
  std::vector<Group> groups;
  bool has_parts = false;  // whether a state that processes have split has only this process's part
  Tensor grad_norm;        // gradient norm by which the next steps within backward clip, or undefined
};

/// Loads saved options and states into the optimizer, or raises c10::Error before anything has changed.
void restore(LowMemoryOptimizer& optimizer, Saved saved);

inline constexpr int64_t kFormatVersion = 1;

}  // namespace shoestring::optim::detail
