#pragma once

#include <torch/custom_class.h>

#include <shoestring/optim/base.h>

namespace shoestring::optim {

/// The base of OptimizerCore, through which other libraries reach the optimizer of a Python object.
class OptimizerHolder : public torch::CustomClassHolder {
 public:
  virtual LowMemoryOptimizer& optimizer() = 0;
};

}  // namespace shoestring::optim
