#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <shoestring/core/export.h>

namespace shoestring {

/// The products of a linear layer, as bits of LinearOptions::library.
enum LinearProduct : int64_t { kLinearForward = 1, kLinearGradX = 2, kLinearGradWeight = 4 };

struct LinearOptions {
  /// A tensor (..., out_features) that is added to the result in the same product. If its dtype is wider, the
  /// result has its dtype. linear_group accepts none.
  TORCH_ARG(std::optional<at::Tensor>, residual) = std::nullopt;
  /// The dtype to which the operands of the product are rounded, and the dtype of the result. The default is
  /// the dtype of x; under autocast, the autocast dtype.
  TORCH_ARG(std::optional<at::ScalarType>, dtype) = std::nullopt;
  /// The sum of the products that PyTorch's BLAS library computes on the CPU. This package computes the
  /// others. The results differ within rounding.
  TORCH_ARG(int64_t, library) = 0;
};

/// Computes x W^T + bias, as torch::nn::functional::linear does, for a trainable weight W (out_features,
/// in_features). x and the weight keep their dtypes under autocast, and so do their gradients. Backward saves
/// x, rounded to the dtype of the product, and can be differentiated.
SHOESTRING_API at::Tensor linear(const at::Tensor& x, const at::Tensor& weight,
                                 const std::optional<at::Tensor>& bias = std::nullopt,
                                 const LinearOptions& options = {});

/// Computes x W^T + bias for several layers that read the same x. `biases` is empty, or holds one bias or
/// nullopt for each weight. x is saved once, and the products of backward add up its gradient.
SHOESTRING_API std::vector<at::Tensor> linear_group(const at::Tensor& x, at::TensorList weights,
                                                    const std::vector<std::optional<at::Tensor>>& biases = {},
                                                    const LinearOptions& options = {});

/// Compute dense layers of any device as torch::nn::functional::linear does: by linear or linear_group if
/// these are faster for layers of this shape and dtype on this CPU, else by PyTorch's linear. The
/// results differ within rounding.
///
/// On CPUs with AMX, products in bf16 are computed by this package, also under autocast. On other CPUs, a
/// group of layers is measured once in a process, at its first call with 32 tokens or more, in about 50 ms.
SHOESTRING_API at::Tensor dense_linear(const at::Tensor& x, const at::Tensor& weight,
                                       const std::optional<at::Tensor>& bias = std::nullopt);
SHOESTRING_API std::vector<at::Tensor> dense_linear_group(
    const at::Tensor& x, at::TensorList weights, const std::vector<std::optional<at::Tensor>>& biases = {});

/// Computes self (m, n) = beta * self + alpha * mat1 (m, k) mat2 (k, n), accumulated in fp32. self may be
/// fp32 if the matrices are bf16 or fp16, for example an fp32 buffer that accumulates a weight's gradient.
/// Not differentiable.
SHOESTRING_API void addmm_(const at::Tensor& self, const at::Tensor& mat1, const at::Tensor& mat2,
                           double beta = 1, double alpha = 1);

}  // namespace shoestring
