#pragma once

// Optimizers around other optimizers; shoestring/optim.h includes this.

#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>

#include <shoestring/export.h>
#include <shoestring/optim/low_rank.h>
#include <shoestring/optim/rules.h>

namespace shoestring::optim {

// ---- GaLore

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

/// GaLore (arXiv 2403.03507) around AdamW, Lion or SGD: full-parameter training with the state of a low rank
/// r.
///
/// The gradient G (m, n) of a matrix becomes R = P^T G, with the r leading left singular vectors of an
/// earlier gradient in P (m, r), found by randomised subspace iteration. The base optimizer steps a virtual
/// parameter (r, n) with R, and scale times P times its update moves the matrix; weight decay is of the whole
/// matrix. Where n < m, P is on the right. What Python's GaLore computes.
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
 public:
  using Options = typename detail::BaseTraits<Base>::Options;
  explicit GaLore(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, Options defaults = {},
                  GaLoreOptions galore = {})
      : GaLoreCore(detail::base_class<Base>(defaults), std::make_unique<Options>(defaults)),
        own_(std::move(galore)) {
    for (const auto& group : param_groups) add_param_group(group);
  }
  explicit GaLore(std::vector<at::Tensor> params, Options defaults = {}, GaLoreOptions galore = {})
      : GaLore({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults),
               std::move(galore)) {}

  /// A group without options has the defaults, of either kind.
  void add_param_group(const torch::optim::OptimizerParamGroup& group) { add_param_group(group, own_); }
  void add_param_group(const torch::optim::OptimizerParamGroup& group, const GaLoreOptions& o) {
    add(group, {o.rank(), o.update_proj_gap(), o.scale(), o.projection(), o.seed()});
  }

  /// P of a parameter, (min(m, n), r) in its dtype; undefined where there is none.
  at::Tensor projection(const at::Tensor& param) const { return kept(param); }

 private:
  GaLoreOptions own_;
};

// ---- APOLLO

/// A group of parameters has its own.
struct SHOESTRING_API APOLLOOptions {
  /// Of the state: r; none: no projection.
  TORCH_ARG(std::optional<int64_t>, rank) = 128;
  /// Steps between random projections.
  TORCH_ARG(int64_t, update_proj_gap) = 200;
  /// What the update of a projected parameter is multiplied by. (The authors' code takes the square of it.)
  TORCH_ARG(double, scale) = 1.0;
  /// "channel", or "tensor": one factor for all of a parameter.
  TORCH_ARG(std::string, scale_type) = "channel";
  /// Of the projections.
  TORCH_ARG(int64_t, seed) = 0;

 public:
  /// APOLLO-Mini's: rank 1, one factor for each parameter, and a scale of the root of 128.
  static APOLLOOptions mini() { return APOLLOOptions().rank(1).scale(std::sqrt(128.0)).scale_type("tensor"); }
};

/// APOLLO (arXiv 2412.05270) around AdamW, or Lion or SGD: step sizes by channel, with the state of a low
/// rank r.
///
/// The gradient G (m, n) of a matrix, m <= n, becomes R = P G, (r, n), with random P. The base optimizer
/// steps a virtual parameter with R, at a learning rate of 1; its update U (r, n) tells how much G is scaled,
/// in every column j: W -= lr scale G norm(U[:, j]) / norm(R[:, j]), the norm of which grows by 1 % a step at
/// most. Where n < m, rows are the channels. P is made from a seed whenever it is needed, and from a new one
/// every update_proj_gap steps. What Python's APOLLO computes, with the same random numbers; with
/// APOLLOOptions::mini(), its APOLLOMini.
///
///     APOLLO<AdamW> optimizer(model->parameters(), AdamWOptions(1e-3), APOLLOOptions().rank(128));
///
/// Parameters, rounding and errors: as GaLore's. Memory: 4 bytes a matrix, and the base's state of max(m, n)
/// r parameters.
template <class Base>
class APOLLO : public detail::APOLLOCore {
 public:
  using Options = typename detail::BaseTraits<Base>::Options;
  explicit APOLLO(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, Options defaults = {},
                  APOLLOOptions apollo = {})
      : APOLLOCore(detail::base_class<Base>(defaults), std::make_unique<Options>(defaults)),
        own_(std::move(apollo)) {
    for (const auto& group : param_groups) add_param_group(group);
  }
  explicit APOLLO(std::vector<at::Tensor> params, Options defaults = {}, APOLLOOptions apollo = {})
      : APOLLO({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults),
               std::move(apollo)) {}

  /// A group without options has the defaults, of either kind.
  void add_param_group(const torch::optim::OptimizerParamGroup& group) { add_param_group(group, own_); }
  void add_param_group(const torch::optim::OptimizerParamGroup& group, const APOLLOOptions& o) {
    add(group, {o.rank(), o.update_proj_gap(), o.scale(), o.scale_type(), o.seed()});
  }

  /// The norm of a parameter's last update, before lr and scale: fp32; undefined where there is none.
  at::Tensor update_norm(const at::Tensor& param) const { return kept(param); }

 private:
  APOLLOOptions own_;
};

// ---- SAM

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
