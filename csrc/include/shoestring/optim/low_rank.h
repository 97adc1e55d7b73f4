#pragma once

// The common base class of GaLore and APOLLO. Both project gradients to low rank and let another optimizer,
// the base optimizer, step at low rank. Only the public functions of LowRankCore belong to the API.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>

#include <shoestring/core/export.h>
#include <shoestring/optim/rules.h>

namespace shoestring::optim::detail {

/// Describes a class of base optimizers for GaLore and APOLLO: its options, its name, and whether its weight
/// decay is an L2 penalty added to the gradient.
template <class Base>
struct BaseTraits;
template <>
struct BaseTraits<AdamW> {
  using Options = AdamWOptions;
  static constexpr bool decay_is_a_penalty = false;
  static constexpr const char* name = "AdamW";
};
template <>
struct BaseTraits<Lion> {
  using Options = LionOptions;
  static constexpr bool decay_is_a_penalty = false;
  static constexpr const char* name = "Lion";
};
template <>
struct BaseTraits<SGD> {
  using Options = SGDOptions;
  static constexpr bool decay_is_a_penalty = true;
  static constexpr const char* name = "SGD";
};

/// The functions of a base optimizer's class that LowRankCore calls. They are type-erased, so LowRankCore is
/// not a template.
struct BaseClass {
  std::function<std::unique_ptr<torch::optim::Optimizer>()> make;  // creates an optimizer without parameters
  void (*add)(torch::optim::Optimizer& optimizer, const torch::optim::OptimizerParamGroup& group);
  double& (*weight_decay)(torch::optim::OptimizerOptions& options);
  bool (*maximize)(const torch::optim::OptimizerOptions& options);
  // Returns the rounding mode of bf16 weights.
  std::string (*weight_rounding)(const torch::optim::OptimizerOptions& options);
  // Returns whether the options have the class's options type, such as AdamWOptions.
  bool (*fits)(const torch::optim::OptimizerOptions& options);
  bool decay_is_a_penalty;
  const char* name;
};

template <class Base>
BaseClass base_class(const typename BaseTraits<Base>::Options& defaults) {
  using Options = typename BaseTraits<Base>::Options;
  using torch::optim::OptimizerOptions;
  using torch::optim::OptimizerParamGroup;
  return {
      [defaults] { return std::make_unique<Base>(std::vector<OptimizerParamGroup>(), defaults); },
      [](torch::optim::Optimizer& optimizer, const OptimizerParamGroup& group) {
        static_cast<Base&>(optimizer).add_param_group(group);
      },
      [](OptimizerOptions& options) -> double& { return static_cast<Options&>(options).weight_decay(); },
      [](const OptimizerOptions& options) { return static_cast<const Options&>(options).maximize(); },
      [](const OptimizerOptions& options) { return static_cast<const Options&>(options).weight_rounding(); },
      [](const OptimizerOptions& options) { return dynamic_cast<const Options*>(&options) != nullptr; },
      BaseTraits<Base>::decay_is_a_penalty,
      BaseTraits<Base>::name};
}

/// Options of a parameter group that GaLore and APOLLO share. `kind` is GaLore's `projection` or APOLLO's
/// `scale_type`.
struct LowRankOptions {
  std::optional<int64_t> rank;
  int64_t update_proj_gap;
  double scale;
  std::string kind;
  int64_t seed;
};

struct Method;
class LowRankStep;
SHOESTRING_API const Method& galore();
SHOESTRING_API const Method& apollo();

class SHOESTRING_API LowRankCore : public torch::optim::Optimizer {
 public:
  /// Takes a step. The optional closure computes the loss and its gradients.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// Sets the norm to which each step clips the gradients. The norm is that of the full gradients of all
  /// parameters, before projection. Clipping happens within the step; grad() does not change. save() does not
  /// save max_grad_norm.
  void set_max_grad_norm(std::optional<double> max_grad_norm);
  /// Returns the norm of all gradients before clipping in the last step, an fp32 scalar. Undefined without
  /// max_grad_norm.
  const at::Tensor& grad_norm() const { return grad_norm_; }

  /// Returns the base optimizer, which holds the optimizer state. Change options in the param_groups() of
  /// GaLore or APOLLO, not in those of the base optimizer. Do not call set_offload on the base optimizer.
  torch::optim::Optimizer& base() { return *base_; }

  /// Saves and loads the base optimizer's state, each parameter's projection (GaLore) or norm (APOLLO), and
  /// the options of all groups. If the archive does not match the optimizer, load raises an error and changes
  /// nothing.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  LowRankCore(const Method& method, BaseClass base, std::unique_ptr<torch::optim::OptimizerOptions> defaults);
  void add(const torch::optim::OptimizerParamGroup& group, const LowRankOptions& options);
  at::Tensor kept(const at::Tensor& param) const;

 private:
  void expect(bool good, const char* option, const std::string& expected, const std::string& received) const;
  void refuse_offload() const;
  void make_virtual(torch::optim::OptimizerOptions& options) const;
  void update_base_options() const;

  BaseClass class_;
  std::shared_ptr<LowRankStep> step_;
  std::unique_ptr<torch::optim::Optimizer> base_;
  std::optional<double> max_grad_norm_;
  at::Tensor grad_norm_;
};

}  // namespace shoestring::optim::detail
