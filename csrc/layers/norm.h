#pragma once

// What rms_norm and layer_norm share: rows of x's last dimension, from their kernels.

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

/// Refuses an x that is no rows of numbers, and a `t` (weight, bias) that does not go with it.
void check_x(const char* op, const Tensor& x, double eps);
void check_vector(const char* op, const char* name, const Tensor& x, const OptionalTensor& t);

struct Forward {
  Tensor y, sum, mean,
      rstd;  // sum: x + residual, with one; mean: if centred; rstd fp32 (fp64 for fp64), one a row
};
Forward forward(Backend backend, const char* op, const Tensor& x, const OptionalTensor& residual,
                const OptionalTensor& weight, const OptionalTensor& bias, const Options& options);

/// The gradients by x (grad_sum added), and as asked for by weight and bias, else undefined. mean: undefined
/// if not centred.
std::tuple<Tensor, Tensor, Tensor> backward(Backend backend, const char* op, const Tensor& grad,
                                            const OptionalTensor& grad_sum, const Tensor& x,
                                            const OptionalTensor& weight, const Tensor& mean,
                                            const Tensor& rstd, const Options& options, bool weight_grad,
                                            c10::optional<at::ScalarType> bias);

/// rms_norm_forward through the dispatcher.
std::tuple<Tensor, Tensor, Tensor> call_rms_norm_forward(const Tensor& x, const OptionalTensor& residual,
                                                         const OptionalTensor& weight, double eps,
                                                         double offset, c10::string_view casting);

/// t, or an empty tensor where t is undefined, as operators return it.
inline Tensor or_none(const Tensor& t, const Tensor& like) {
  return t.defined() ? t : at::empty({0}, like.options());
}

/// The type of a row's mean and rstd.
inline at::ScalarType statistics_type(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace shoestring::layers::norm
