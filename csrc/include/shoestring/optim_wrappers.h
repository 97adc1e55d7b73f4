#pragma once

// Optimizers around other optimizers; shoestring/optim.h includes this.

#include <shoestring/export.h>
#include <shoestring/optim.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace shoestring::optim {

// ---- GaLore
// -------------------------------------------------------------------------------------------------------

/// A group of parameters has its own.
struct SHOESTRING_API GaLoreOptions {
  /// Of the state: r. None steps every parameter as the base optimizer does; embeddings and heads are usually
  /// left out.
  TORCH_ARG(std::optional<int64_t>, rank) = 128;
  /// Steps between projections.
  TORCH_ARG(int64_t, update_proj_gap) = 200;
  /// What the update of a projected parameter is multiplied by.
  TORCH_ARG(double, scale) = 0.25;
  /// "left" (rows become fewer), "right" (columns), or "auto": the smaller side.
  TORCH_ARG(std::string, projection) = "auto";
  /// Of the random start of the iteration that finds a projection.
  TORCH_ARG(int64_t, seed) = 0;
};

namespace detail {

/// What GaLore has to know of a class of optimizers.
struct BaseClass {
  std::function<std::unique_ptr<torch::optim::Optimizer>()> make;  // without parameters
  void (*add)(torch::optim::Optimizer& optimizer, const torch::optim::OptimizerParamGroup& group);
  double& (*weight_decay)(torch::optim::OptimizerOptions& options);
  std::string (*weights)(const torch::optim::OptimizerOptions& options);  // how 16-bit ones are rounded
  bool (*fits)(const torch::optim::OptimizerOptions& options);            // are they the class's?
  bool decay_is_a_penalty;                                                // L2, added to the gradient
  const char* name;
};

/// The options of a class of optimizers, and whether its weight decay is an L2 penalty.
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

class SHOESTRING_API GaLoreCore : public torch::optim::Optimizer {
 public:
  /// A group without options has the defaults, of either kind.
  void add_param_group(const torch::optim::OptimizerParamGroup& group) {
    add_param_group(group, galore_defaults_);
  }
  void add_param_group(const torch::optim::OptimizerParamGroup& group, const GaLoreOptions& galore);

  /// A closure computes the loss and its gradients.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// Clips to this norm, over the full gradients of all parameters, within the step: grad() stays as it is.
  /// Not saved.
  void set_max_grad_norm(std::optional<double> max_grad_norm);
  /// The last step's norm before clipping, an fp32 scalar; undefined without max_grad_norm.
  const at::Tensor& grad_norm() const { return grad_norm_; }

  /// P of a parameter, (min(m, n), r) in its dtype; undefined where there is none.
  at::Tensor projection(const at::Tensor& param) const;
  /// The optimizer that holds the state. Options belong to this one's param_groups().
  torch::optim::Optimizer& base() { return *base_; }

  /// The base's state, the projections, and the options of all groups. load refuses what does not fit, and
  /// changes nothing then.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  GaLoreCore(BaseClass base, std::unique_ptr<torch::optim::OptimizerOptions> defaults, GaLoreOptions galore);

 private:
  /// A parameter that is projected, and the virtual one, (r, n) or (m, r), that the base has instead.
  struct Projected {
    at::Tensor param, low;
    bool left;
    at::Tensor basis;       // undefined before the first gradient
    int64_t age = 0, seed;  // steps taken with the basis; the next one's seed
  };
  struct Group {
    GaLoreOptions options;
    std::vector<at::Tensor> plain;
    std::vector<Projected> projected;
  };
  at::Tensor clip_coef();
  void update_base_options() const;
  void renew(Projected& p, const at::Tensor& grad, const GaLoreOptions& options);

  BaseClass class_;
  GaLoreOptions galore_defaults_;
  std::unique_ptr<torch::optim::Optimizer> base_;
  std::vector<Group> groups_;
  std::optional<double> max_grad_norm_;
  at::Tensor grad_norm_;
};

}  // namespace detail

