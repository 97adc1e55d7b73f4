#pragma once

// Shared declarations of grouped_linear.

#include <optional>
#include <tuple>

#include <ATen/core/Tensor.h>

namespace shoestring::experts {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalType = std::optional<at::ScalarType>;
using GroupedGradients = std::tuple<Tensor, Tensor, Tensor>;  // of x, weight and bias

constexpr const char* kGroupedLinearOp = "grouped_linear";

/// Raises unless the shapes, dtypes and devices of the arguments fit. Reads no values.
void check_grouped_linear(const Tensor& x, const Tensor& weight, const Tensor& offsets,
                          const OptionalTensor& rows, const OptionalTensor& bias, OptionalType dtype);

}  // namespace shoestring::experts
