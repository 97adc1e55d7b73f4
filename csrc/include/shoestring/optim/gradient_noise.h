#pragma once

// The noise of gradients, the batch size that follows from it, and learning rates for other batch sizes.
// shoestring/optim.h includes this header.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

#include <shoestring/core/export.h>
#include <shoestring/files/safetensors.h>
#include <shoestring/optim/base.h>

namespace shoestring::optim {

namespace detail {
class NoiseAverages;
}

/// Measures the noise of gradients while a model trains with accumulate(). The Python counterpart is
/// shoestring.optim.GradientNoise.
///
///     GradientNoise noise(optimizer);
///     for (...) {
///       for (int i = 0; i < 4; ++i) {
///         const auto sums = i < 3 ? optimizer.accumulate() : nullptr;
///         (loss_of(batch(rows)) / 4).backward();
///       }
///       noise.update(rows, 4);  // before step()
///       optimizer.step();
///       optimizer.zero_grad();
///     }
///     std::cout << noise.critical_batch();
///
/// With b rows in a micro-batch and B in a step, the mean squared norms |g_b|^2 and |g_B|^2 of their
/// gradients give the noise S = (|g_b|^2 - |g_B|^2) / (1/b - 1/B), which is the trace of the covariance of
/// one row's gradient, and the square |G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b) of the true gradient
/// (McCandlish et al., arXiv 1812.06162, appendix A.1). Both are averaged exponentially, and divided
/// afterwards. Losses are means over rows; a row may be a token.
///
/// A norm is one pass over a gradient that backward has just written. Nothing waits for the device.
class SHOESTRING_API GradientNoise {
 public:
  /// `optimizer` must live as long as this object. `decay` is the factor of the old average of S and |G|^2,
  /// in [0, 1). Throws c10::Error if it is not.
  explicit GradientNoise(LowMemoryOptimizer& optimizer, double decay = 0.99);
  ~GradientNoise();
  GradientNoise(const GradientNoise&) = delete;
  GradientNoise& operator=(const GradientNoise&) = delete;

  /// Takes the norms of a step's gradients, after the backward of the last micro-batch and before step().
  /// `rows` is the number of rows of each micro-batch, and `micro_batches` their number, at least 2. The
  /// gradients are those of losses that are divided by `micro_batches`. Throws c10::Error if a number is out
  /// of range, or if there are no gradients of accumulate().
  void update(int64_t rows, int64_t micro_batches);
  /// Takes numbers that were measured elsewhere, such as on several processes: the mean squared norms of the
  /// gradients of `rows` rows, and of `all_rows` rows, fp32 tensors with one element.
  void observe(const at::Tensor& square, double rows, const at::Tensor& all_square, double all_rows);

  /// Returns S, or NaN before the first update. Waits for the device, as the next two functions do.
  double noise() const;
  /// Returns |G|^2, which may be negative while the noise outweighs it, or NaN before the first update.
  double square() const;
  /// Returns S / |G|^2, in rows. Batches well below it train as many rows to the same loss; larger ones waste
  /// rows. It is infinite while |G|^2 is not above 0, and NaN before the first update.
  double critical_batch() const;

  /// Returns the averages, as the fp64 tensor "averages" of 3 numbers, and "decay".
  TensorDict state() const;
  /// Restores a state of state(). Throws c10::Error, and changes nothing, if it does not fit.
  void load_state(const TensorDict& state);

 private:
  LowMemoryOptimizer* optimizer_;
  std::unique_ptr<detail::NoiseAverages> averages_;
};

/// Returns the learning rate for another batch size. The rule "sqrt" multiplies by the root of the ratio of
/// the batch sizes, which suits Adam and its relatives (arXiv 2205.10287), and "linear" by the ratio, which
/// suits SGD (arXiv 1706.02677). With `critical_batch`, both batch sizes count as at most that size, because
/// neither rule holds beyond it. Throws c10::Error if a number is not above 0.
SHOESTRING_API double scale_lr(double lr, double base_batch, double batch, const std::string& rule = "sqrt",
                               std::optional<double> critical_batch = std::nullopt);

}  // namespace shoestring::optim
