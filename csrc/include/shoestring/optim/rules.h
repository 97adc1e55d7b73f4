#pragma once

// The optimizers with an update rule of their own: AdamW, Lion, SGD, AdEMAMix, Schedule-Free AdamW, LAMB,
// Adafactor, CAME and Muon.

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <shoestring/optim/base.h>

namespace shoestring::optim {

/// Options of AdamW. The moments take 2.03 bytes per parameter in 8 bits, 1.16 in 4 bits, 4 as bf16 and 8 as
/// fp32.
class SHOESTRING_API AdamWOptions : public OptionsOf<AdamWOptions> {
 public:
  using Betas = std::tuple<double, double>;
  AdamWOptions(double lr = 1e-3) : OptionsOf(lr) {}

  /// First beta: decay of the running mean of gradients. Second beta: decay of the running mean of squared
  /// gradients.
  TORCH_ARG(Betas, betas) = { 0.9, 0.999 };
  /// Constant that is added to the square root of the second moment.
  TORCH_ARG(double, eps) = 1e-8;
  /// Decoupled weight decay, applied before the update, as in PyTorch.
  TORCH_ARG(double, weight_decay) = 1e-2;

 private:
  const detail::Rule& rule() const override;
  std::vector<detail::Field> fields() override;
};

/// AdamW (arXiv 1711.05101).
class SHOESTRING_API AdamW : public OptimizerOf<AdamWOptions> {
  using OptimizerOf::OptimizerOf;
};

/// Options of Lion, whose state is half as large as AdamW's.
class SHOESTRING_API LionOptions : public OptionsOf<LionOptions> {
 public:
  using Betas = std::tuple<double, double>;
  /// Use a learning rate 3 to 10 times smaller than AdamW's, and a weight_decay larger by the same factor.
  LionOptions(double lr = 1e-4) : OptionsOf(lr) {}

  /// First beta: weight of the old moment in the update. Second beta: weight of the old moment in the new
  /// moment.
  TORCH_ARG(Betas, betas) = { 0.9, 0.99 };
  /// Decoupled weight decay, applied before the update.
  TORCH_ARG(double, weight_decay) = 0.0;

 private:
  const detail::Rule& rule() const override;
  std::vector<detail::Field> fields() override;
};

/// Lion (arXiv 2302.06675): every weight moves by exactly lr, up or down.
class SHOESTRING_API Lion : public OptimizerOf<LionOptions> {
  using OptimizerOf::OptimizerOf;
};

/// Options of SGD with momentum, whose state is half as large as AdamW's.
class SHOESTRING_API SGDOptions : public OptionsOf<SGDOptions> {
 public:
  SGDOptions(double lr = 1e-3) : OptionsOf(lr) {}

  /// Momentum; must be above 0. SGD without momentum has no state: use torch::optim::SGD.
  TORCH_ARG(double, momentum) = 0.9;
  /// Dampening: the share of the gradient that is kept out of the momentum buffer, except on the first step.
  /// Must be 0 with nesterov.
  TORCH_ARG(double, dampening) = 0.0;
  /// L2 penalty, added to the gradient after clipping.
  TORCH_ARG(double, weight_decay) = 0.0;
  TORCH_ARG(bool, nesterov) = false;

 private:
  const detail::Rule& rule() const override;
  std::vector<detail::Field> fields() override;
  void check(const detail::Reporter& reporter) const override;
};

/// SGD with momentum; computes the same as torch::optim::SGD.
class SHOESTRING_API SGD : public OptimizerOf<SGDOptions> {
  using OptimizerOf::OptimizerOf;
};

/// Options of AdEMAMix. Its state is AdamW's plus a slow mean of 2 bytes per parameter (4 with fp32 state).
class SHOESTRING_API AdEMAMixOptions : public OptionsOf<AdEMAMixOptions> {
 public:
  using Betas = std::tuple<double, double, double>;
  using Steps = std::optional<int64_t>;
  AdEMAMixOptions(double lr = 1e-3) : OptionsOf(lr) {}

  /// Three decays: of the fast mean of gradients, of the mean of squared gradients, and of the slow mean of
  /// gradients.
  TORCH_ARG(Betas, betas) = { 0.9, 0.999, 0.9999 };
  /// alpha: weight of the slow mean in the update.
  TORCH_ARG(double, alpha) = 5.0;
  /// Number of steps in which the weight alpha of the slow mean rises from 0 to its value. With std::nullopt
  /// alpha is constant.
  TORCH_ARG(Steps, t_alpha) = std::nullopt;
  /// Number of steps in which the slow mean's decay rises from the first beta to the third. With std::nullopt
  /// it is constant.
  TORCH_ARG(Steps, t_beta3) = std::nullopt;
  TORCH_ARG(double, eps) = 1e-8;
  /// Decoupled weight decay, applied before the update.
  TORCH_ARG(double, weight_decay) = 1e-2;

