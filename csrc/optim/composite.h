#pragma once

// Helpers for optimizers that need more than an update rule, such as LAMB or Muon. They step one parameter at
// a time, by calling other operators on the parameter's slice of the state. No function here reads a tensor's
// values on the host, so one implementation serves every device.

#include <initializer_list>
#include <vector>

#include "core/call.h"
#include "optim/optimizer.h"

namespace shoestring::optim::ops {

/// A parameter with a gradient, and its slice of a call's state.
class Share {
 public:
  /// `before` is a copy of the call's step counters. Every operator increments the counter that it gets, so
  /// all operators except the last get a copy.
  Share(const Call& call, const Stepped& stepped, const Tensor& before);

  const Call& call;
  int64_t index;  // index of the parameter in the call
  Tensor param, grad, step, before;

  Tensor of(const Tensor& arena) const;
  OptionalTensor of(const OptionalTensor& arena) const;

  /// Returns an uninitialised fp32 tensor with the parameter's shape.
  Tensor empty() const;

  /// Calls `op` with `result` as the parameter and `grad` as its gradient.
  void run(const char* op, const Tensor& result, const Tensor& grad, const Tensor& step,
           std::initializer_list<NamedArguments> arguments) const;

  /// Returns this parameter's slice of a moment (and its scale) as an argument, under the operator's name
  /// `theirs`.
  NamedArguments moment(const std::string& theirs, const Moment& moment) const;

  /// Returns the arguments that concern the gradient: its factors, its sign and the accumulated sum. Exactly
  /// one operator of a step may get them.
  NamedArguments of_gradient() const;

  /// Returns the gradient in fp32, with its factors, its sign and the accumulated sum applied.
  Tensor gradient() const;

  /// Returns the Euclidean norm of the weights (with their remainder), one fp32 element.
  Tensor weight_norm() const;
  Tensor weight() const;  // returns the weights in fp32

  /// Computes mean += weight * (fresh - mean), unless the step is skipped.
  void advance(const Tensor& mean, const Tensor& fresh, const Tensor& weight) const;

  /// Calls apply_ on the parameter itself, with the call's weight_decay and rounding. `lr` (one element)
  /// replaces the call's lr; `factor`, if given, multiplies the update.
  void apply(const Tensor& update, const OptionalTensor& factor = {}, const OptionalTensor& lr = {},
             bool maximize = false) const;

 private:
  int64_t block_, blocks_, total_;
};

/// Reads a list argument with one fp32 tensor per parameter, which is stored outside the arenas. Checks the
/// shapes with shape_of.
using ShapeOf = std::vector<int64_t> (*)(const Tensor& param);
std::vector<Tensor> extra(const Call& call, const char* name, ShapeOf shape_of);

/// Returns the shares of all parameters that have a gradient, after all checks of the call.
std::vector<Share> shares(const Call& call, const std::vector<Moment>& moments);

}  // namespace shoestring::optim::ops
