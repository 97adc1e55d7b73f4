#pragma once

#include <ATen/ATen.h>

/// Returns the norm of (received - expected) divided by the norm of `expected`, computed in fp64.
inline double relative_error(const at::Tensor& received, const at::Tensor& expected) {
  const at::Tensor exact = expected.detach().to(at::kDouble);
  return (received.detach().to(at::kDouble) - exact).norm().item<double>() /
         (exact.norm().item<double>() + 1e-30);
}
