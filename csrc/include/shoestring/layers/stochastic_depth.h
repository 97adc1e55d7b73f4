#pragma once

// Stochastic depth: residual branches that are left out at random, together with their work.

#include <cstdint>
#include <functional>
#include <string>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <shoestring/core/export.h>

namespace shoestring {

struct SHOESTRING_API StochasticDepthOptions {
  StochasticDepthOptions(double p, int64_t step, int64_t layer) : p_(p), step_(step), layer_(layer) {}
  /// Probability that a row, or the whole branch, is left out, in [0, 1).
  TORCH_ARG(double, p);
  /// Step of the training; at least 0. Each step draws anew.
  TORCH_ARG(int64_t, step);
  /// Number of the branch in the model; at least 0. Each branch draws on its own.
  TORCH_ARG(int64_t, layer);
  /// - "row": each row of x, that is each index of the first dimension, is left out with probability p.
  /// - "batch": the branch is left out for all of x with probability p.
  TORCH_ARG(std::string, mode) = "row";
  /// Seed of the random numbers.
  TORCH_ARG(int64_t, seed) = 0;
  /// Whether rows are left out at all. Without it, the result is x + fn(x).
  TORCH_ARG(bool, training) = true;
};

/// Returns x + fn(x) / (1 - p) for the rows of x that are kept, and x for all others. fn is called with the
/// kept rows only, or not at all, so that time and memory of its forward and backward shrink as well. The
/// Python counterpart is shoestring.stochastic_depth. Example:
///
///     const auto options = StochasticDepthOptions(0.2, step, /*layer=*/3).training(model->is_training());
///     x = stochastic_depth([&](const at::Tensor& rows) { return block->forward(rows); }, x, options);
///
/// The kept rows are a pure function of seed, step and layer, so recomputation in backward and a resumed run
/// keep the same rows. The host draws them and does not wait for the device. Each row is kept with
/// probability 1 - p. The number of kept rows is (1 - p) rows, rounded up or down at random, so it takes at
/// most two values.
///
/// fn must map rows to as many rows, of the shape of x. Its result is converted to the dtype of x. The result
/// never shares memory with x. Throws c10::ValueError if an option is out of range, or fn returns another
/// shape.
SHOESTRING_API at::Tensor stochastic_depth(const std::function<at::Tensor(const at::Tensor&)>& fn,
                                           const at::Tensor& x, const StochasticDepthOptions& options);

/// Returns p (layer + 1) / layers, the probability of branch `layer` of `layers` if that of the last branch
/// is p. Layers count from 0. The schedule is that of Huang et al., arXiv 1603.09382.
SHOESTRING_API double stochastic_depth_rate(int64_t layer, int64_t layers, double p);

}  // namespace shoestring
