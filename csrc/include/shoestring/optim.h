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

/// AdamW over block-wise 8-bit state (or fp32), one pass over all tensors of a group. Parameters: fp32, bf16 or fp16.
/// State is made when a parameter first has a gradient. Change it through save and load only.
class SHOESTRING_API AdamW : public torch::optim::Optimizer {
 public:
  explicit AdamW(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, AdamWOptions defaults = {});
  explicit AdamW(std::vector<at::Tensor> params, AdamWOptions defaults = {})
      : AdamW({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

  /// A group's own options are taken as they are. (Newer releases of LibTorch keep them for their own optimizers
  /// only, and gives the groups of any other the defaults.)
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  /// Clips the gradients to this norm, over all parameters that have one, as torch::nn::utils::clip_grad_norm_ does,
  /// but within the step: grad() stays as it is. Not saved by save().
  void set_max_grad_norm(std::optional<double> max_grad_norm);
  /// The last step's norm before clipping, an fp32 scalar on the gradients' device; undefined without max_grad_norm.
  const at::Tensor& grad_norm() const { return grad_norm_; }

  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  /// The state of a group's parameters, in the order of `params`: each begins at a multiple of 256 elements.
  struct Arena {
    std::vector<at::Tensor> params;
    at::Tensor step, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale;
  };
  Arena make_arena(const std::vector<at::Tensor>& params, const std::string& state);
  at::Tensor clip_coef();

  std::vector<Arena> arenas_;  // one a group
  std::optional<double> max_grad_norm_;
  at::Tensor grad_norm_;
};

}  // namespace shoestring::optim
