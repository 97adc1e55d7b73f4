#pragma once

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>

#include <shoestring/export.h>

namespace shoestring::optim {

namespace detail {
struct Rule;  // what a class hands to the base; not part of the API
}

/// What AdamW, Lion and SGD share. Their moments lie in block-wise 8-bit state (or fp32), and one pass steps all
/// tensors of a group. Parameters: fp32, bf16 or fp16. State is made when a parameter first has a gradient. Change it
/// through save and load only.
class SHOESTRING_API LowMemoryOptimizer : public torch::optim::Optimizer {
 public:
  /// A group's own options, of this optimizer's type, are taken as they are. (Newer releases of LibTorch keep them for
  /// their own optimizers only, and give the groups of any other the defaults.)
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  /// Clips the gradients to this norm, over all parameters that have one, as torch::nn::utils::clip_grad_norm_ does,
  /// but within the step: grad() stays as it is. Not saved by save().
  void set_max_grad_norm(std::optional<double> max_grad_norm);
  /// The last step's norm before clipping, an fp32 scalar on the gradients' device; undefined without max_grad_norm.
  const at::Tensor& grad_norm() const { return grad_norm_; }

  at::Tensor step(LossClosure closure = nullptr) override;
  /// State and options of all groups. load refuses another optimizer's archive, and changes nothing then.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  LowMemoryOptimizer(const detail::Rule& rule, const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                     std::unique_ptr<torch::optim::OptimizerOptions> defaults);

 private:
  /// The state of a group's parameters, in the order of `params`: each begins at a multiple of 256 elements.
  struct Arena {
    std::vector<at::Tensor> params;
    at::Tensor step;
    std::vector<at::Tensor> moments;  // a moment, its scales (undefined for fp32), the next, ...
  };
  Arena make_arena(const std::vector<at::Tensor>& params, const torch::optim::OptimizerOptions& options);
  at::Tensor clip_coef();

  const detail::Rule* rule_;
  std::vector<Arena> arenas_;  // one a group
  std::optional<double> max_grad_norm_;
  at::Tensor grad_norm_;
};

// ---- AdamW --------------------------------------------------------------------------------------------------------

struct SHOESTRING_API AdamWOptions : public torch::optim::OptimizerCloneableOptions<AdamWOptions> {
  AdamWOptions(double lr = 1e-3) : lr_(lr) {}
  using Betas = std::tuple<double, double>;

  TORCH_ARG(double, lr) = 1e-3;
  TORCH_ARG(Betas, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-8;
  /// Decoupled, and applied before the update, as in PyTorch.
  TORCH_ARG(double, weight_decay) = 1e-2;
  /// "8bit" (2.03 bytes a parameter) or "fp32" (8 bytes a parameter).
  TORCH_ARG(std::string, state) = "8bit";
  TORCH_ARG(bool, maximize) = false;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(const double lr) override { this->lr(lr); }
};

/// A parameter's state: views into the arenas of its group, under the names that Python uses.
struct SHOESTRING_API AdamWParamState : public torch::optim::OptimizerCloneableParamState<AdamWParamState> {
  /// Steps taken, an fp32 scalar.
  TORCH_ARG(at::Tensor, step);
  /// The parameter's shape: uint8 codes, or fp32.
  TORCH_ARG(at::Tensor, exp_avg);
  /// fp32, one for 256 elements; undefined for fp32 state.
  TORCH_ARG(at::Tensor, exp_avg_scale);
  TORCH_ARG(at::Tensor, exp_avg_sq);
  TORCH_ARG(at::Tensor, exp_avg_sq_scale);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// AdamW (arXiv 1711.05101).
class SHOESTRING_API AdamW : public LowMemoryOptimizer {
 public:
  explicit AdamW(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, AdamWOptions defaults = {});
  explicit AdamW(std::vector<at::Tensor> params, AdamWOptions defaults = {})
      : AdamW({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}
};

// ---- Lion ---------------------------------------------------------------------------------------------------------

struct SHOESTRING_API LionOptions : public torch::optim::OptimizerCloneableOptions<LionOptions> {
  LionOptions(double lr = 1e-4) : lr_(lr) {}
  using Betas = std::tuple<double, double>;

  /// 3 to 10 times below AdamW's; weight_decay as much above.
  TORCH_ARG(double, lr) = 1e-4;
  /// The share of the moment in the update, and in the new moment.
  TORCH_ARG(Betas, betas) = std::make_tuple(0.9, 0.99);
  /// Decoupled, and applied before the update.
  TORCH_ARG(double, weight_decay) = 0.0;
  /// "8bit" (1.02 bytes a parameter) or "fp32" (4 bytes a parameter).
  TORCH_ARG(std::string, state) = "8bit";
  TORCH_ARG(bool, maximize) = false;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(const double lr) override { this->lr(lr); }
};

/// As AdamWParamState.
struct SHOESTRING_API LionParamState : public torch::optim::OptimizerCloneableParamState<LionParamState> {
  TORCH_ARG(at::Tensor, step);
  TORCH_ARG(at::Tensor, exp_avg);
  TORCH_ARG(at::Tensor, exp_avg_scale);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// Lion (arXiv 2302.06675): every weight moves by lr, up or down.
class SHOESTRING_API Lion : public LowMemoryOptimizer {
 public:
  explicit Lion(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, LionOptions defaults = {});
  explicit Lion(std::vector<at::Tensor> params, LionOptions defaults = {})
      : Lion({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}
};

// ---- SGD ----------------------------------------------------------------------------------------------------------

struct SHOESTRING_API SGDOptions : public torch::optim::OptimizerCloneableOptions<SGDOptions> {
  SGDOptions(double lr = 1e-3) : lr_(lr) {}

  TORCH_ARG(double, lr) = 1e-3;
  /// Above 0: without momentum there is no state to keep, and torch::optim::SGD does it.
  TORCH_ARG(double, momentum) = 0.9;
  /// The share of the gradient that does not enter the buffer, but for the first; 0 with nesterov.
  TORCH_ARG(double, dampening) = 0.0;
  /// An L2 penalty, added to the gradient (after clipping).
  TORCH_ARG(double, weight_decay) = 0.0;
  TORCH_ARG(bool, nesterov) = false;
  /// "8bit" (1.02 bytes a parameter) or "fp32" (4 bytes a parameter).
  TORCH_ARG(std::string, state) = "8bit";
  TORCH_ARG(bool, maximize) = false;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(const double lr) override { this->lr(lr); }
};

/// As AdamWParamState.
struct SHOESTRING_API SGDParamState : public torch::optim::OptimizerCloneableParamState<SGDParamState> {
  TORCH_ARG(at::Tensor, step);
  TORCH_ARG(at::Tensor, momentum_buffer);
  TORCH_ARG(at::Tensor, momentum_buffer_scale);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// SGD with momentum: what torch::optim::SGD computes.
class SHOESTRING_API SGD : public LowMemoryOptimizer {
 public:
  explicit SGD(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, SGDOptions defaults = {});
  explicit SGD(std::vector<at::Tensor> params, SGDOptions defaults = {})
      : SGD({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}
};

}  // namespace shoestring::optim

#include <shoestring/optim_wrappers.h>
