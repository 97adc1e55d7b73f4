#pragma once

// For optimizers that are more than a rule: a call, parameter by parameter, as calls of other operators on a
// parameter's share of the state. Nothing here reads a tensor's values, so one implementation serves every
// device.

#include <initializer_list>
#include <vector>

#include "core/call.h"
#include "optim/optimizer.h"

namespace shoestring::optim::ops {

/// A parameter with a gradient, and its share of a call's state.
class Share {
 public:
  /// `before`: a copy of the call's steps, for all operators but the last, since each of them advances its
  /// own.
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

  /// The gradient itself, with all of that: fp32.
  Tensor gradient() const;

  /// The Euclidean norm of the weights, with their remainder: fp32, one element.
  Tensor weight_norm() const;
  Tensor weight() const;  // fp32

  /// mean += weight (fresh - mean), unless the step is skipped.
  void advance(const Tensor& mean, const Tensor& fresh, const Tensor& weight) const;

  /// apply_ to the parameter itself: weight_decay of the call, its rounding, and its lr or the one given (one
  /// element); `factor`, if any, multiplies the update.
  void apply(const Tensor& update, const OptionalTensor& factor = {}, const OptionalTensor& lr = {},
             bool maximize = false) const;

 private:
  int64_t block_, blocks_, total_;
};

/// For a tensor of its own that every parameter has beside the arenas: fp32, of the given shape.
using ShapeOf = std::vector<int64_t> (*)(const Tensor& param);
std::vector<Tensor> extra(const Call& call, const char* name, ShapeOf shape_of);

/// The shares of all parameters that have a gradient, after every check of the call.
std::vector<Share> shares(const Call& call, const std::vector<Moment>& moments);

}  // namespace shoestring::optim::ops
