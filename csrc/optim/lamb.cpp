// LAMB (You et al., arXiv 1904.00962): AdamW's update, scaled to the norm of the weights.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <shoestring/optim/rules.h>

#include "optim/composite.h"
#include "optim/rule.h"

namespace shoestring::optim::ops {
namespace {

using at::Tensor;

void lamb(const Call& call) {
  const double lr = call.options().lr, decay = call.at_least_zero("weight_decay");
  const double beta1 = call.fraction("beta1"), beta2 = call.fraction("beta2"),
               eps = call.at_least_zero("eps");
  const std::vector<Moment> moments{
      {"exp_avg", true, call.tensor("exp_avg"), call.optional("exp_avg_scale")},
      {"exp_avg_sq", false, call.tensor("exp_avg_sq"), call.optional("exp_avg_sq_scale")}};
  for (const Share& s : shares(call, moments)) {
    // The operator adamw_ with lr = 1 subtracts AdamW's update from u = 0, so u becomes the negative update.
    const Tensor u = s.empty().zero_();
    s.run("adamw_", u, s.grad, s.before,
          {s.of_gradient(),
           s.moment("exp_avg", moments[0]),
           s.moment("exp_avg_sq", moments[1]),
           {{"lr", 1.0}, {"beta1", beta1}, {"beta2", beta2}, {"eps", eps}, {"weight_decay", 0.0}}});
    const Tensor norm = s.weight_norm();
    const Tensor length = at::linalg_vector_norm(decay == 0 ? u : at::sub(u, s.weight(), decay));
    const Tensor trust = at::where((norm > 0).logical_and_(length > 0), norm / length, 1.0f);
    s.apply(u, {}, call.lr_tensor ? trust * call.lr_tensor->reshape({}) : trust * lr, /*maximize=*/true);
  }
}

const Registered<lamb, lamb> kLambRegistered("lamb_");

}  // namespace
}  // namespace shoestring::optim::ops

namespace shoestring::optim {

using namespace detail;

const Rule& LAMBOptions::rule() const {
  static const Rule rule{"LAMB",  "lamb_", {{"exp_avg", true}, {"exp_avg_sq", false}},
                         nullptr, false,   /*takes_whole_parameters=*/true};
  return rule;
}

std::vector<Field> LAMBOptions::fields() {
  return {{"betas", &betas_, &kFraction},
          {"eps", &eps_, &kAtLeastZero},
          {"weight_decay", &weight_decay_, &kAtLeastZero}};
}

}  // namespace shoestring::optim
