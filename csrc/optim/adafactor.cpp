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

struct AdafactorArguments {
  double beta1, beta2_decay, eps2, d;
  std::optional<double> eps1;

  explicit AdafactorArguments(const Call& call)
      : beta1(call.fraction("beta1")), beta2_decay(call.number("beta2_decay")),
        eps2(call.at_least_zero("eps2")), d(call.number("d")), eps1(call["eps1"].toOptional<double>()) {
    TORCH_CHECK(beta2_decay <= 0, call.op, ": beta2_decay: expected a number of at most 0, received ",
                beta2_decay);
    TORCH_CHECK(!eps1 || *eps1 >= 0, call.op, ": eps1: expected None or a number of at least 0, received ",
                *eps1);
    TORCH_CHECK(d >= 1, call.op, ": d: expected a number of at least 1, received ", d);
  }
};

void adafactor(const Call& call) {
  const AdafactorArguments options(call);
  const double lr = call.options().lr;
  const auto moments = optional_mean(call, options.beta1);
  const Factored square(call, "row_var", "col_var", "variance");
  for (const Share& s : shares(call, moments)) {
    if (s.param.numel() == 0) {
      s.apply(s.empty());
      continue;
    }
    const double eps1 = options.eps1.value_or(epsilon(s)), root = std::sqrt(s.param.numel());
    const Tensor t = s.before + 1;
    Tensor g = s.gradient();
    // u first holds the running means of squared gradients and then the update. Dividing u by `over` limits
    // the root mean square of u to the option d.
    Tensor u = square.advance(s, g.square(), t.pow(options.beta2_decay), eps1)
                   .clamp_min_(eps1 * eps1)
                   .rsqrt_()
                   .mul_(g);
    g.reset();
    const Tensor over = (at::linalg_vector_norm(u) / (root * options.d)).clamp_min_(1);

    // Adafactor's step size in step t is min(lr, 1 / sqrt(t)). It is divided by lr here, because the operator
    // _apply_ multiplies by lr.
    const Tensor rate = call.lr_tensor ? call.lr_tensor->reshape({}) * t.sqrt() : t.sqrt() * lr;
    Tensor factor = (s.weight_norm() / root).clamp_min_(options.eps2) * rate.reciprocal().clamp_max_(1);
    if (moments.empty()) {
      factor = factor / over;
    } else {
      s.run("_ema_", u, u, s.before,
            {s.moment("exp_avg", moments[0]), {{"beta", options.beta1}, {"clip_coef", over.reciprocal()}}});
    }
    s.apply(u, factor);
  }
}

const Registered<adafactor, adafactor> kAdafactorRegistered("adafactor_");

}  // namespace
}  // namespace shoestring::optim::ops

namespace shoestring::optim {

using namespace detail;

namespace {

std::vector<Extra> second_moment(const Tensor& param) {
  return factored(param, "row_var", "col_var", "variance");
}

}  // namespace

const Rule& AdafactorOptions::rule() const {
  static const Rule bare{"Adafactor", "adafactor_", {}, second_moment};
  static const Rule mean{"Adafactor", "adafactor_", {{"exp_avg", true}}, second_moment};
  return beta1_ > 0 ? mean : bare;
}

std::vector<Field> AdafactorOptions::fields() {
  return {{"beta1", &beta1_, &kFraction},
          {"beta2_decay", &beta2_decay_, &kAtMostZero},
          {"eps", &eps_, &kAtLeastZero},
          {"d", &d_, &kAtLeastOne},
          {"weight_decay", &weight_decay_, &kAtLeastZero}};
}

}  // namespace shoestring::optim
