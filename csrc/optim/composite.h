#pragma once

// Helpers for optimizers whose step is not elementwise, such as LAMB and Muon. Such an optimizer steps one
// parameter at a time, by calling other operators on the parameter's slice of the optimizer state. No
// function here reads a tensor's values on the host, so one implementation serves every device.

#include <initializer_list>
#include <vector>

#include "core/call.h"
#include "optim/optimizer.h"

namespace shoestring::optim::ops {

/// A parameter that has a gradient, with its slice of the optimizer state that an operator call receives.
class Share {
 public:
  /// `before` is a copy of the step counters of the operator call. Each inner operator increments the step
  /// counter that it receives, so all inner operators except the last receive the copy.
  Share(const Call& call, const Stepped& stepped, const Tensor& before);

  const Call& call;
  int64_t index;  // index of the parameter in call.params
  Tensor param, grad, step, before;

  Tensor of(const Tensor& arena) const;
  OptionalTensor of(const OptionalTensor& arena) const;

  /// Returns an uninitialised fp32 tensor with the parameter's shape.
  Tensor empty() const;

  /// Calls the operator `op` with one parameter, `result`, whose gradient is `grad`.
  void run(const char* op, const Tensor& result, const Tensor& grad, const Tensor& step,
           std::initializer_list<NamedArguments> arguments) const;

  /// Returns this parameter's slice of a moment (and of its scales) as arguments of an inner operator.
  /// `theirs` is the name of the inner operator's argument for this moment.
  NamedArguments moment(const std::string& theirs, const Moment& moment) const;

  /// Returns the operator arguments that concern the gradient: maximize, grad_scale, clip_coef and
  /// accumulated. Pass them to only one inner operator of a step, so that they are applied once.
  NamedArguments of_gradient() const;

  /// Returns the gradient in fp32. Adds the accumulated gradients and sets them to zero, and applies
  /// grad_scale, clip_coef and maximize.
  Tensor gradient() const;

  /// Returns the Euclidean norm of the parameter as one fp32 element. For bf16 weights with a 16-bit
  /// remainder, the norm includes the remainder.
  Tensor weight_norm() const;
  Tensor weight() const;  // returns the parameter in fp32, including its remainder

  /// Computes mean += weight * (fresh - mean) in place. Changes nothing if found_inf is not zero, because the
  /// optimizer step is then skipped.
  void advance(const Tensor& mean, const Tensor& fresh, const Tensor& weight) const;

  /// Calls the operator _apply_ on the parameter: param = param * (1 - lr * weight_decay) - lr * factor *
  /// update. `lr` (one element) replaces the lr of the operator call. Without `factor`, the factor is 1. With
  /// `maximize`, the update is added.
  void apply(const Tensor& update, const OptionalTensor& factor = {}, const OptionalTensor& lr = {},
             bool maximize = false) const;

 private:
  int64_t block_, blocks_, total_;
};

/// Reads the argument `name`, a list with one fp32 tensor per parameter, stored outside the arenas. Raises
/// unless tensor i has the shape shape_of(params[i]).
using ShapeOf = std::vector<int64_t> (*)(const Tensor& param);
std::vector<Tensor> extra(const Call& call, const char* name, ShapeOf shape_of);

/// Checks all arguments of the operator call, and returns a Share (the parameter and its slice of the state)
/// for each parameter that has a gradient.
std::vector<Share> shares(const Call& call, const std::vector<Moment>& moments);

}  // namespace shoestring::optim::ops
