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

// If a row and a column have no gradients, the product of their means underflows to zero. The update of their
// common element is zero, and this lower bound of the product keeps it from becoming NaN.
constexpr float kLeast = std::numeric_limits<float>::min();

Tensor inverse_root(const Tensor& square) { return square.clamp_min_(kLeast).rsqrt_(); }

void came(const Call& call, const CAMEOptions& o) {
  const auto [beta1, beta2, beta3] = o.betas();
  const auto [eps1, eps2] = o.eps();
  const auto ema = EmaOptions().beta(beta1);
  const Factored square(call, 0), instability(call, 3);
  const Tensor share2 = at::full({}, 1 - beta2, call.step.options());
  const Tensor share3 = at::full({}, 1 - beta3, call.step.options());
  for (const Share& s : shares(call)) {
    if (s.param.numel() == 0) {
      s.apply(s.empty(), o.weight_decay());
      continue;
    }
    Tensor g = s.gradient();
    Tensor u = inverse_root(square.advance(s, g.square().add_(eps1), share2, kLeast)).mul_(g);
    g.reset();
    u.div_((at::linalg_vector_norm(u) / (std::sqrt(s.param.numel()) * o.clip_threshold())).clamp_min_(1));

    const bool factored = s.param.dim() > 1;
    const Tensor m = factored ? s.empty() : u;
    Arguments mean = s.arguments(ema, m, u, s.before);
    s.pass_moments(mean);
    mean.call();
    if (factored) {
      u = instability.advance(s, u.sub_(m).square_().add_(eps2), share3, kLeast);
      m.mul_(inverse_root(u));
    }
    s.apply(m, o.weight_decay());
  }
}

const Registered<CAMEOptions, came, came> kCameRegistered;

}  // namespace
}  // namespace shoestring::optim::ops

namespace shoestring::optim {

using namespace detail;

namespace {

std::vector<Extra> statistics() {
  auto all = factored("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq");
  for (const Extra& extra : factored("exp_avg_res_row", "exp_avg_res_col", nullptr)) all.push_back(extra);
  return all;
}

}  // namespace

const Rule& CAMEOptions::rule() const {
  static const Rule rule{"CAME", "came_", {{"exp_avg", true}}, statistics()};
  return rule;
}

std::vector<Field> CAMEOptions::fields() {
  return {{"betas", &betas_, &kFraction, Argument::kOptional},
          {"eps", &eps_, &kAboveZero, Argument::kOptional},
          {"clip_threshold", &clip_threshold_, &kAboveZero, Argument::kOptional},
          {"weight_decay", &weight_decay_, &kAtLeastZero, Argument::kOptional}};
}

void CAMEOptions::check(const Reporter& reporter) const {
  const double beta1 = std::get<0>(betas_);
  if (beta1 == 0)
    reporter.refuse_element("betas", 1, "above 0, since the instability is 0 without a mean", beta1);
}

}  // namespace shoestring::optim
