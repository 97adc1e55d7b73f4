#pragma once

// Forward and backward shared by rms_norm and layer_norm, which normalise rows of x's last dimension.

#include <optional>
#include <tuple>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/string_view.h>

#include "core/tensors.h"
#include "layers/norm_table.h"

namespace shoestring::layers::norm {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

struct Options {
  double eps;
  double offset = 0;
  kernels::Upcast upcast = kernels::Upcast::kGemma;
  bool centred = false;
  c10::optional<at::ScalarType> out_dtype = c10::nullopt;  // dtype of y; nullopt: the dtype of sum or x
};

/// check_x raises unless x is floating-point with at least one dimension, and eps is not negative.
/// check_vector raises unless the weight or bias `t` fits x.
void check_x(const char* op, const Tensor& x, double eps);
void check_vector(const char* op, const char* name, const Tensor& x, const OptionalTensor& t);
/// check_residual raises unless the residual, if given, has x's shape, device and dtype. If y has the dtype
/// of x, the residual may be fp32. The message ends with `hint`.
void check_residual(const char* op, const Tensor& x, const OptionalTensor& residual,
                    c10::optional<at::ScalarType> out_dtype = c10::nullopt, const char* hint = "");

/// Raises unless `out_dtype` is nullopt, or bf16 or fp16 while x or, if given, the residual is fp32.
void check_out_dtype(const char* op, const Tensor& x, const OptionalTensor& residual,
                     c10::optional<at::ScalarType> out_dtype);

struct Forward {
  // y: the normalised result. sum: x + residual; undefined without a residual. mean and rstd: one value per
  // row, fp64 if x is fp64, else fp32. mean is undefined for rms_norm.
  Tensor y, sum, mean, rstd;
};
/// Computes the norm of x, or of x + residual.
Forward forward(Backend backend, const char* op, const Tensor& x, const OptionalTensor& residual,
                const OptionalTensor& weight, const OptionalTensor& bias, const Options& options);

struct Backward {
  // Gradients that are not wanted are undefined. rounded_x: the gradient of x in the dtype of `grad`.
  Tensor x, weight, bias, rounded_x;
};
/// Computes the gradients of x, weight and bias; grad_sum is added to the gradient of x. mean: undefined for
/// rms_norm. bias: the dtype of the bias's gradient, or nullopt if that gradient is not wanted.
Backward backward(Backend backend, const char* op, const Tensor& grad, const OptionalTensor& grad_sum,
                  const Tensor& x, const OptionalTensor& weight, const Tensor& mean, const Tensor& rstd,
                  const Options& options, bool weight_grad, c10::optional<at::ScalarType> bias,
                  bool rounded_x = false);

/// Calls the operator _rms_norm_forward through PyTorch's dispatcher.
std::tuple<Tensor, Tensor, Tensor> call_rms_norm_forward(const Tensor& x, const OptionalTensor& residual,
                                                         const OptionalTensor& weight, double eps,
                                                         double offset, c10::string_view upcast,
                                                         c10::optional<at::ScalarType> out_dtype);

/// Calls the operator _layer_norm_forward through PyTorch's dispatcher.
std::tuple<Tensor, Tensor, Tensor, Tensor> call_layer_norm_forward(const Tensor& x,
                                                                   const OptionalTensor& residual,
                                                                   const OptionalTensor& weight,
                                                                   const OptionalTensor& bias, double eps,
                                                                   c10::optional<at::ScalarType> out_dtype);

/// Returns t or, if t is undefined, an empty tensor, because operators cannot return undefined tensors.
inline Tensor or_none(const Tensor& t, const Tensor& like) {
  return t.defined() ? t : at::empty({0}, like.options());
}

/// Returns the dtype of the mean and rstd of rows: fp64 if x is fp64, else fp32.
inline at::ScalarType statistics_type(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace shoestring::layers::norm
