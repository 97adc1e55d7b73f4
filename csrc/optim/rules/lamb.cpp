// LAMB (You et al., arXiv 1904.00962): AdamW's update, scaled to the norm of the weights.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <shoestring/optim/rules.h>

#include "optim/rule.h"
#include "optim/rules/composite.h"

namespace shoestring::optim::ops {
namespace {

using at::Tensor;

struct LambStep {
  const Share& s;
  Tensor u{}, norm{}, length{};  // the negative update, the norm of the weights, and that of the update
};

void lamb(const Call& call, const LAMBOptions& o) {
  const double decay = o.weight_decay();
  const auto adamw = AdamWOptions(1).betas(o.betas()).eps(o.eps()).weight_decay(0);
  const auto find_update = [&](LambStep& x) -> Partial {
    // The operator adamw_ with lr = 1 subtracts AdamW's update from u = 0, so u becomes the negative update.
    x.u = x.s.empty().zero_();
    Arguments step = x.s.arguments(adamw, x.u, x.s.grad, x.s.before);
    x.s.pass_gradient(step);
    x.s.pass_moments(step);
    step.call();
    x.norm = x.s.weight_norm();
    x.length = at::linalg_vector_norm(decay == 0 ? x.u : at::sub(x.u, x.s.weight(), decay));
    return {.norms = {x.norm, x.length}};
  };
  const auto apply = [&](LambStep& x) -> Partial {
    const Tensor trust = at::where((x.norm > 0).logical_and_(x.length > 0), x.norm / x.length, 1.0f);
    x.s.apply(x.u, decay, {}, call.lr_tensor ? trust * call.lr_tensor->reshape({}) : trust * call.lr,
              /*maximize=*/true);
    return {};
  };
  in_stages<LambStep>(call, {find_update, apply});
}

const Registered<LAMBOptions, lamb, lamb> kLambRegistered;

}  // namespace
}  // namespace shoestring::optim::ops

namespace shoestring::optim {

using namespace detail;

const Rule& LAMBOptions::rule() const {
  static const Rule rule{.name = "LAMB",
                         .op = "lamb_",
                         .moments = {{"exp_avg", true}, {"exp_avg_sq", false}},
                         .takes_whole_parameters = true};
  return rule;
}

std::vector<Field> LAMBOptions::fields() {
  return {{"betas", &betas_, &kFraction},
          {"eps", &eps_, &kAtLeastZero},
          {"weight_decay", &weight_decay_, &kAtLeastZero}};
}

}  // namespace shoestring::optim
