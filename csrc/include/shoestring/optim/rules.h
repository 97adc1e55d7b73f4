#pragma once

// Optimizers whose update is a rule: AdamW, Lion, SGD, Muon and others.

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <shoestring/optim/base.h>

namespace shoestring::optim {

/// AdamW: moments take 2.03 bytes a parameter in 8 bits, 1.16 in 4, 4 as bf16 and 8 as fp32.
class SHOESTRING_API AdamWOptions : public OptionsOf<AdamWOptions> {
 public:
  using Betas = std::tuple<double, double>;
  AdamWOptions(double lr = 1e-3) : OptionsOf(lr) {}

  /// Decay of the running means of the gradient and of its square.
  TORCH_ARG(Betas, betas) = { 0.9, 0.999 };
  /// Added to the root of the second moment.
  TORCH_ARG(double, eps) = 1e-8;
  /// Decoupled, and applied before the update, as in PyTorch.
  TORCH_ARG(double, weight_decay) = 1e-2;

 private:
  const detail::Rule& rule() const override;
  std::vector<detail::Field> fields() override;
};

/// AdamW (arXiv 1711.05101).
class SHOESTRING_API AdamW : public OptimizerOf<AdamWOptions> {
  using OptimizerOf::OptimizerOf;
};

/// Lion: half of AdamW's state.
class SHOESTRING_API LionOptions : public OptionsOf<LionOptions> {
 public:
  using Betas = std::tuple<double, double>;
  /// A learning rate 3 to 10 times below AdamW's; weight_decay as much above.
  LionOptions(double lr = 1e-4) : OptionsOf(lr) {}

  /// The share of the moment in the update, and in the new moment.
  TORCH_ARG(Betas, betas) = { 0.9, 0.99 };
  /// Decoupled, and applied before the update.
  TORCH_ARG(double, weight_decay) = 0.0;

 private:
  const detail::Rule& rule() const override;
  std::vector<detail::Field> fields() override;
};

/// Lion (arXiv 2302.06675): every weight moves by lr, up or down.
class SHOESTRING_API Lion : public OptimizerOf<LionOptions> {
  using OptimizerOf::OptimizerOf;
};

/// SGD with momentum: half of AdamW's state.
class SHOESTRING_API SGDOptions : public OptionsOf<SGDOptions> {
 public:
  SGDOptions(double lr = 1e-3) : OptionsOf(lr) {}

  /// Above 0: without momentum there is no state to keep, and torch::optim::SGD does it.
  TORCH_ARG(double, momentum) = 0.9;
  /// The share of the gradient that does not enter the buffer, but for the first; 0 with nesterov.
  TORCH_ARG(double, dampening) = 0.0;
  /// An L2 penalty, added to the gradient (after clipping).
  TORCH_ARG(double, weight_decay) = 0.0;
  TORCH_ARG(bool, nesterov) = false;

 private:
  const detail::Rule& rule() const override;
  std::vector<detail::Field> fields() override;
  void check() const override;
};

/// SGD with momentum: what torch::optim::SGD computes.
class SHOESTRING_API SGD : public OptimizerOf<SGDOptions> {
  using OptimizerOf::OptimizerOf;
};

/// AdEMAMix: AdamW's state and a slow mean of 2 bytes a parameter (with fp32 state, 4).
class SHOESTRING_API AdEMAMixOptions : public OptionsOf<AdEMAMixOptions> {
 public:
  using Betas = std::tuple<double, double, double>;
  using Steps = std::optional<int64_t>;
  AdEMAMixOptions(double lr = 1e-3) : OptionsOf(lr) {}

  /// Decay of the fast mean, of that of squares, and of the slow mean.
  TORCH_ARG(Betas, betas) = { 0.9, 0.999, 0.9999 };
  /// Of the slow mean in the update.
  TORCH_ARG(double, alpha) = 5.0;
  /// Steps in which alpha rises from 0; none: it is there at once.
  TORCH_ARG(Steps, t_alpha) = std::nullopt;
  /// Steps in which the slow mean's decay rises from the first beta to the third.
  TORCH_ARG(Steps, t_beta3) = std::nullopt;
  TORCH_ARG(double, eps) = 1e-8;
  /// Decoupled, and applied before the update.
  TORCH_ARG(double, weight_decay) = 1e-2;

