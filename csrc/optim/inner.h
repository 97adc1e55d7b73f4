#pragma once

// Options of operators that no optimizer class has for itself: other optimizers call these operators as parts
// of their steps.

#include <vector>

#include <shoestring/optim/base.h>

#include "optim/rule.h"

namespace shoestring::optim::ops {

/// Options of the operator _apply_, which applies an update to weights.
class ApplyOptions : public OptionsOf<ApplyOptions> {
 public:
  explicit ApplyOptions(double lr = 1) : OptionsOf(lr) {}
  /// Decoupled weight decay, applied before the update.
  TORCH_ARG(double, weight_decay) = 0.0;

 private:
  const detail::Rule& rule() const override;
  std::vector<detail::Field> fields() override;
};

/// Options of the operator _ema_, which updates a running mean.
class EmaOptions : public OptionsOf<EmaOptions> {
 public:
  explicit EmaOptions(double lr = 1) : OptionsOf(lr) {}
  /// Decay of the running mean.
  TORCH_ARG(double, beta) = 0.9;
  TORCH_ARG(bool, nesterov) = false;

 private:
  const detail::Rule& rule() const override;
  std::vector<detail::Field> fields() override;
};

}  // namespace shoestring::optim::ops
