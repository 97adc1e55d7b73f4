#pragma once

// Scaling of the loss for training in fp16. shoestring/optim.h includes this header.

#include <cstdint>
#include <unordered_map>

#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <shoestring/core/export.h>
#include <shoestring/files/safetensors.h>

namespace shoestring::optim {

struct SHOESTRING_API GradScalerOptions {
  /// The first scale; above 0.
  TORCH_ARG(double, init_scale) = 65536.0;
  /// update() multiplies the scale by this factor after growth_interval steps without a skipped one; above 1.
  TORCH_ARG(double, growth_factor) = 2.0;
  /// update() multiplies the scale by this factor after a skipped step; above 0 and below 1.
  TORCH_ARG(double, backoff_factor) = 0.5;
  /// Number of consecutive steps without a skipped one after which the scale grows.
  TORCH_ARG(int64_t, growth_interval) = 2000;
  /// false makes step() call optimizer.step(), and all other functions return without an effect.
  TORCH_ARG(bool, enabled) = true;
};

/// Scales the loss, so that small gradients do not become zero in fp16, like torch.amp.GradScaler in Python
/// (arXiv 1710.03740, section 3.2). The scales, growth trackers and weights are those of Python, bit for bit.
///
///     GradScaler scaler;
///     for (const auto& [input, target] : batches) {
///       optimizer.zero_grad();
///       at::Tensor loss;
///       {
///         const shoestring::AutocastGuard autocast(at::kCUDA, at::kHalf);
///         loss = loss_of(model->forward(input), target);
///       }
///       scaler.scale(loss).backward();
///       scaler.step(optimizer);
///       scaler.update();
///     }
///
/// The scale and the growth tracker are tensors on the device of the first loss. scale(), unscale_() and
/// update() never wait for the device. step() does not wait for it with the optimizers of shoestring::optim
/// that derive from LowMemoryOptimizer, nor with SAM around one of them: they divide the gradients and skip
/// the step on the device. (With set_offload("cpu") the step itself is on the host.) step() of every other
/// optimizer, such as LibTorch's and GaLore, reads once from the device whether all gradients are finite.
///
/// Parameters may lie on several devices. One scaler may serve several optimizers: call step() for each, and
/// then update() once.
class SHOESTRING_API GradScaler {
 public:
  /// Raises c10::Error if an option is out of range.
  explicit GradScaler(const GradScalerOptions& options = {});
  GradScaler(GradScaler&&) noexcept = default;
  GradScaler& operator=(GradScaler&&) noexcept = default;
  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;

  /// Returns output times the scale. The first call creates the scale on the device of `output`. Scale every
  /// loss of a step, also those of micro-batches whose gradients are added up.
  at::Tensor scale(const at::Tensor& output);

  /// Divides the gradients of the optimizer by the scale in place, for example to clip grad() before step().
  /// step() then uses grad() as it is, and is skipped if a gradient was not finite in this call. Call it at
  /// most once per optimizer before update(), when all gradients of the step have been accumulated.
  ///
  /// Raises c10::Error if a gradient is fp16, since an fp16 gradient may underflow, or if the optimizer has
  /// gradients of accumulate(). (Both are possible without unscale_(): LowMemoryOptimizer divides within the
  /// step, and set_max_grad_norm clips within the step.)
  void unscale_(torch::optim::Optimizer& optimizer);

  /// Takes the optimizer's step with the gradients divided by the scale, or skips the step if a gradient is
  /// not finite. SAM's second half is a step, and skips also if the first half's gradients were not finite.
  /// grad() remains multiplied by the scale after the step of an optimizer that divides within the step.
  ///
  /// Raises c10::Error if scale() has not been called, if step() has been called for this optimizer since
  /// the last update(), and, for optimizers that do not divide within the step, if no parameter has a
  /// gradient or if a gradient is fp16.
  ///
  /// `skip`, one fp32 number, skips the step as well if it is not 0, and then the scale does not shrink on
  /// its account. The gradients are then divided by unscale_(), if that has not happened before.
  void step(torch::optim::Optimizer& optimizer, const at::Tensor& skip = {});

  /// Multiplies the scale by backoff_factor if any step since the last update() was skipped, and by
  /// growth_factor after growth_interval updates in a row without a skipped step. Raises c10::Error if no
  /// step() or unscale_() since the last update() has found a gradient.
  void update();
  /// Sets the scale to a number above 0. The growth tracker does not change.
  void update(double new_scale);
  /// Sets the scale to the value of a tensor with one element, without reading it on the host.
  void update(const at::Tensor& new_scale);

  /// Returns the scale, or 1 if the scaler is disabled. Waits for the device.
  double get_scale() const;
  bool is_enabled() const { return options_.enabled(); }

  /// Returns copies of the tensors "scale", "growth_factor", "backoff_factor", "growth_interval" and
  /// "_growth_tracker", of one element each: the fields of GradScaler.state_dict() in Python. Returns nothing
  /// if the scaler is disabled. Call state() after update(). save_safetensors writes the result to a file.
  TensorDict state() const;
  /// Restores what state() has returned, in tensors of any dtype. Does nothing if the scaler is disabled. If
  /// a field is missing or out of range, raises c10::Error and changes nothing. Waits for the device if the
  /// tensors are on one.
  void load_state(const TensorDict& state);

  /// Saves and loads state() in LibTorch's archives.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  enum class Stage { kReady, kUnscaled, kStepped };
  // The state of an optimizer since the last update(). found_inf is an fp32 scalar, 1 if a gradient
  // was not finite, or undefined if no gradient has been looked at.
  struct Progress {
    Stage stage = Stage::kReady;
    at::Tensor found_inf;
  };

  void expect_scale(const char* function) const;

  GradScalerOptions options_;
  at::Tensor scale_, growth_tracker_;  // fp32 and int32 scalars; undefined before the first call of scale()
  int64_t init_growth_tracker_ = 0;
  std::unordered_map<const torch::optim::Optimizer*, Progress> progress_;
};

}  // namespace shoestring::optim