 private:
  const detail::Rule& rule() const override;
  std::vector<detail::Field> fields() override;
  void check() const override;
};

/// AdEMAMix (arXiv 2409.03137): AdamW with a second, slow mean of gradients.
class SHOESTRING_API AdEMAMix : public OptimizerOf<AdEMAMixOptions> {
  using OptimizerOf::OptimizerOf;
};

/// Schedule-Free AdamW: moments take 3.02 bytes a parameter in 8 bits, 2.53 in 4, 4 as bf16 and 8 as fp32.
class SHOESTRING_API ScheduleFreeAdamWOptions : public OptionsOf<ScheduleFreeAdamWOptions> {
 public:
  using Betas = std::tuple<double, double>;
  /// A larger learning rate than AdamW's: 1 to 10 times.
  ScheduleFreeAdamWOptions(double lr = 2.5e-3) : OptionsOf(lr) {}

  /// The share of the average in the points where gradients are taken, above 0; decay of the mean of squares.
  TORCH_ARG(Betas, betas) = { 0.9, 0.999 };
  TORCH_ARG(double, eps) = 1e-8;
  /// A part of the update, not divided by the root of the second moment.
  TORCH_ARG(double, weight_decay) = 0.0;
  /// Steps in which the learning rate rises, evenly; 0: it is there at once.
  TORCH_ARG(int64_t, warmup_steps) = 0;
  /// Set by train() and eval() of the optimizer, and saved: which weights the parameters hold.
  TORCH_ARG(bool, train_mode) = true;

 private:
  const detail::Rule& rule() const override;
  std::vector<detail::Field> fields() override;
  void check() const override;
  void check_step() const override;
};

/// Schedule-Free AdamW (arXiv 2405.15682): needs no learning rate schedule. Gradients are taken at one point,
/// and the weights for evaluation are an average.
///
/// The average is over all steps of a parameter, by squares of the warm-up's rates: a learning rate that is
/// changed later does not enter it.
class SHOESTRING_API ScheduleFreeAdamW : public OptimizerOf<ScheduleFreeAdamWOptions> {
 public:
  using OptimizerOf::OptimizerOf;
  /// Parameters become those to train, or the average, to be evaluated; nothing where they are so already. An
  /// optimizer begins in train mode, and takes steps in no other. Parameters and optimizer are to be saved in
  /// the same mode. There and back is within a unit in the last place.
  void train() { set_mode(true); }
  void eval() { set_mode(false); }

 private:
  void set_mode(bool train_mode);
};

/// LAMB: AdamW's state.
class SHOESTRING_API LAMBOptions : public OptionsOf<LAMBOptions> {
 public:
  using Betas = std::tuple<double, double>;
  /// What a parameter moves by, as a share of its norm.
  LAMBOptions(double lr = 1e-3) : OptionsOf(lr) {}

  TORCH_ARG(Betas, betas) = { 0.9, 0.999 };
  TORCH_ARG(double, eps) = 1e-6;
  /// A part of the update whose norm is taken.
  TORCH_ARG(double, weight_decay) = 1e-2;

 private:
  const detail::Rule& rule() const override;
  std::vector<detail::Field> fields() override;
};

/// LAMB (arXiv 1904.00962): AdamW's update, made as long as the weights are.
class SHOESTRING_API LAMB : public OptimizerOf<LAMBOptions> {
  using OptimizerOf::OptimizerOf;
};

/// Adafactor: 4 (rows + columns) bytes a matrix; with beta1 also a mean, in the state that is chosen.
class SHOESTRING_API AdafactorOptions : public OptionsOf<AdafactorOptions> {
 public:
  using Eps = std::tuple<std::optional<double>, double>;
  /// The largest relative step.
  AdafactorOptions(double lr = 1e-2) : OptionsOf(lr) {}

