#pragma once

// For optimizers that are more than a rule: a call, parameter by parameter, as calls of other operators on a parameter's
// share of the state. Nothing here reads a tensor's values, so one implementation serves every device.

#include <initializer_list>
#include <vector>

#include "ops/call.h"
#include "ops/optimizer.h"

namespace shoestring::optimizer {

/// A parameter with a gradient, and its share of a call's state.
class Share {
 public:
  /// `before`: a copy of the call's steps, for all operators but the last, since each of them advances its own.
  Share(const Call& call, const Stepped& stepped, const Tensor& before);

  const Call& call;
  int64_t index;  // among the parameters
  Tensor param, grad, step, before;

  Tensor of(const Tensor& arena) const;
  OptionalTensor of(const OptionalTensor& arena) const;

  /// fp32, the parameter's shape.
  Tensor empty() const;

  /// `op` on `result` in place of the parameter and `grad` in place of its gradient.
  void run(const char* op, const Tensor& result, const Tensor& grad, const Tensor& step,
           std::initializer_list<NamedArguments> arguments) const;

  /// A moment as an operator's argument, by the operator's name for it.
  NamedArguments moment(const std::string& theirs, const Moment& moment) const;

  /// What scales the gradient, its sign, and what was accumulated: for the one operator that reads it.
  NamedArguments of_gradient() const;

  /// apply_ to the parameter itself, with lr and weight_decay of the call, and its rounding.
  void apply(const Tensor& update, NamedArguments own = {}) const;

 private:
  int64_t block_, blocks_, total_;
};

/// The shares of all parameters that have a gradient, after every check of the call.
std::vector<Share> shares(const Call& call, const std::vector<Moment>& moments);

}  // namespace shoestring::optimizer
