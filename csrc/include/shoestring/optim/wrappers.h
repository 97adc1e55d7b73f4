#pragma once

// Optimizers that wrap another optimizer: GaLore, APOLLO and SAM. shoestring/optim.h includes this header.

#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>

#include <shoestring/core/export.h>
#include <shoestring/optim/low_rank.h>
#include <shoestring/optim/rules.h>

namespace shoestring::optim {

// ---- GaLore

/// Options of GaLore. Each parameter group has its own copy.
struct SHOESTRING_API GaLoreOptions {
  /// Rank r of the projected gradient and of the optimizer state. With std::nullopt the base optimizer steps
  /// every parameter without a projection, which is usual for embeddings and output heads.
  TORCH_ARG(std::optional<int64_t>, rank) = 128;
  /// Number of steps between two computations of the projection.
  TORCH_ARG(int64_t, update_proj_gap) = 200;
  /// Factor that multiplies the update of a projected parameter.
  TORCH_ARG(double, scale) = 0.25;
  /// Side on which GaLore multiplies the gradient by the projection P: "left" reduces the rows, "right"
  /// reduces the columns, and "auto" reduces the smaller side.
  TORCH_ARG(std::string, projection) = "auto";
  /// Seed of the random start of the subspace iteration that finds a projection.
  TORCH_ARG(int64_t, seed) = 0;
};

/// GaLore (arXiv 2403.03507) around AdamW, Lion or SGD: trains all parameters with optimizer state of low
/// rank r.
///
/// The gradient G (m, n) of a matrix becomes R = P^T G. P (m, r) holds the r leading left singular vectors of
/// an earlier gradient, found by randomised subspace iteration. The base optimizer steps a small stand-in for
/// the matrix, (r, n), with the gradient R. The matrix then moves by scale * P * (update of the stand-in).
/// Weight decay applies to the whole matrix. If n < m, P multiplies from the right. The result is the same as
/// that of GaLore in Python.
///
///     GaLore<AdamW> optimizer(model->parameters(), AdamWOptions(1e-3), GaLoreOptions().rank(128));
///
/// Parameters are fp32, bf16 or fp16. A parameter with more than two dimensions is treated as a matrix of
/// shape (first dimension, product of all others). The base optimizer steps vectors directly, and also
/// matrices with fewer than r rows (columns for a projection from the right). 16-bit weights are rounded once
/// per step, to nearest.
///
/// Memory: min(m, n) * r elements of the parameter's dtype for P, and the base optimizer's state for max(m,
/// n) * r parameters. Raises c10::Error if an option, a dtype or an archive does not fit.
template <class Base>
class GaLore : public detail::LowRankCore {
 public:
  using Options = typename detail::BaseTraits<Base>::Options;
  explicit GaLore(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, Options defaults = {},
                  GaLoreOptions galore = {})
      : LowRankCore(detail::galore(), detail::base_class<Base>(defaults),
                    std::make_unique<Options>(defaults)),
        own_(std::move(galore)) {
    for (const auto& group : param_groups) add_param_group(group);
  }
  explicit GaLore(std::vector<at::Tensor> params, Options defaults = {}, GaLoreOptions galore = {})
      : GaLore({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults),
               std::move(galore)) {}

  /// Adds a parameter group. A group without options takes the defaults of the base optimizer and of GaLore.
  void add_param_group(const torch::optim::OptimizerParamGroup& group) { add_param_group(group, own_); }
  void add_param_group(const torch::optim::OptimizerParamGroup& group, const GaLoreOptions& o) {
    add(group, {o.rank(), o.update_proj_gap(), o.scale(), o.projection(), o.seed()});
  }

  /// Returns the projection P of a parameter, (min(m, n), r) in the parameter's dtype. Undefined if the
  /// parameter has no projection (yet).
  at::Tensor projection(const at::Tensor& param) const { return kept(param); }

