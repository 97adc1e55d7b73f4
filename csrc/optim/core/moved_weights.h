#pragma once

// The first half of a step of SAM, for both languages.

#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace shoestring::optim::detail {

using at::Tensor;

/// Moves weights uphill, and restores them bit for bit.
class MovedWeights {
 public:
  /// Copies the weights. They have gradients.
  explicit MovedWeights(const std::vector<Tensor>& params);
  /// Moves each weight w with gradient g by rho * g / norm(g), or for ASAM by rho * w^2 g / norm(w g). The
  /// norm is that of all weights together. Each weight has an entry in `rho` and in `adaptive`. If the norm
  /// is not finite, no weight moves. If move() raises, call go_back().
  void move(const std::vector<double>& rho, const std::vector<bool>& adaptive);
  void go_back();

  /// Whether the norm was finite, as bool. Undefined if there were no gradients.
  const Tensor& finite() const { return finite_; }

 private:
  std::vector<std::pair<Tensor, Tensor>> weights_;  // each parameter, and its original value
  Tensor finite_;
};

}  // namespace shoestring::optim::detail
