#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <shoestring/core/export.h>

namespace shoestring {

struct EmbeddingOptions {
  /// Index of a row that gets no gradient.
  TORCH_ARG(std::optional<int64_t>, padding_idx) = std::nullopt;
  /// Divides the gradient of a row by the number of its ids.
  TORCH_ARG(bool, scale_grad_by_freq) = false;
};

/// Returns the rows of `weight` (rows, features) for integer ids (...), with the shape (..., features), as
/// torch::nn::functional::embedding does. On the CPU, backward writes the dense gradient of the weight in one
/// pass. A row's gradients are added in the order of its ids, in fp32 (fp64 for fp64), and rounded once. The
/// result does not depend on the number of threads.
SHOESTRING_API at::Tensor embedding(const at::Tensor& ids, const at::Tensor& weight,
                                    const EmbeddingOptions& options = {});

}  // namespace shoestring
