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

#include <shoestring/export.h>
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
  /// A parameter (m, n) whose gradient is projected, and `low`, (r, n) or (m, r), its low-rank stand-in that
  /// the base optimizer steps instead.
  struct Projected {
    at::Tensor param, low;
    bool left;
    at::Tensor kept;        // GaLore's projection or APOLLO's norm; undefined before the first gradient
    int64_t age = 0, seed;  // age: steps taken with the current projection; seed: seed of this parameter
  };
  struct Group {
    LowRankOptions options;
    std::vector<at::Tensor> plain;
    std::vector<Projected> projected;
  };
  /// The constants of GaLore or APOLLO. name: name of the method. kind: name of the option `projection` or
  /// `scale_type`. kept: name of the tensor that is stored for each parameter. unit_lr: whether the base
  /// optimizer steps the low-rank stand-ins for the parameters with lr = 1.
  struct Method {
    const char *name, *kind, *kept;
    bool unit_lr;
  };

  LowRankCore(const Method& method, BaseClass base, std::unique_ptr<torch::optim::OptimizerOptions> defaults);
  void add(const torch::optim::OptimizerParamGroup& group, const LowRankOptions& options);
  at::Tensor kept(const at::Tensor& param) const;
  void expect(bool good, const char* option, const std::string& expected, const std::string& received) const;

  BaseClass class_;

 private:
  virtual void check(const LowRankOptions& options) const = 0;
  virtual bool is_left(int64_t rows, int64_t columns, const LowRankOptions& options) const;
  /// Returns the dtype and shape of a parameter's tensor `kept` (GaLore's projection or APOLLO's norm).
  virtual std::pair<at::ScalarType, std::vector<int64_t>> kept_as(const Projected& p,
                                                                  const LowRankOptions& o) const = 0;
  /// Projects the gradient of a matrix to low rank. Returns the projected gradient in fp32.
  virtual at::Tensor down(Projected& p, const at::Tensor& grad, const LowRankOptions& options) = 0;
  /// Applies the base optimizer's update of p.low, the low-rank stand-in for a parameter, to the parameter
  /// p.param. p.low was zero before the base optimizer's step, so p.low now holds the update. `clip` is the
  /// factor that clipped the projected gradient, or undefined.
  virtual void up(Projected& p, const at::Tensor& clip, const LowRankOptions& o, double lr, double decay,
                  bool maximize) = 0;

  void refuse_offload() const;
  at::Tensor clip_coef();
  void make_virtual(torch::optim::OptimizerOptions& options) const;
  void update_base_options() const;
  std::string prefix() const;

  Method method_;
  std::unique_ptr<torch::optim::Optimizer> base_;
  std::vector<Group> groups_;
  std::optional<double> max_grad_norm_;
  at::Tensor grad_norm_;
};

class SHOESTRING_API GaLoreCore : public LowRankCore {
 protected:
  GaLoreCore(BaseClass base, std::unique_ptr<torch::optim::OptimizerOptions> defaults);

 private:
  void check(const LowRankOptions& options) const override;
  bool is_left(int64_t rows, int64_t columns, const LowRankOptions& options) const override;
  std::pair<at::ScalarType, std::vector<int64_t>> kept_as(const Projected& p,
                                                          const LowRankOptions& o) const override;
  at::Tensor down(Projected& p, const at::Tensor& grad, const LowRankOptions& options) override;
  void up(Projected& p, const at::Tensor& clip, const LowRankOptions& o, double lr, double decay,
          bool maximize) override;
  void renew(Projected& p, const at::Tensor& grad, const LowRankOptions& options);
};

class SHOESTRING_API APOLLOCore : public LowRankCore {
 protected:
  APOLLOCore(BaseClass base, std::unique_ptr<torch::optim::OptimizerOptions> defaults);

 private:
  void check(const LowRankOptions& options) const override;
  std::pair<at::ScalarType, std::vector<int64_t>> kept_as(const Projected& p,
                                                          const LowRankOptions& o) const override;
  at::Tensor down(Projected& p, const at::Tensor& grad, const LowRankOptions& options) override;
  void up(Projected& p, const at::Tensor& clip, const LowRankOptions& o, double lr, double decay,
          bool maximize) override;
};

}  // namespace shoestring::optim::detail
