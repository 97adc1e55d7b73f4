#pragma once

// Forward and backward over rows of x's last dimension, which rms_norm and layer_norm share.

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
  kernels::Casting casting = kernels::Casting::kGemma;
  bool centred = false;
};

/// Raise unless x is floating-point with at least one dimension, and unless `t` (weight or bias) fits x.
void check_x(const char* op, const Tensor& x, double eps);
void check_vector(const char* op, const char* name, const Tensor& x, const OptionalTensor& t);

struct Forward {
  // sum: x + residual, if there is a residual. mean (only if centred) and rstd: one number for each row, fp32
  // (fp64 for fp64).
  Tensor y, sum, mean, rstd;
};
Forward forward(Backend backend, const char* op, const Tensor& x, const OptionalTensor& residual,
                const OptionalTensor& weight, const OptionalTensor& bias, const Options& options);

/// Returns the gradients of x (plus grad_sum), weight and bias. A gradient that is not wanted is undefined.
/// mean: undefined if not centred. bias: the dtype of the bias's gradient, or nullopt if it is not wanted.
std::tuple<Tensor, Tensor, Tensor> backward(Backend backend, const char* op, const Tensor& grad,
                                            const OptionalTensor& grad_sum, const Tensor& x,
                                            const OptionalTensor& weight, const Tensor& mean,
                                            const Tensor& rstd, const Options& options, bool weight_grad,
                                            c10::optional<at::ScalarType> bias);

/// Calls rms_norm_forward through the dispatcher.
std::tuple<Tensor, Tensor, Tensor> call_rms_norm_forward(const Tensor& x, const OptionalTensor& residual,
                                                         const OptionalTensor& weight, double eps,
                                                         double offset, c10::string_view casting);

/// Returns t or, if t is undefined, the empty tensor that operators return in its place.
inline Tensor or_none(const Tensor& t, const Tensor& like) {
  return t.defined() ? t : at::empty({0}, like.options());
}

/// Returns the dtype of a row's mean and rstd.
inline at::ScalarType statistics_type(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace shoestring::layers::norm