 private:
  GaLoreOptions own_;
};

// ---- APOLLO

/// Options of APOLLO. Each parameter group has its own copy.
struct SHOESTRING_API APOLLOOptions {
  /// Rank r of the projected gradient and of the optimizer state. With std::nullopt the base optimizer steps
  /// every parameter without a projection.
  TORCH_ARG(std::optional<int64_t>, rank) = 128;
  /// Number of steps between two random projections.
  TORCH_ARG(int64_t, update_proj_gap) = 200;
  /// Factor that multiplies the update of a projected parameter. (The option `scale` in the code of APOLLO's
  /// authors is the square of this factor.)
  TORCH_ARG(double, scale) = 1.0;
  /// Granularity of APOLLO's scaling: "channel" for one factor per channel (row or column), "tensor" for one
  /// factor per parameter.
  TORCH_ARG(std::string, scale_type) = "channel";
  /// Seed of the random projections.
  TORCH_ARG(int64_t, seed) = 0;

 public:
  /// Returns the options of APOLLO-Mini: rank 1, one factor per parameter, and scale sqrt(128).
  static APOLLOOptions mini() { return APOLLOOptions().rank(1).scale(std::sqrt(128.0)).scale_type("tensor"); }
};

/// APOLLO (arXiv 2412.05270) around AdamW, Lion or SGD: one step size per channel, with optimizer state of
/// low rank r.
///
/// The gradient G (m, n) of a matrix with m <= n becomes R = P G, (r, n), with a random P. The base optimizer
/// steps a small stand-in for the matrix, (r, n), with the gradient R and learning rate 1. The update U (r,
/// n) of the stand-in decides how much each column j of G is scaled:
///
///     W[:, j] -= lr * scale * G[:, j] * norm(U[:, j]) / norm(R[:, j])
///
/// The norm of this update may grow by at most 1 % per step. If n < m, the channels are rows instead of
/// columns. P is not stored: it is generated from a seed whenever it is needed, and the seed changes every
/// update_proj_gap steps. The results and random numbers are those of APOLLO in Python. With
/// APOLLOOptions::mini() they are those of APOLLOMini.
///
///     APOLLO<AdamW> optimizer(model->parameters(), AdamWOptions(1e-3), APOLLOOptions().rank(128));
///
/// Supported parameters, rounding of 16-bit weights and errors are the same as for GaLore. Memory: 4 bytes
/// per matrix, and the base optimizer's state for max(m, n) * r parameters.
template <class Base>
class APOLLO : public detail::LowRankCore {
 public:
  using Options = typename detail::BaseTraits<Base>::Options;
  explicit APOLLO(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, Options defaults = {},
                  APOLLOOptions apollo = {})
      : LowRankCore(detail::apollo(), detail::base_class<Base>(defaults),
                    std::make_unique<Options>(defaults)),
        own_(std::move(apollo)) {
    for (const auto& group : param_groups) add_param_group(group);
  }
  explicit APOLLO(std::vector<at::Tensor> params, Options defaults = {}, APOLLOOptions apollo = {})
      : APOLLO({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults),
               std::move(apollo)) {}

  /// Adds a parameter group. A group without options takes the defaults of the base optimizer and of APOLLO.
  void add_param_group(const torch::optim::OptimizerParamGroup& group) { add_param_group(group, own_); }
  void add_param_group(const torch::optim::OptimizerParamGroup& group, const APOLLOOptions& o) {
    add(group, {o.rank(), o.update_proj_gap(), o.scale(), o.scale_type(), o.seed()});
  }

  /// Returns the norm of the parameter's last update, before multiplication by lr and scale, as an fp32
  /// scalar. Undefined if the parameter is not projected or has not been stepped.
  at::Tensor update_norm(const at::Tensor& param) const { return kept(param); }

