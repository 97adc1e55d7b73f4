#pragma once

// Protection of a training run against bad steps. shoestring/optim.h includes this header.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <shoestring/core/export.h>
#include <shoestring/files/safetensors.h>
#include <shoestring/optim/grad_scaler.h>

namespace shoestring::optim {

namespace detail {
class GuardCore;
class HostCopy;
}  // namespace detail

struct SHOESTRING_API GuardOptions {
  GuardOptions(std::string on = "skip") : on_(std::move(on)) {}
  /// The consequence of a bad step, which is never taken itself:
  /// - "skip": training goes on.
  /// - "stop": the next call of step() or check() throws.
  /// - "rollback": the next call of step() or check() restores weights and state from the last copy.
  TORCH_ARG(std::string, on);
  /// A loss is a spike if it is above mean + spike * deviation of the losses before it. Without a number,
  /// only NaN and infinity are bad. A deviation below 1 % of the mean counts as 1 %.
  TORCH_ARG(std::optional<double>, spike);
  /// Number of good losses over which mean and deviation are taken, with weights that fall exponentially once
  /// so many losses are known. No loss before is a spike.
  TORCH_ARG(int64_t, window) = 100;
  /// "rollback": number of steps from one copy to the next.
  TORCH_ARG(int64_t, every) = 100;
  /// "skip": step() throws after this number of bad steps in a row; 10 if it is not set. "rollback": step()
  /// throws instead of restoring the same copy more often; 3 if it is not set.
  TORCH_ARG(std::optional<int64_t>, limit);
  /// Name of a process group of c10d whose processes judge each step together: by the mean of their losses,
  /// and by the gradients of all. "" if the process is alone.
  TORCH_ARG(std::string, group) = "";
};

/// A step that was not taken.
struct SHOESTRING_API BadStep {
  int64_t step;        // counted from 0
  std::string reason;  // "loss" or "gradient" if it was not finite, or "spike"
  double loss;         // NaN if step() was called without a loss
};

/// Skips steps whose loss or gradients are NaN or infinite, or whose loss is a spike. The Python counterpart
/// is shoestring.optim.Guard.
///
///     Guard guard(optimizer, GuardOptions("rollback").spike(6));
///     guard.include(*model);  // its buffers are restored as well
///     for (const auto& batch : batches) {
///       optimizer.zero_grad();
///       const auto loss = model->forward(batch);
///       loss.backward();
///       guard.step(loss);  // instead of optimizer.step()
///     }
///     guard.check();
///
/// Several optimizers, such as Muon and AdamW for different parameters, share a guard: all take a step, or
/// none does.
///
/// The device decides whether a step is taken, and the host learns it in the next call of step(), so that it
/// does not wait for the device. This is so for the optimizers of shoestring::optim that derive from
/// LowMemoryOptimizer, and for SAM around one of them. Before a step of any other optimizer, the host waits
/// for the decision. With "rollback" the host also waits when it takes a copy, once in `every` steps.
///
/// A copy holds, in host memory, the parameters and the state of the optimizer, and the buffers of the
/// modules that include() names. It is taken before a step whose loss and gradients are good.
class SHOESTRING_API Guard {
 public:
  /// `optimizer` must live as long as the guard. Throws c10::Error if an option is out of range or has no
  /// effect with `on`.
  explicit Guard(torch::optim::Optimizer& optimizer, const GuardOptions& options = {});
  /// Guards several optimizers, which step in this order. Throws c10::Error if there is none.
  explicit Guard(std::vector<torch::optim::Optimizer*> optimizers, const GuardOptions& options = {});
  Guard(Guard&&) noexcept;
  Guard& operator=(Guard&&) noexcept;
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;
  ~Guard();

  /// "rollback": restores the buffers of the module as well. `module` must live as long as the guard.
  void include(torch::nn::Module& module);
  /// Adds a loss to those of the coming step, one of several micro-batches. A step is judged by their mean.
  void watch(const at::Tensor& loss);
  /// Takes a step of the optimizers unless the losses of watch() and `loss` or a gradient are bad. Before,
  /// acts on the step before, if it was bad: throws c10::Error with "stop", or after `limit`, and with
  /// "rollback" restores the last copy, and then takes no step, because the gradients belong to the weights
  /// that are gone. `loss` may be undefined if there is no `spike`, or after watch().
  ///
  /// Throws c10::Error, before anything has changed, if an optimizer steps in backward, or if one of several
  /// holds gradients of accumulate(), which it would judge alone.
  void step(const at::Tensor& loss = {});
  /// Does the same with the gradients of a scaled loss. Call scaler.update() next. Gradients that are not
  /// finite are left to the scaler, which skips the step of the optimizer that has them. They are not bad:
  /// the scale was too large.
  void step(GradScaler& scaler, const at::Tensor& loss = {});
  /// Acts on the last step, if it was bad, as the next call of step() would. Waits for the device. Call it at
  /// the end of training, and before a checkpoint is written.
  void check();

  /// Returns the number of steps so far, with those that were not taken.
  int64_t steps() const;
  /// Returns how often a copy has been restored.
  int64_t rollbacks() const;
  /// Returns the steps that were not taken because they were bad, up to the one before the last call of
  /// step(), or the last after check().
  const std::vector<BadStep>& bad_steps() const;

  /// Returns the state under the names of Python's state_dict(). The copy is not part of it: the next step
  /// takes a new one. Waits for the device.
  TensorDict state() const;
  /// Restores a state of state(). If it does not fit, throws c10::Error and changes nothing.
  void load_state(const TensorDict& state);

 private:
  void take(const c10::function_ref<at::Tensor(torch::optim::Optimizer&, const at::Tensor&)>& step,
            bool with_gradients);
  bool review();
  void copy();

  std::vector<torch::optim::Optimizer*> optimizers_;
  std::vector<torch::nn::Module*> modules_;
  std::unique_ptr<detail::GuardCore> core_;
  std::unique_ptr<detail::HostCopy> copy_;
};

}  // namespace shoestring::optim
