#pragma once

// A step of GaLore or APOLLO, in two halves around the step of a base optimizer. Both languages use it: C++
// with a base optimizer in C++ (LowRankCore), Python with any optimizer of torch.optim's interface.

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <shoestring/optim/low_rank.h>

#include "optim/split/boxes.h"
#include "optim/split/split_params.h"

namespace shoestring::optim::detail {

using at::Tensor;

/// A parameter (rows, columns), or this process's part of it, whose gradient is projected, and `low`, its
/// low-rank stand-in that the base optimizer steps instead: (rank, columns) if `left`, else (rows, rank).
/// Each process has the stand-in of the whole parameter.
struct Projected {
  Tensor param, low;
  int64_t rows, columns;
  bool left;
  int64_t seed;      // of this parameter
  Tensor kept{};     // GaLore's projection or APOLLO's norm; undefined before the first gradient
  int64_t age = 0;   // steps taken with the current projection
  Tensor lengths{};  // during a step, APOLLO's norms of the channels of the gradient

  /// Returns the parts that are rectangular of this process's part of the parameter, or of its gradient, as
  /// matrices. Of a whole parameter it is `of` itself.
  std::vector<std::pair<Box, Tensor>> boxes(const Tensor& of) const;
  /// Returns how processes have split the parameter, or null.
  const SplitParameter* split() const { return split_of(param); }
};

/// The options of the base optimizer that a step applies to whole parameters.
struct BaseOptions {
  double lr = 0;
  Tensor lr_tensor;  // replaces lr if it is defined: one number
  double weight_decay = 0;
  bool maximize = false;

  Tensor rate() const;
  /// Returns the factor by which weight decay multiplies a parameter; undefined without weight decay.
  Tensor kept_weight() const;
};

/// A parameter whose projection is missing or too old.
struct Renewed {
  Projected* p;
  const LowRankOptions* options;
};

/// The parts of a step in which GaLore and APOLLO differ.
struct Method {
  // name: the name of the class. kind: the name of the option `projection` or `scale_type`. kept: the name of
  // the tensor that is stored for each parameter.
  const char *name, *kind, *kept;
  bool unit_lr;                    // whether the base optimizer steps the stand-ins with lr = 1
  std::vector<const char*> kinds;  // the allowed values of LowRankOptions::kind
  bool needs_lengths;              // whether `up` needs the norms of the channels of the gradient
  /// Returns the dtype and shape of a parameter's tensor `kept`.
  std::pair<at::ScalarType, std::vector<int64_t>> (*kept_as)(const Projected& p, const LowRankOptions& o);
  /// Makes a new projection of each of these parameters, which have gradients.
  void (*renew)(const std::vector<Renewed>& all);
  /// Returns the fp32 matrix, (rows, rank) if p.left, else (columns, rank), that projects the gradient.
  Tensor (*basis)(const Projected& p, const LowRankOptions& o);
  /// Applies weight decay and the base optimizer's update to p.param. p.low was zero before the base
  /// optimizer's step, so it holds the update. `clip` is the factor that has clipped the projected gradient,
  /// or undefined.
  void (*up)(const Projected& p, const Tensor& clip, const LowRankOptions& o, const BaseOptions& base);
};

class LowRankStep {
 public:
  struct Group {
    LowRankOptions options;
    BaseOptions base{};
    std::vector<Tensor> params{}, plain{};  // all parameters, and those without a projection
    std::vector<Projected> projected{};
  };

  /// `name` is the name of the optimizer in errors.
  LowRankStep(const Method& method, std::string name) : method(method), name(std::move(name)) {}

  const Method& method;
  std::string name;
  std::vector<Group> groups;

  /// Adds a group. Returns the stand-in of each parameter; undefined for a parameter that is not projected.
  std::vector<Tensor> add(const std::vector<Tensor>& params, const LowRankOptions& options);

  /// Replaces the parameters of a group, with which their state stays.
  void replace_params(size_t group, const std::vector<Tensor>& params);
  /// Checks all gradients, projects them, and gives them to the stand-ins. If processes have split
  /// parameters, all of them must call it, and add up what they have projected. Clips all gradients to a norm
  /// of max_grad_norm, those of parameters without a projection in grad(). Returns the norm of all gradients,
  /// or an undefined tensor without max_grad_norm. The base optimizer's step follows.
  Tensor begin(std::optional<double> max_grad_norm);
  /// Applies the base optimizer's updates to the projected parameters.
  void finish();
  /// Restores the gradients that begin() has clipped, and frees the memory of the stand-ins. Must follow
  /// begin(), also after an error.
  void release();

 private:
  Tensor norm_of(const std::vector<Tensor>& params) const;
  void project_gradients();

  std::vector<std::pair<Tensor, Tensor>> given_;  // parameters, and their gradients before clipping
  Tensor clip_;
};

}  // namespace shoestring::optim::detail
