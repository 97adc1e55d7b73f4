// Adafactor (Shazeer and Stern, arXiv 1804.04235), as in torch.optim.Adafactor. For a matrix it stores only
// one second moment per row and one per column.

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

// Returns the machine epsilon of the weights' dtype. bf16 weights that are stored with the lower 16 bits of
// their fp32 values count as fp32.
double epsilon(const Share& s) {
  const auto type = s.call.weight_remainder ? at::kFloat : s.param.scalar_type();
  return type == at::kFloat      ? std::numeric_limits<float>::epsilon()
         : type == at::kBFloat16 ? std::numeric_limits<c10::BFloat16>::epsilon()
                                 : std::numeric_limits<c10::Half>::epsilon();
}

struct AdafactorStep {
  const Share& s;
  Tensor u{};  // the gradient, then the update
  Squares squares{};
  Tensor length{}, norm{};  // the norm of the update, and that of the weights

  double root() const { return std::sqrt(c10::multiply_integers(whole_sizes(s.param))); }
  Tensor time() const { return s.before + 1; }
};

void adafactor(const Call& call, const AdafactorOptions& o) {
  const bool has_mean = !call.moments.empty();
  TORCH_CHECK(has_mean == (o.beta1() > 0), call.op,
              ": exp_avg: expected a tensor where beta1 is above 0, and None where it is 0, received beta1 ",
              o.beta1(), " and ", has_mean ? "a tensor" : "None");
  const auto ema = EmaOptions().beta(o.beta1());
  const auto [given_eps1, eps2] = o.eps();
  const Factored square(call, 0);
  const auto add_up = [&](AdafactorStep& x) -> Partial {
    x.u = x.s.gradient();
    x.squares = square.fresh(x.s, x.u.square());
    return {.sums = x.squares.sums()};
  };
  const auto find_update = [&, given_eps1 = given_eps1](AdafactorStep& x) -> Partial {
    const double eps1 = given_eps1.value_or(epsilon(x.s));
    x.u = square.advance(x.s, x.squares, x.time().pow(o.beta2_decay()), eps1)
              .clamp_min_(eps1 * eps1)
              .rsqrt_()
              .mul_(x.u);
    x.squares = {};
    x.length = at::linalg_vector_norm(x.u);
    x.norm = x.s.weight_norm();
    return {.norms = {x.length, x.norm}};
  };
  const auto apply = [&, eps2 = eps2](AdafactorStep& x) -> Partial {
    // Dividing u by `over` limits the root mean square of u to the option d.
    const Tensor over = (x.length / (x.root() * o.d())).clamp_min_(1);
    // Adafactor's step size in step t is min(lr, 1 / sqrt(t)). It is divided by lr here, because the operator
    // _apply_ multiplies by lr.
    const Tensor root = x.time().sqrt();
    const Tensor rate = call.lr_tensor ? call.lr_tensor->reshape({}) * root : root * call.lr;
    Tensor factor = (x.norm / x.root()).clamp_min_(eps2) * rate.reciprocal().clamp_max_(1);
    if (has_mean) {
      Arguments mean = x.s.arguments(ema, x.u, x.u, x.s.before);
      x.s.pass_moments(mean);
      mean.clip_coef = over.reciprocal();
      mean.call();
    } else {
      factor = factor / over;
    }
    x.s.apply(x.u, o.weight_decay(), factor);
    return {};
  };
  in_stages<AdafactorStep>(call, {add_up, find_update, apply});
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
  return {.name = "Adafactor",
          .op = "adafactor_",
          .moments = {mean},
          .extras = factored("row_var", "col_var", "variance")};
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
