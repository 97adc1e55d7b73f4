#pragma once

#include <tuple>

#include <shoestring/optim/base.h>

namespace shoestring::optim {

/// AdamW: moments take 2.03 bytes a parameter in 8 bits, 1.16 in 4, 4 as bf16 and 8 as fp32.
class SHOESTRING_API AdamWOptions : public OptionsOf<AdamWOptions> {
 public:
  using Betas = std::tuple<double, double>;
  AdamWOptions(double lr = 1e-3) : OptionsOf(lr) {}

  /// Decay of the running means of the gradient and of its square.
  TORCH_ARG(Betas, betas) = {0.9, 0.999};
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
  TORCH_ARG(Betas, betas) = {0.9, 0.99};
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

}  // namespace shoestring::optim

#include <shoestring/optim_wrappers.h>
