#pragma once

// The autograd function that linear_cross_entropy and linear_distillation share.

#include <optional>
#include <utility>

#include <ATen/Functions.h>

#include "core/autograd.h"
#include "losses/head.h"
#include "losses/token_loss.h"

namespace shoestring::losses {

/// The autograd function of a loss of an output layer.
///
/// A scalar loss has a scalar upstream gradient. Forward therefore computes the gradients while it has the
/// logits, and backward only multiplies them by the upstream gradient. This takes three matrix products in
/// all. With reduction='none', or if the statistics have gradients, there is one upstream gradient per token.
/// It is known only in backward, which computes the logits again.
///
/// Forward must not add an unscaled gradient to weight_grad, because backward could not correct it. If
/// upstream_grad gives the upstream gradient, forward adds the scaled gradient to weight_grad. Otherwise
/// backward computes the logits again and adds the gradient to weight_grad.
template <class Problem>
class HeadLoss : public torch::autograd::Function<HeadLoss<Problem>> {
  using AutogradContext = torch::autograd::AutogradContext;
  using variable_list = torch::autograd::variable_list;

 public:
  /// Calls the function for `p`, and returns the results of the operator.
  static variable_list record(const Problem& p) {
    const auto inputs = inputs_of(p);
    return HeadLoss::apply(*inputs[kHidden], *inputs[kWeight], inputs[kBias], inputs[kLoraHidden],
                           inputs[kLoraB], p);
  }

  static variable_list forward(AutogradContext* ctx, const Tensor& hidden, const Tensor& /*weight*/,
                               const OptionalTensor& /*bias*/, const OptionalTensor& /*lora_hidden*/,
                               const OptionalTensor& /*lora_B*/, Problem p) {
    at::AutoDispatchBelowADInplaceOrView below;
    Saved saved;
    saved.mask = require_grad(inputs_of(p));
    saved.mask[kWeight] |= p.weight_grad().has_value();
    const Reduction reduction = p.take_reduction();
    const auto compute = compute_type(hidden);
    saved.early = reduction.scalar && (!p.weight_grad() || p.upstream_grad());
    saved.known = p.upstream_grad().value_or(1);
    Tensor factor = reduction.factor(compute);
    if (reduction.scalar && !factor.defined()) factor = at::ones({}, hidden.options().dtype(compute));
    const Tensor known = saved.known == 1 ? factor : factor * saved.known;
    const auto rows = p.rows({saved.early ? known : Tensor()}, saved.early ? saved.mask : Mask{});

    ctx->set_materialize_grads(false);
    saved.gradients = rows.gradients;
    variable_list results = p.results(reduction, rows);
    const bool stats = results.size() > 1;
    if (stats) ctx->mark_non_differentiable({results[4], results[5]});  // argmax and correct
    if (!saved.early || stats)
      saved.again = {std::move(p), reduction.upstream(factor, stats ? results[2] : Tensor())};
    save_fields(ctx, saved);
    return results;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& upstream) {
    auto saved = saved_fields<Saved>(ctx);
    variable_list gradients(kInputs);
    bool stats = false;
    for (size_t i = 1; i < upstream.size(); ++i) stats |= upstream[i].defined();
    if (saved.early && !stats) {
      at::NoGradGuard no_grad;
      for (int i = 0; i < kInputs; ++i) {
        if (!saved.gradients[i].defined() || !upstream[0].defined()) continue;
        gradients[i] =
            scale_gradient(saved.gradients[i], saved.known == 1 ? upstream[0] : upstream[0] / saved.known);
      }
    } else {
      at::AutoDispatchBelowADInplaceOrView below;
      const Problem& p = saved.again->p;
      TORCH_CHECK(!saved.early || !p.weight_grad(), Problem::kOp,
                  ": upstream_grad: expected an upstream gradient of the loss alone, received one of its "
                  "statistics; leave "
                  "upstream_grad out");
      saved.gradients = {};  // frees the gradients that forward has computed
      const auto rows = p.rows(saved.again->upstream.of_tokens(upstream, compute_type(p.input)), saved.mask);
      gradients.assign(rows.gradients.begin(), rows.gradients.end());
    }
    gradients = once_differentiable(Problem::kOp, std::move(gradients));
    gradients.push_back(Tensor());
    return gradients;
  }

 private:
  // The values with which backward computes the logits again.
  struct Again {
    Problem p;
    TokenUpstream upstream;

    template <class Self, class Visitor>
    static void fields(Self& self, Visitor& visit) {
      Problem::fields(self.p, visit);
      TokenUpstream::fields(self.upstream, visit);
    }
  };
  struct Saved {
    // early: whether forward has computed the gradients. known: the upstream gradient that they include.
    bool early = false;
    double known = 1;
    Mask mask{};
    Gradients gradients;
    std::optional<Again> again;

    template <class Self, class Visitor>
    static void fields(Self& self, Visitor& visit) {
      visit("early", self.early);
      visit("known", self.known);
      visit("mask", self.mask);
      visit_gradients(self.gradients, visit);
      visit.maybe(self.again);
    }
  };
};

}  // namespace shoestring::losses
