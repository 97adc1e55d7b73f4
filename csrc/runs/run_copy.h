#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include <shoestring/training.h>

#include "optim/stored.h"

namespace shoestring::runs {

/// A copy in host memory of everything that a run changes: weights, gradients, states of optimizers, parts
/// and generators. The run must outlive it.
class RunCopy {
 public:
  explicit RunCopy(TrainingRun& run);
  /// Makes the run what it was, bit for bit. May be called several times.
  void restore();

 private:
  TrainingRun* run_;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_, gradients_;  // and their copies, or none
  std::vector<optim::detail::Stored> optimizers_;
  std::map<std::string, TensorDict> parts_;
  std::map<std::string, at::Tensor> generators_;
};

}  // namespace shoestring::runs
