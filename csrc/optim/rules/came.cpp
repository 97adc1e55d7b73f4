// CAME (Luo et al., arXiv 2307.02047). It divides the gradient by the root of Adafactor's second moment,
// clips the result to get u, and keeps m, the running mean of u. The instability is a running mean of (u -
// m)^2, stored per row and per column. The final update is m divided by the root of the instability.

#include <cmath>
#include <limits>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <shoestring/optim/rules.h>

#include "optim/rules/composite.h"
#include "optim/rules/factored.h"

namespace shoestring::optim::ops {
namespace {

using at::Tensor;

// If a row and a column have no gradients, the product of their means underflows to zero. The update of their
// common element is zero, and this lower bound of the product keeps it from becoming NaN.
constexpr float kLeast = std::numeric_limits<float>::min();

Tensor inverse_root(const Tensor& square) { return square.clamp_min_(kLeast).rsqrt_(); }

struct CameStep {
  const Share& s;
  Tensor u{};  // the gradient, then the update
  Squares squares{};
  Tensor length{}, mean{};  // the norm of the update, and the running mean of updates

  bool is_matrix() const { return whole_sizes(s.param).size() > 1; }
};

void came(const Call& call, const CAMEOptions& o) {
  const auto [beta1, beta2, beta3] = o.betas();
  const auto [eps1, eps2] = o.eps();
  const auto ema = EmaOptions().beta(beta1);
  const Factored square(call, 0), instability(call, 3);
  const Tensor share2 = at::full({}, 1 - beta2, call.step.options());
  const Tensor share3 = at::full({}, 1 - beta3, call.step.options());
  const auto add_up = [&, eps1 = eps1](CameStep& x) -> Partial {
    x.u = x.s.gradient();
    x.squares = square.fresh(x.s, x.u.square().add_(eps1));
    return {.sums = x.squares.sums()};
  };
  const auto find_update = [&](CameStep& x) -> Partial {
    x.u = inverse_root(square.advance(x.s, x.squares, share2, kLeast)).mul_(x.u);
    x.squares = {};
    x.length = at::linalg_vector_norm(x.u);
    return {.norms = {x.length}};
  };
  const auto find_mean = [&, eps2 = eps2](CameStep& x) -> Partial {
    const double root = std::sqrt(c10::multiply_integers(whole_sizes(x.s.param)));
    x.u.div_((x.length / (root * o.clip_threshold())).clamp_min_(1));
    x.mean = x.is_matrix() ? x.s.empty() : x.u;
    Arguments mean = x.s.arguments(ema, x.mean, x.u, x.s.before);
    x.s.pass_moments(mean);
    mean.call();
    if (x.is_matrix()) x.squares = instability.fresh(x.s, x.u.sub_(x.mean).square_().add_(eps2));
    x.u.reset();
    return {.sums = x.squares.sums()};
  };
  const auto apply = [&](CameStep& x) -> Partial {
    if (x.is_matrix()) x.mean.mul_(inverse_root(instability.advance(x.s, x.squares, share3, kLeast)));
    x.s.apply(x.mean, o.weight_decay());
    return {};
  };
  in_stages<CameStep>(call, {add_up, find_update, find_mean, apply});
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
  static const Rule rule{
      .name = "CAME", .op = "came_", .moments = {{"exp_avg", true}}, .extras = statistics()};
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