/// GaLore (arXiv 2403.03507) around AdamW, Lion or SGD: full-parameter training with the state of a low rank
/// r.
///
/// The gradient G (m, n) of a matrix becomes R = P^T G, with the r leading left singular vectors of an
/// earlier gradient in P (m, r), found by randomised subspace iteration. The base optimizer steps a virtual
/// parameter (r, n) with R, and scale times P times its update moves the matrix; weight decay is of the whole
/// matrix. Where n < m, P is on the right.
///
///     GaLore<AdamW> optimizer(model->parameters(), AdamWOptions(1e-3), GaLoreOptions().rank(128));
///
/// Parameters: fp32, bf16 or fp16. Those of more than two dimensions are matrices (first, all others);
/// vectors, and matrices with fewer than r rows (columns, for a projection on the right), step as by the
/// base. 16-bit weights are rounded once a step, to nearest. Memory: min(m, n) r elements of the parameter's
/// dtype, and the base's state of max(m, n) r parameters. Errors: c10::Error, of an option, a dtype or an
/// archive that does not fit.
template <class Base>
class GaLore : public detail::GaLoreCore {
  using Traits = detail::BaseTraits<Base>;

 public:
  using Options = typename Traits::Options;
  explicit GaLore(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, Options defaults = {},
                  GaLoreOptions galore = {})
      : GaLoreCore(base_class(defaults), std::make_unique<Options>(defaults), std::move(galore)) {
    for (const auto& group : param_groups) add_param_group(group);
  }
  explicit GaLore(std::vector<at::Tensor> params, Options defaults = {}, GaLoreOptions galore = {})
      : GaLore({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults),
               std::move(galore)) {}

 private:
  static detail::BaseClass base_class(const Options& defaults) {
    using torch::optim::OptimizerOptions;
    return {
        [defaults] {
          return std::make_unique<Base>(std::vector<torch::optim::OptimizerParamGroup>(), defaults);
        },
        [](torch::optim::Optimizer& optimizer, const torch::optim::OptimizerParamGroup& group) {
          static_cast<Base&>(optimizer).add_param_group(group);
        },
        [](OptimizerOptions& options) -> double& { return static_cast<Options&>(options).weight_decay(); },
        [](const OptimizerOptions& options) -> std::string {
          if constexpr (requires(const Options& o) { o.weights(); })
            return static_cast<const Options&>(options).weights();
          return "plain";
        },
        [](const OptimizerOptions& options) { return dynamic_cast<const Options*>(&options) != nullptr; },
        Traits::decay_is_a_penalty,
        Traits::name};
  }
};

// ---- SAM
// ----------------------------------------------------------------------------------------------------------

struct SHOESTRING_API SAMOptions {
  SAMOptions(double rho = 0.05) : rho_(rho) {}
  /// How far the first half of a step goes; at least 0.
  TORCH_ARG(double, rho) = 0.05;
  /// ASAM (arXiv 2102.11600): up along w^2 g, by rho / norm(w g); rho is then about ten times larger.
  TORCH_ARG(bool, adaptive) = false;
};

/// Sharpness-aware minimisation (arXiv 2010.01412) around another optimizer.
///
/// The first half of a step goes up, from the weights w to w + rho g / norm(g), g being the gradient of all
/// of them; the second goes back to w, to the bit, and takes the base's step there with the gradient from
/// above:
///
///     SAM optimizer(std::make_unique<AdamW>(model->parameters(), AdamWOptions(1e-3)), SAMOptions(0.05));
///     loss().backward();  optimizer.first_step();  optimizer.zero_grad();
///     loss().backward();  optimizer.second_step(); optimizer.zero_grad();
///
/// Each backward may be several, over micro-batches. A first gradient that is not finite leaves the weights
/// where they are. Between the halves there is a copy of the weights that have a gradient. Layers that keep
/// running statistics see every batch twice. 16-bit weights lose what is below half a unit in the last place
/// on the way up.
class SHOESTRING_API SAM : public torch::optim::Optimizer {
 public:
  /// The groups are those of `base`, their options copies that the base is given before each of its steps. A
  /// group that is added later is added to a new SAM.
  explicit SAM(std::unique_ptr<torch::optim::Optimizer> base, SAMOptions options = {});

  void first_step();
  void second_step();
  /// Both halves with a closure, which computes the loss and its gradients and is called twice (what it adds
  /// to is cleared in between); returns the first loss. Without a closure, second_step().
  at::Tensor step(LossClosure closure = nullptr) override;

  torch::optim::Optimizer& base() { return *base_; }
  SAMOptions& options() { return options_; }

  /// The base's archive, and rho and adaptive; not between the halves of a step.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  void go_back();
  void expect_whole(const char* what) const;

  std::unique_ptr<torch::optim::Optimizer> base_;
  SAMOptions options_;
  bool up_ = false;  // between the halves
  std::vector<std::pair<at::Tensor, at::Tensor>>
      weights_;  // then: each parameter that has moved, and what it was
};

}  // namespace shoestring::optim
