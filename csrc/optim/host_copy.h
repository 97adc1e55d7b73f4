#pragma once

#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>

#include "optim/stored.h"

namespace shoestring::optim::detail {

/// Copies in host memory of tensors, and of the states of optimizers. They are pinned for a GPU, and complete
/// when the current stream is. The optimizers must outlive the copies.
class HostCopy {
 public:
  HostCopy(const std::vector<at::Tensor>& tensors, std::vector<torch::optim::Optimizer*> optimizers);
  /// Makes tensors and states what they were, bit for bit. May be called several times. `what` begins
  /// messages.
  void restore(const std::string& what) const;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;  // and their copies
  std::vector<std::pair<torch::optim::Optimizer*, Stored>> states_;
};

}  // namespace shoestring::optim::detail