 private:
  APOLLOOptions own_;
};

// ---- SAM

namespace detail {
class MovedWeights;
}

struct SHOESTRING_API SAMOptions {
  SAMOptions(double rho = 0.05) : rho_(rho) {}
  /// Distance by which the first half of a step moves the weights; at least 0.
  TORCH_ARG(double, rho) = 0.05;
  /// Use ASAM (arXiv 2102.11600): move the weights w with gradients g by rho * w^2 g / norm(w g). A good rho
  /// is then about ten times larger than for SAM.
  TORCH_ARG(bool, adaptive) = false;
  /// Only every `interval`-th step, the first one included, moves the weights and needs a second backward.
  /// The others are steps of the base optimizer. At least 1.
  TORCH_ARG(int64_t, interval) = 1;
};

/// Sharpness-aware minimisation (arXiv 2010.01412) around another optimizer.
///
/// The first half of a step moves the weights w up to w + rho * g / norm(g). The norm is that of the gradient
/// of all weights together. The second half restores w bit for bit, and takes the base optimizer's step with
/// the gradient computed at the moved weights:
///
///     SAM optimizer(std::make_unique<AdamW>(model->parameters(), AdamWOptions(1e-3)), SAMOptions(0.05));
///     loss().backward();  optimizer.first_step();  optimizer.zero_grad();
///     loss().backward();  optimizer.second_step(); optimizer.zero_grad();
///
/// With SAMOptions::interval, first_step() tells whether the step needs the second backward:
///
///     loss().backward();
///     if (optimizer.first_step()) {
///       optimizer.zero_grad();
///       loss().backward();
///     }
///     optimizer.second_step(); optimizer.zero_grad();
///
/// Each half may run several backward passes, one per micro-batch. If the first gradient is not finite, the
/// weights do not move. Between the two halves, SAM holds a copy of all weights that have a gradient. Layers
/// with running statistics (such as batch norm) see every batch twice. For 16-bit weights, movements below
/// half a unit in the last place are lost on the way up.
class SHOESTRING_API SAM : public torch::optim::Optimizer {
 public:
  /// Takes over the parameter groups of `base`. SAM copies the groups' options, and writes its copies to
  /// `base` before each step of `base`. To add a group later, construct a new SAM.
  explicit SAM(std::unique_ptr<torch::optim::Optimizer> base, SAMOptions options = {});

  /// Moves the weights and returns true, or returns false in a step that does not move them, in which
  /// second_step() takes the step of the base optimizer with the gradients that are there.
  bool first_step();
  void second_step();
  /// Runs second_step() with gradients of a loss that was multiplied by grad_scale; see
  /// LowMemoryOptimizer::scaled_step. The base optimizer's step is also skipped if the first half's gradients
  /// were not finite. A base optimizer that has no scaled_step gets divided gradients in grad(), and the host
  /// waits to know whether they are finite. GradScaler::step calls this function.
  at::Tensor scaled_step(const at::Tensor& grad_scale, const at::Tensor& found_inf = {});
  /// Runs both halves of a SAM step. The closure computes the loss and its gradients, and is called twice;
  /// gradients are cleared between the two calls. Returns the loss of the first call. Without a closure, runs
  /// second_step().
  at::Tensor step(LossClosure closure = nullptr) override;

  torch::optim::Optimizer& base() { return *base_; }
  SAMOptions& options() { return options_; }

  /// Saves the base optimizer, SAM's options and the number of steps to an archive. Raises between
  /// first_step() and second_step().
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  // Restores the weights and copies all options to the base optimizer. Returns whether the gradients of the
  // last first_step() were finite, as bool; undefined if there were none.
  at::Tensor descend(const char* what);
  void expect_whole(const char* what) const;
  // Returns whether this step moves the weights.
  bool moves() const { return steps_ % options_.interval() == 0; }

  std::unique_ptr<torch::optim::Optimizer> base_;
  SAMOptions options_;
  int64_t steps_ = 0;  // number of steps that have been taken, those that scaled_step has skipped included
  // Between first_step() and second_step(): the weights that have moved.
  std::shared_ptr<detail::MovedWeights> moved_;
};

}  // namespace shoestring::optim