 private:
  const detail::Rule& rule() const override;
  std::vector<detail::Field> fields() override;
  void check(const detail::Reporter& reporter) const override;
};

/// AdEMAMix (arXiv 2409.03137): AdamW with a second, slow mean of gradients.
class SHOESTRING_API AdEMAMix : public OptimizerOf<AdEMAMixOptions> {
  using OptimizerOf::OptimizerOf;
};

/// Options of Schedule-Free AdamW. The moments take 3.02 bytes per parameter in 8 bits, 2.53 in 4 bits, 4 as
/// bf16 and 8 as fp32.
class SHOESTRING_API ScheduleFreeAdamWOptions : public OptionsOf<ScheduleFreeAdamWOptions> {
 public:
  using Betas = std::tuple<double, double>;
  /// Use a learning rate 1 to 10 times larger than AdamW's.
  ScheduleFreeAdamWOptions(double lr = 2.5e-3) : OptionsOf(lr) {}

  /// First beta: weight of the average in the points where gradients are taken, above 0. Second beta: decay
  /// of the mean of squared gradients.
  TORCH_ARG(Betas, betas) = { 0.9, 0.999 };
  TORCH_ARG(double, eps) = 1e-8;
  /// Weight decay. It is part of the update, but is not divided by the root of the second moment.
  TORCH_ARG(double, weight_decay) = 0.0;
  /// Number of steps in which the learning rate rises linearly; 0 for no warm-up.
  TORCH_ARG(int64_t, warmup_steps) = 0;
  /// If true, the parameters hold the points at which gradients are taken; if false, they hold the average of
  /// the weights. train() and eval() of the optimizer set train_mode. It is saved with the options.
  TORCH_ARG(bool, train_mode) = true;

 private:
  const detail::Rule& rule() const override;
  std::vector<detail::Field> fields() override;
  void check(const detail::Reporter& reporter) const override;
  void check_step() const override;
};

/// Schedule-Free AdamW (arXiv 2405.15682) needs no learning rate schedule. It takes gradients at one point,
/// and evaluates the model at another point, an average of the weights.
///
/// The average covers all steps of a parameter, weighted by the square of the warm-up's learning rate. A
/// learning rate that is changed later does not affect the weights of the steps.
class SHOESTRING_API ScheduleFreeAdamW : public OptimizerOf<ScheduleFreeAdamWOptions> {
 public:
  using OptimizerOf::OptimizerOf;
  /// train() sets the parameters to the point at which gradients are taken; eval() sets them to the average
  /// of the weights. Calling the same function twice changes nothing. An optimizer starts in train mode, and
  /// step() raises in eval mode. Save parameters and optimizer in the same mode. Switching to the other mode
  /// and back changes a weight by at most one unit in the last place.
  void train() { set_mode(true); }
  void eval() { set_mode(false); }

 private:
  void set_mode(bool train_mode);
};

/// Options of LAMB, whose state is as large as AdamW's.
class SHOESTRING_API LAMBOptions : public OptionsOf<LAMBOptions> {
 public:
  using Betas = std::tuple<double, double>;
  /// lr is the length of a parameter's step, as a share of the norm of that parameter.
  LAMBOptions(double lr = 1e-3) : OptionsOf(lr) {}

  TORCH_ARG(Betas, betas) = { 0.9, 0.999 };
  TORCH_ARG(double, eps) = 1e-6;
  /// Weight decay. It is added to the update before LAMB takes the norm of the update.
  TORCH_ARG(double, weight_decay) = 1e-2;

 private:
  const detail::Rule& rule() const override;
  std::vector<detail::Field> fields() override;
};

/// LAMB (arXiv 1904.00962): AdamW's update, scaled to the norm of the weights.
class SHOESTRING_API LAMB : public OptimizerOf<LAMBOptions> {
  using OptimizerOf::OptimizerOf;
};

/// Options of Adafactor. Its state is 4 (rows + columns) bytes per matrix. With beta1 it adds a mean of
/// updates, in the chosen `state` format.
class SHOESTRING_API AdafactorOptions : public OptionsOf<AdafactorOptions> {
 public:
  using Eps = std::tuple<std::optional<double>, double>;
  /// lr is the upper bound of the relative step size, which is min(lr, 1 / sqrt(t)) in step t. The step size
  /// is relative to the root mean square of the parameter.
  AdafactorOptions(double lr = 1e-2) : OptionsOf(lr) {}

