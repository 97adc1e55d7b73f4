#include "optim/rules/ademamix_rule.h"

#include <shoestring/optim/rules.h>

#include "optim/optimizer.h"
#include "optim/rule.h"

namespace shoestring::optim::ops {
namespace {

struct AdEMAMix {
  using Rule = kernels::AdEMAMixRule;
  using Options = AdEMAMixOptions;
  static const auto& table() { return cpu::ademamix(); }

  static kernels::AdEMAMixOptions options(const Call& call, const Options& o) {
    const auto [beta1, beta2, beta3] = o.betas();
    const auto steps = [](const std::optional<int64_t>& n) { return static_cast<double>(n.value_or(0)); };
    return {call.options(o.weight_decay()),
            beta1,
            beta2,
            beta3,
            o.alpha(),
            o.eps(),
            steps(o.t_alpha()),
            steps(o.t_beta3())};
  }
};

const RegisteredRule<AdEMAMix> kAdEMAMixRegistered;

}  // namespace
}  // namespace shoestring::optim::ops

namespace shoestring::optim {

using namespace detail;

const Rule& AdEMAMixOptions::rule() const {
  static const Rule rule{"AdEMAMix", "ademamix_",
                         moments_of<kernels::AdEMAMixRule>({"exp_avg", "exp_avg_slow", "exp_avg_sq"})};
  return rule;
}

std::vector<Field> AdEMAMixOptions::fields() {
  return {{"betas", &betas_, &kFraction},
          {"alpha", &alpha_, &kAtLeastZero},
          {"eps", &eps_, &kAtLeastZero},
          {"weight_decay", &weight_decay_, &kAtLeastZero},
          {"t_alpha", &t_alpha_, &kSteps, Argument::kOptional},
          {"t_beta3", &t_beta3_, &kSteps, Argument::kOptional}};
}

void AdEMAMixOptions::check(const Reporter& reporter) const {
  const auto [beta1, beta2, beta3] = betas_;
  if (t_beta3_ && (beta1 == 0 || beta3 < beta1))
    reporter.refuse_element("betas", 3, "of at least beta1, and beta1 above 0, with t_beta3",
                            c10::str(beta3, " and ", beta1));
}

}  // namespace shoestring::optim