  /// The share of a mean of updates in the new one; 0: there is none.
  TORCH_ARG(double, beta1) = 0.0;
  /// 1 - t^this is the decay of squares.
  TORCH_ARG(double, beta2_decay) = -0.8;
  /// The least root of the second moment (none: by the parameter's dtype), and the least size of a parameter.
  TORCH_ARG(Eps, eps) = { std::nullopt, 1e-3 };
  /// The largest root mean square of an update.
  TORCH_ARG(double, d) = 1.0;
  TORCH_ARG(double, weight_decay) = 0.0;

 private:
  const detail::Rule& rule() const override;
  std::vector<detail::Field> fields() override;
};

/// Adafactor (arXiv 1804.04235): what torch.optim.Adafactor computes, and with beta1 a mean of the updates.
class SHOESTRING_API Adafactor : public OptimizerOf<AdafactorOptions> {
  using OptimizerOf::OptimizerOf;
};

/// CAME: 8 (rows + columns) bytes a matrix, and a mean in the state that is chosen.
class SHOESTRING_API CAMEOptions : public OptionsOf<CAMEOptions> {
 public:
  using Betas = std::tuple<double, double, double>;
  using Eps = std::tuple<double, double>;
  CAMEOptions(double lr = 2e-4) : OptionsOf(lr) {}

  /// Decay of the mean of updates (above 0), of squared gradients, and of squared distances of updates from
  /// the mean.
  TORCH_ARG(Betas, betas) = { 0.9, 0.999, 0.9999 };
  /// Added to squared gradients, and to squared distances.
  TORCH_ARG(Eps, eps) = { 1e-30, 1e-16 };
  /// The largest root mean square of an update, before the mean.
  TORCH_ARG(double, clip_threshold) = 1.0;
  /// Decoupled, and applied before the update.
  TORCH_ARG(double, weight_decay) = 0.0;

 private:
  const detail::Rule& rule() const override;
  std::vector<detail::Field> fields() override;
  void check() const override;
};

/// CAME (arXiv 2307.02047): Adafactor whose mean of updates moves less where updates differ from it.
class SHOESTRING_API CAME : public OptimizerOf<CAMEOptions> {
  using OptimizerOf::OptimizerOf;
};

/// Muon: half of AdamW's state.
class SHOESTRING_API MuonOptions : public OptionsOf<MuonOptions> {
 public:
  MuonOptions(double lr = 1e-3) : OptionsOf(lr) {}

  TORCH_ARG(double, momentum) = 0.95;
  /// Decoupled, and applied before the update.
  TORCH_ARG(double, weight_decay) = 0.1;
  TORCH_ARG(bool, nesterov) = true;
  /// a, b, c of the Newton-Schulz polynomial a X + b (X X^T) X + c (X X^T)^2 X.
  TORCH_ARG(std::vector<double>, ns_coefficients) = { 3.4445, -4.775, 2.0315 };
  /// The least norm that the momentum is divided by.
  TORCH_ARG(double, eps) = 1e-7;
  /// 1 to 99.
  TORCH_ARG(int64_t, ns_steps) = 5;
  /// "original" (also none), sqrt(max(1, rows / columns)), or "match_rms_adamw", 0.2 sqrt(max(rows,
  /// columns)).
  TORCH_ARG(std::optional<std::string>, adjust_lr_fn) = std::nullopt;

 private:
  const detail::Rule& rule() const override;
  std::vector<detail::Field> fields() override;
  void check() const override;
};

/// Muon (Jordan, 2024): the momentum of a matrix, made orthogonal. Matrices only; other parameters are for
/// AdamW.
class SHOESTRING_API Muon : public OptimizerOf<MuonOptions> {
  using OptimizerOf::OptimizerOf;
};

}  // namespace shoestring::optim
