#pragma once

#include <optional>
#include <vector>

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

namespace shoestring::gemm {

constexpr const char* kLinearOp = "linear";
constexpr const char* kLinearGroupOp = "linear_group";
constexpr const char* kLinearGroupBackwardOp = "_linear_group_backward";

using OptionalTensors = c10::List<std::optional<at::Tensor>>;

using LinearSignature = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                                   const std::optional<at::Tensor>&, std::optional<at::ScalarType>, int64_t);
using LinearGroupSignature = std::vector<at::Tensor>(const at::Tensor&, at::TensorList,
                                                     const OptionalTensors&, std::optional<at::ScalarType>,
                                                     int64_t);
using LinearGroupBackwardSignature = std::vector<at::Tensor>(const OptionalTensors&,
                                                             const std::optional<at::Tensor>&, at::TensorList,
                                                             at::ScalarType, at::ScalarType, int64_t,
                                                             c10::List<bool>);

}  // namespace shoestring::gemm
