#pragma once

#include <algorithm>

#include <ATen/ATen.h>

/// Returns the norm of (received - expected) divided by the norm of `expected`, computed in fp64. If the norm
/// of `expected` is below 1e-6, the divisor is 1e-6.
inline double relative_error(const at::Tensor& received, const at::Tensor& expected) {
  const at::Tensor exact = expected.detach().to(at::kDouble);
  return (received.detach().to(at::kDouble) - exact).norm().item<double>() /
         std::max(exact.norm().item<double>(), 1e-6);
}
