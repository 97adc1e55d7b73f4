#pragma once

// What GaLore and APOLLO share: steps of another optimizer at low rank. Of this, LowRankCore's public
// functions are the API.

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

/// The options of a class of optimizers, and whether its weight decay is an L2 penalty, added to the
/// gradient.
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

/// What has to be known of such a class.
struct BaseClass {
  std::function<std::unique_ptr<torch::optim::Optimizer>()> make;  // without parameters
  void (*add)(torch::optim::Optimizer& optimizer, const torch::optim::OptimizerParamGroup& group);
  double& (*weight_decay)(torch::optim::OptimizerOptions& options);
  bool (*maximize)(const torch::optim::OptimizerOptions& options);
  std::string (*weights)(const torch::optim::OptimizerOptions& options);  // how 16-bit ones are rounded
  bool (*fits)(const torch::optim::OptimizerOptions& options);            // are they the class's?
  bool decay_is_a_penalty;
  const char* name;
};

template <class Base>
BaseClass base_class(const typename BaseTraits<Base>::Options& defaults) {
  using Options = typename BaseTraits<Base>::Options;
  using torch::optim::OptimizerOptions;
  using torch::optim::OptimizerParamGroup;
  return {[defaults] { return std::make_unique<Base>(std::vector<OptimizerParamGroup>(), defaults); },
          [](torch::optim::Optimizer& optimizer, const OptimizerParamGroup& group) {
            static_cast<Base&>(optimizer).add_param_group(group);
          },
          [](OptimizerOptions& options) -> double& { return static_cast<Options&>(options).weight_decay(); },
          [](const OptimizerOptions& options) { return static_cast<const Options&>(options).maximize(); },
          [](const OptimizerOptions& options) { return static_cast<const Options&>(options).weights(); },
          [](const OptimizerOptions& options) { return dynamic_cast<const Options*>(&options) != nullptr; },
          BaseTraits<Base>::decay_is_a_penalty,
          BaseTraits<Base>::name};
}

/// The options of a group, whatever the method: `kind` is GaLore's projection and APOLLO's scale_type.
struct LowRankOptions {
  std::optional<int64_t> rank;
  int64_t update_proj_gap;
  double scale;
  std::string kind;
  int64_t seed;
};

class SHOESTRING_API LowRankCore : public torch::optim::Optimizer {
 public:
  /// A closure computes the loss and its gradients.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// Clips to this norm, over the full gradients of all parameters, within the step: grad() stays as it is.
  /// Not saved.
  void set_max_grad_norm(std::optional<double> max_grad_norm);
  /// The last step's norm before clipping, an fp32 scalar; undefined without max_grad_norm.
  const at::Tensor& grad_norm() const { return grad_norm_; }

  /// The optimizer that holds the state. Options belong to this one's param_groups(). It is not to be
  /// offloaded.
  torch::optim::Optimizer& base() { return *base_; }

  /// The base's state, what the projections keep, and the options of all groups. load refuses what does not
  /// fit, and changes nothing then.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  /// A parameter that is projected, and the virtual one, (r, n) or (m, r), that the base has instead.
  struct Projected {
    at::Tensor param, low;
    bool left;
    at::Tensor kept;        // the method's; undefined before the first gradient
    int64_t age = 0, seed;  // steps taken with the projection; a seed of its own
  };
  struct Group {
    LowRankOptions options;
    std::vector<at::Tensor> plain;
    std::vector<Projected> projected;
  };
  /// What a method is called, what its `kind` and what it keeps, and whether its virtual parameters have an
  /// lr of 1.
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
  /// Dtype and shape of what is kept of a parameter.
  virtual std::pair<at::ScalarType, std::vector<int64_t>> kept_as(const Projected& p,
                                                                  const LowRankOptions& o) const = 0;
  /// A matrix's gradient at low rank, fp32.
  virtual at::Tensor down(Projected& p, const at::Tensor& grad, const LowRankOptions& options) = 0;
  /// The update of p.low, which began at zero with a gradient that was multiplied by `clip` (if defined), to
  /// p.param.
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
