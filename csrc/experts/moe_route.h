#pragma once

// Shared declarations of moe_route: its results, and its computation in fp64.

#include <optional>
#include <tuple>

#include <ATen/core/Tensor.h>

#include "experts/moe_route_table.h"

namespace shoestring::experts {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// index, weight, counts, balance, z
using RouteResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

/// Compute moe_route and its gradient in fp64 with PyTorch's operators, for gradient checks.
RouteResult moe_route_double(const Tensor& logits, const kernels::Route& route, double scale,
                             const OptionalTensor& bias, const OptionalTensor& mask);
Tensor moe_route_double_backward(const OptionalTensor& grad_weight, const OptionalTensor& grad_balance,
                                 const OptionalTensor& grad_z, const Tensor& logits, const Tensor& index,
                                 const Tensor& counts, const kernels::Route& route, double scale);

}  // namespace shoestring::experts
