#pragma once

// The averages of GradientNoise, for both languages.

#include <ATen/core/Tensor.h>

#include <shoestring/files/safetensors.h>

namespace shoestring::optim::detail {

class NoiseAverages {
 public:
  explicit NoiseAverages(double decay);

  /// See GradientNoise::observe and the functions after it.
  void observe(const at::Tensor& square, double rows, const at::Tensor& all_square, double all_rows);
  double noise() const;
  double square() const;
  double critical_batch() const;
  TensorDict state() const;
  void load_state(const TensorDict& state);

 private:
  double decay_;
  at::Tensor averages_;  // fp32 (3,): the sum of the weights, S and |G|^2; undefined before the first
};

}  // namespace shoestring::optim::detail
