#include "optim/ademamix_rule.h"

#include <shoestring/optim/rules.h>

#include "optim/optimizer.h"
#include "optim/rule.h"

namespace shoestring::optim::ops {
namespace {

struct AdEMAMix {
  using Rule = kernels::AdEMAMixRule;
  static constexpr const char* kNames[] = {"exp_avg", "exp_avg_slow", "exp_avg_sq"};
  static const auto& table() { return cpu::ademamix(); }

  static kernels::AdEMAMixOptions options(const Call& call) {
    const double beta1 = call.fraction("beta1"), beta3 = call.fraction("beta3");
    const double t_alpha = steps(call, "t_alpha"), t_beta3 = steps(call, "t_beta3");
    TORCH_CHECK(t_beta3 == 0 || (beta1 > 0 && beta3 >= beta1), call.op,
                ": beta3: expected at least beta1, and beta1 above 0, with t_beta3, received ", beta3,
                " and ", beta1);
    return {call.options(),
            beta1,
            call.fraction("beta2"),
            beta3,
            call.at_least_zero("alpha"),
            call.at_least_zero("eps"),
            t_alpha,
            t_beta3};
  }

 private:
  static double steps(const Call& call, const char* name) {
    const auto value = call[name].toOptional<int64_t>();
    TORCH_CHECK(!value || *value > 0, call.op, ": ", name, ": expected None or a number of steps, received ",
                *value);
    return static_cast<double>(value.value_or(0));
  }
};

const RegisteredRule<AdEMAMix> kAdEMAMixRegistered("ademamix_");

}  // namespace
}  // namespace shoestring::optim::ops

namespace shoestring::optim {

using namespace detail;

const Rule& AdEMAMixOptions::rule() const {
  static const Rule rule{
      "AdEMAMix",
      "ademamix_",
      {{"exp_avg", true}, {"exp_avg_slow", true, /*is_long=*/true}, {"exp_avg_sq", false}}};
  return rule;
}

std::vector<Field> AdEMAMixOptions::fields() {
  return {{"betas", &betas_, &kFraction},      {"alpha", &alpha_, &kAtLeastZero},
          {"t_alpha", &t_alpha_, &kAboveZero}, {"t_beta3", &t_beta3_, &kAboveZero},
          {"eps", &eps_, &kAtLeastZero},       {"weight_decay", &weight_decay_, &kAtLeastZero}};
}

void AdEMAMixOptions::check() const {
  const auto [beta1, beta2, beta3] = betas_;
  expect(!t_beta3_ || (beta1 > 0 && beta3 >= beta1), rule().name, "betas",
         "a third number of at least the first, and the first above 0, with t_beta3",
         c10::str(beta3, " and ", beta1));
}

}  // namespace shoestring::optim
