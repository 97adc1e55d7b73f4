#pragma once

// What the CPU and the CUDA side of linear_cross_entropy share: the arguments' checks and the results' form.

#include <array>
#include <optional>
#include <tuple>

#include <ATen/core/Tensor.h>

namespace shoestring::cross_entropy {

constexpr const char* kOp = "linear_cross_entropy";

/// Which gradients are wanted: hidden, weight, bias.
using Mask = std::array<bool, 3>;

inline bool any(const Mask& mask) { return mask[0] || mask[1] || mask[2]; }

/// Throws where an argument does not fit. What the targets hold, each device looks at itself.
void check(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
           const std::optional<at::Tensor>& bias, c10::string_view reduction, double label_smoothing, double softcap,
           int64_t workspace_mb);

struct Result {
  at::Tensor loss;  // compute type
  at::Tensor grad_hidden, grad_weight, grad_bias;  // undefined where not wanted
};

/// What the operators return: the gradients, empty where not wanted, grad_hidden in hidden's shape.
std::tuple<at::Tensor, at::Tensor, at::Tensor> gradients(const Result& result, const at::Tensor& hidden);

}  // namespace shoestring::cross_entropy
