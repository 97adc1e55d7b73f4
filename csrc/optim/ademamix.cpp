#include <shoestring/optim/rules.h>

#include "optim/rule.h"

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
         "a third of at least the first, and that above 0, with t_beta3", c10::str(beta3, " and ", beta1));
}

}  // namespace shoestring::optim
