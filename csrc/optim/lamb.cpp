// LAMB (You et al., arXiv 1904.00962): AdamW's update, scaled to the norm of the weights.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <shoestring/optim/rules.h>

#include "optim/composite.h"
#include "optim/rule.h"

namespace shoestring::optim::ops {
namespace {

using at::Tensor;

void lamb(const Call& call, const LAMBOptions& o) {
  const double decay = o.weight_decay();
  const auto adamw = AdamWOptions(1).betas(o.betas()).eps(o.eps()).weight_decay(0);
  for (const Share& s : shares(call)) {
    // The operator adamw_ with lr = 1 subtracts AdamW's update from u = 0, so u becomes the negative update.
    const Tensor u = s.empty().zero_();
    Arguments step = s.arguments(adamw, u, s.grad, s.before);
    s.pass_gradient(step);
    s.pass_moments(step);
    step.call();
    const Tensor norm = s.weight_norm();
    const Tensor length = at::linalg_vector_norm(decay == 0 ? u : at::sub(u, s.weight(), decay));
    const Tensor trust = at::where((norm > 0).logical_and_(length > 0), norm / length, 1.0f);
    s.apply(u, decay, {}, call.lr_tensor ? trust * call.lr_tensor->reshape({}) : trust * call.lr,
            /*maximize=*/true);
  }
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
