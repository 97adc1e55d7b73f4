#pragma once

// Finds a learning rate by trying many of them.

#include <cstdint>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <shoestring/core/export.h>
#include <shoestring/runs/training.h>

namespace shoestring {

struct SHOESTRING_API FindLrOptions {
  /// The first and the last learning rate.
  TORCH_ARG(double, start) = 1e-7;
  TORCH_ARG(double, end) = 10;
  /// Number of steps from the first to the last, at least 10. The rates grow exponentially.
  TORCH_ARG(int64_t, steps) = 100;
  /// Number of passes, each with other random numbers.
  TORCH_ARG(int64_t, passes) = 2;
};

/// The losses of one pass over the learning rates.
struct SHOESTRING_API LrPass {
  std::vector<double> lrs, losses;
  /// The rate at which the smoothed loss falls most steeply.
  double steepest;
  /// A tenth of the rate at which the smoothed loss is least.
  double tenth;
};

struct SHOESTRING_API LrRange {
  std::vector<LrPass> passes;
  /// The geometric mean of the passes' steepest rates.
  double suggestion;
  /// The largest steepest rate over the least. Far above 1, the suggestion depends on chance.
  double spread;
};

/// Returns whether the smoothed loss is not finite, or above 4 times the least one, at the end or before.
SHOESTRING_API bool lr_losses_diverge(const std::vector<double>& losses);

/// Returns the learning rates at which the smoothed loss falls most steeply, and a tenth of that at which it
/// is least. The curve ends where it diverges. Throws c10::Error if the loss never falls below its start.
SHOESTRING_API LrPass judge_lrs(const std::vector<double>& lrs, const std::vector<double>& losses);

/// Tries learning rates in short runs whose rate grows with each step (Smith, arXiv 1506.01186). `step` takes
/// one training step, clears the gradients before or after, and returns the loss. The rates are those of the
/// group with the highest rate; other groups keep their ratio to it. Afterwards everything that `run` names
/// is as before, bit for bit, also after an error. Throws c10::Error if the loss never falls, or if `step`
/// sets the learning rate itself. The Python counterpart is shoestring.find_lr. Example:
///
///     TrainingRun run{training_tensors(*model), {&optimizer}};
///     const LrRange range = find_lr([&] { return train_step(); }, run);
SHOESTRING_API LrRange find_lr(const std::function<at::Tensor()>& step, TrainingRun& run,
                               const FindLrOptions& options = {});

}  // namespace shoestring
