#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "optim/core/stored.h"

namespace shoestring::optim::detail {

/// Copies in host memory of tensors, of the states of optimizers, and of the buffers of modules. They are
/// pinned for a GPU, and complete when the current stream is. Optimizers and modules must outlive the copies.
class HostCopy {
 public:
  HostCopy(const std::vector<at::Tensor>& tensors, std::vector<torch::optim::Optimizer*> optimizers,
           std::vector<torch::nn::Module*> modules = {});
  /// Makes tensors and states what they were, bit for bit. May be called several times. A buffer to which a
  /// module has assigned another tensor gets the memory of the one that was copied. `what` begins messages.
  /// If an optimizer refuses its state, everything else is restored before the exception is thrown.
  void restore(const std::string& what) const;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;  // and their copies
  std::vector<std::pair<torch::optim::Optimizer*, Stored>> states_;
  std::vector<std::pair<torch::nn::Module*, TensorDict>> buffers_;  // the tensors that the modules had
};

/// Calls every step, also after one has thrown, and throws the first exception at the end.
void call_all(const std::vector<std::function<void()>>& steps);

}  // namespace shoestring::optim::detail
