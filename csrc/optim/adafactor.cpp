// Adafactor (Shazeer and Stern, arXiv 1804.04235), as in torch.optim.Adafactor. For a matrix it stores only
// one second moment per row and one per column.

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

// Returns the machine epsilon of the weights' dtype. bf16 weights that are stored with the lower 16 bits of
// their fp32 values count as fp32.
double epsilon(const Share& s) {
  const auto type = s.call.weight_remainder ? at::kFloat : s.param.scalar_type();
  return type == at::kFloat      ? std::numeric_limits<float>::epsilon()
         : type == at::kBFloat16 ? std::numeric_limits<c10::BFloat16>::epsilon()
                                 : std::numeric_limits<c10::Half>::epsilon();
}

void adafactor(const Call& call, const AdafactorOptions& o) {
  const bool has_mean = !call.moments.empty();
  TORCH_CHECK(has_mean == (o.beta1() > 0), call.op,
              ": exp_avg: expected a tensor where beta1 is above 0, and None where it is 0, received beta1 ",
              o.beta1(), " and ", has_mean ? "a tensor" : "None");
  const auto ema = EmaOptions().beta(o.beta1());
  const Factored square(call, 0);
  for (const Share& s : shares(call)) {
    if (s.param.numel() == 0) {
      s.apply(s.empty(), o.weight_decay());
      continue;
    }
    const auto [given_eps1, eps2] = o.eps();
    const double eps1 = given_eps1.value_or(epsilon(s)), root = std::sqrt(s.param.numel());
    const Tensor t = s.before + 1;
    Tensor g = s.gradient();
    // u first holds the running means of squared gradients and then the update. Dividing u by `over` limits
    // the root mean square of u to the option d.
    Tensor u =
        square.advance(s, g.square(), t.pow(o.beta2_decay()), eps1).clamp_min_(eps1 * eps1).rsqrt_().mul_(g);
    g.reset();
    const Tensor over = (at::linalg_vector_norm(u) / (root * o.d())).clamp_min_(1);

    // Adafactor's step size in step t is min(lr, 1 / sqrt(t)). It is divided by lr here, because the operator
    // _apply_ multiplies by lr.
    const Tensor rate = call.lr_tensor ? call.lr_tensor->reshape({}) * t.sqrt() : t.sqrt() * call.lr;
    Tensor factor = (s.weight_norm() / root).clamp_min_(eps2) * rate.reciprocal().clamp_max_(1);
    if (has_mean) {
      Arguments mean = s.arguments(ema, u, u, s.before);
      s.pass_moments(mean);
      mean.clip_coef = over.reciprocal();
      mean.call();
    } else {
      factor = factor / over;
    }
    s.apply(u, o.weight_decay(), factor);
  }
}

const Registered<AdafactorOptions, adafactor, adafactor> kAdafactorRegistered;

}  // namespace
}  // namespace shoestring::optim::ops

namespace shoestring::optim {

using namespace detail;

namespace {

Rule adafactor_rule(bool has_mean) {
  Moment mean("exp_avg", true);
  mean.is_optional = true;
  mean.is_kept = has_mean;
  return {"Adafactor", "adafactor_", {mean}, factored("row_var", "col_var", "variance")};
}

}  // namespace

const Rule& AdafactorOptions::rule() const {
  static const Rule bare = adafactor_rule(false), mean = adafactor_rule(true);
  return beta1_ > 0 ? mean : bare;
}

std::vector<Field> AdafactorOptions::fields() {
  return {{"beta1", &beta1_, &kFraction, Argument::kOptional},
          {"beta2_decay", &beta2_decay_, &kAtMostZero, Argument::kOptional},
          {"eps", &eps_, &kAtLeastZero, Argument::kOptional},
          {"d", &d_, &kAtLeastOne, Argument::kOptional},
          {"weight_decay", &weight_decay_, &kAtLeastZero, Argument::kOptional}};
}

}  // namespace shoestring::optim
