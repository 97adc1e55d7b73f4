#include "optim/rules/adamw_rule.h"

#include <shoestring/optim/rules.h>

#include "optim/optimizer.h"
#include "optim/rule.h"

namespace shoestring::optim::ops {
namespace {

struct AdamW {
  using Rule = kernels::AdamWRule;
  using Options = AdamWOptions;
  static const auto& table() { return cpu::adamw(); }

  static kernels::AdamWOptions options(const Call& call, const Options& o) {
    const auto [beta1, beta2] = o.betas();
    return {call.options(o.weight_decay()), beta1, beta2, o.eps()};
  }
};

const RegisteredRule<AdamW> kAdamWRegistered;

}  // namespace
}  // namespace shoestring::optim::ops

namespace shoestring::optim {

using namespace detail;

const Rule& AdamWOptions::rule() const {
  static const Rule rule{"AdamW", "adamw_", moments_of<kernels::AdamWRule>({"exp_avg", "exp_avg_sq"})};
  return rule;
}

std::vector<Field> AdamWOptions::fields() {
  return {{"betas", &betas_, &kFraction},
          {"eps", &eps_, &kAtLeastZero},
          {"weight_decay", &weight_decay_, &kAtLeastZero}};
}

}  // namespace shoestring::optim