  /// Decay of a running mean of the updates. With 0, there is no mean.
  TORCH_ARG(double, beta1) = 0.0;
  /// Exponent e: the decay of squared gradients in step t is 1 - t^e.
  TORCH_ARG(double, beta2_decay) = -0.8;
  /// First: lower bound of the square root of the second moment (std::nullopt: depends on the parameter's
  /// dtype). Second: lower bound of a parameter's root mean square.
  TORCH_ARG(Eps, eps) = { std::nullopt, 1e-3 };
  /// Upper bound of the root mean square of an update.
  TORCH_ARG(double, d) = 1.0;
  TORCH_ARG(double, weight_decay) = 0.0;

 private:
  const detail::Rule& rule() const override;
  std::vector<detail::Field> fields() override;
};

/// Adafactor (arXiv 1804.04235): computes the same as torch.optim.Adafactor. With beta1 > 0 it also keeps a
/// running mean of the updates and applies the mean.
class SHOESTRING_API Adafactor : public OptimizerOf<AdafactorOptions> {
  using OptimizerOf::OptimizerOf;
};

/// Options of CAME. Its state is 8 (rows + columns) bytes per matrix, and a mean of updates in the chosen
/// `state` format.
class SHOESTRING_API CAMEOptions : public OptionsOf<CAMEOptions> {
 public:
  using Betas = std::tuple<double, double, double>;
  using Eps = std::tuple<double, double>;
  CAMEOptions(double lr = 2e-4) : OptionsOf(lr) {}

  /// Three decays: of the mean of updates (above 0), of squared gradients, and of squared distances between
  /// updates and their mean.
  TORCH_ARG(Betas, betas) = { 0.9, 0.999, 0.9999 };
  /// First: constant added to the squared gradients. Second: constant added to the squared distances between
  /// updates and their mean.
  TORCH_ARG(Eps, eps) = { 1e-30, 1e-16 };
  /// Upper bound of the root mean square of an update, applied before the update enters the mean.
  TORCH_ARG(double, clip_threshold) = 1.0;
  /// Decoupled weight decay, applied before the update.
  TORCH_ARG(double, weight_decay) = 0.0;

 private:
  const detail::Rule& rule() const override;
  std::vector<detail::Field> fields() override;
  void check(const detail::Reporter& reporter) const override;
};

/// CAME (arXiv 2307.02047): Adafactor with a running mean of updates. Elements whose updates differ much from
/// their mean take smaller steps.
class SHOESTRING_API CAME : public OptimizerOf<CAMEOptions> {
  using OptimizerOf::OptimizerOf;
};

/// Options of Muon, whose state is half as large as AdamW's.
class SHOESTRING_API MuonOptions : public OptionsOf<MuonOptions> {
 public:
  MuonOptions(double lr = 1e-3) : OptionsOf(lr) {}

  TORCH_ARG(double, momentum) = 0.95;
  /// Decoupled weight decay, applied before the update.
  TORCH_ARG(double, weight_decay) = 0.1;
  TORCH_ARG(bool, nesterov) = true;
  /// Coefficients a, b, c of the Newton-Schulz polynomial a X + b (X X^T) X + c (X X^T)^2 X.
  TORCH_ARG(std::vector<double>, ns_coefficients) = { 3.4445, -4.775, 2.0315 };
  /// Lower bound of the norm by which Muon divides the momentum before the first Newton-Schulz step.
  TORCH_ARG(double, eps) = 1e-7;
  /// Number of Newton-Schulz steps, 1 to 99.
  TORCH_ARG(int64_t, ns_steps) = 5;
  /// Factor of the learning rate. "original" (also std::nullopt): sqrt(max(1, rows / columns)).
  /// "match_rms_adamw": 0.2 sqrt(max(rows, columns)).
  TORCH_ARG(std::optional<std::string>, adjust_lr_fn) = std::nullopt;

 private:
  const detail::Rule& rule() const override;
  std::vector<detail::Field> fields() override;
  void check(const detail::Reporter& reporter) const override;
};

/// Muon (Jordan, 2024): orthogonalises the momentum of a matrix. Takes matrices only; use AdamW for other
/// parameters.
class SHOESTRING_API Muon : public OptimizerOf<MuonOptions> {
  using OptimizerOf::OptimizerOf;
};

}  // namespace shoestring::optim
