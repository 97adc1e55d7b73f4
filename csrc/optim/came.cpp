// CAME (Luo et al., arXiv 2307.02047). It divides the gradient by the root of Adafactor's second moment,
// clips the result to get u, and keeps m, the running mean of u. The instability is a running mean of (u -
// m)^2, stored per row and per column. The final update is m divided by the root of the instability.

#include <cmath>
#include <limits>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <shoestring/optim/rules.h>

#include "optim/composite.h"
#include "optim/factored.h"

namespace shoestring::optim::ops {
namespace {

using at::Tensor;

struct CameArguments {
  double beta1, beta2, beta3, eps1, eps2, clip_threshold;

  explicit CameArguments(const Call& call)
      : beta1(call.fraction("beta1")), beta2(call.fraction("beta2")), beta3(call.fraction("beta3")),
        eps1(call.at_least_zero("eps1")), eps2(call.at_least_zero("eps2")),
        clip_threshold(call.number("clip_threshold")) {
    TORCH_CHECK(beta1 > 0, call.op,
                ": beta1: expected a number above 0, since the instability is 0 without a mean, ",
                "received ", beta1);
    for (const char* name : {"eps1", "eps2", "clip_threshold"}) {
      TORCH_CHECK(call.number(name) > 0, call.op, ": ", name, ": expected a number above 0, received ",
                  call.number(name));
    }
  }
};

// If a row and a column have no gradients, the product of their means underflows to zero. The update of their
// common element is zero, and this lower bound of the product keeps it from becoming NaN.
constexpr float kLeast = std::numeric_limits<float>::min();

Tensor inverse_root(const Tensor& square) { return square.clamp_min_(kLeast).rsqrt_(); }

void came(const Call& call) {
  const CameArguments o(call);
  call.options();
  const Moment mean{"exp_avg", true, call.tensor("exp_avg"), call.optional("exp_avg_scale")};
  const Factored square(call, "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq");
  const Factored instability(call, "exp_avg_res_row", "exp_avg_res_col", nullptr);
  const Tensor share2 = at::full({}, 1 - o.beta2, call.step.options());
  const Tensor share3 = at::full({}, 1 - o.beta3, call.step.options());
  for (const Share& s : shares(call, {mean})) {
    if (s.param.numel() == 0) {
      s.apply(s.empty());
      continue;
    }
    Tensor g = s.gradient();
    Tensor u = inverse_root(square.advance(s, g.square().add_(o.eps1), share2, kLeast)).mul_(g);
    g.reset();
    u.div_((at::linalg_vector_norm(u) / (std::sqrt(s.param.numel()) * o.clip_threshold)).clamp_min_(1));

    const bool factored = s.param.dim() > 1;
    const Tensor m = factored ? s.empty() : u;
    s.run("_ema_", m, u, s.before, {s.moment("exp_avg", mean), {{"beta", o.beta1}}});
    if (factored) {
      u = instability.advance(s, u.sub_(m).square_().add_(o.eps2), share3, kLeast);
      m.mul_(inverse_root(u));
    }
    s.apply(m);
  }
}

const Registered<came, came> kCameRegistered("came_");

}  // namespace
}  // namespace shoestring::optim::ops

namespace shoestring::optim {

using namespace detail;

namespace {

std::vector<Extra> statistics(const Tensor& param) {
  auto all = factored(param, "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq");
  for (Extra& extra : factored(param, "exp_avg_res_row", "exp_avg_res_col", nullptr))
    all.push_back(std::move(extra));
  return all;
}

}  // namespace

const Rule& CAMEOptions::rule() const {
  static const Rule rule{"CAME", "came_", {{"exp_avg", true}}, statistics};
  return rule;
}

std::vector<Field> CAMEOptions::fields() {
  return {{"betas", &betas_, &kFraction},
          {"eps", &eps_, &kAboveZero},
          {"clip_threshold", &clip_threshold_, &kAboveZero},
          {"weight_decay", &weight_decay_, &kAtLeastZero}};
}

void CAMEOptions::check() const {
  const double beta1 = std::get<0>(betas_);
  expect(beta1 > 0, rule().name, "betas", "a first number above 0, since the instability is 0 without a mean",
         beta1);
}

}  // namespace shoestring::optim
