#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include <shoestring/runs/training.h>

#include "optim/core/host_copy.h"

namespace shoestring::runs {

/// A copy in host memory of everything that a run changes: weights (of the run and of its optimizers),
/// gradients, states of optimizers, parts and generators. The run must outlive it. `what` begins messages.
class RunCopy {
 public:
  RunCopy(TrainingRun& run, std::string what);
  /// Makes the run what it was, bit for bit. May be called several times. If a part refuses its state,
  /// everything else is restored before the exception is thrown.
  void restore();

 private:
  TrainingRun* run_;
  std::string what_;
  optim::detail::HostCopy copy_;
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_;  // parameters, and copies of gradients or none
  std::map<std::string, TensorDict> parts_;
  std::map<std::string, at::Tensor> generators_;
};

/// Calls `work`, and restores the copy afterwards, also if `work` throws.
template <class Work>
void restoring(RunCopy& copy, const Work& work) {
  try {
    work();
  } catch (...) {
    copy.restore();
    throw;
  }
  copy.restore();
}

}  // namespace shoestring::runs
