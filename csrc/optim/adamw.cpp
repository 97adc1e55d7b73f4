#include "optim/adamw_rule.h"

#include <shoestring/optim/rules.h>

#include "optim/optimizer.h"
#include "optim/rule.h"

namespace shoestring::optim::ops {
namespace {

struct AdamW {
  using Rule = kernels::AdamWRule;
  static constexpr const char* kNames[] = {"exp_avg", "exp_avg_sq"};
  static const auto& table() { return cpu::adamw(); }

  static kernels::AdamWOptions options(const Call& call) {
    return {call.options(), call.fraction("beta1"), call.fraction("beta2"), call.at_least_zero("eps")};
  }
};

const RegisteredRule<AdamW> kAdamWRegistered("adamw_");

}  // namespace
}  // namespace shoestring::optim::ops

namespace shoestring::optim {

using namespace detail;

const Rule& AdamWOptions::rule() const {
  static const Rule rule{"AdamW", "adamw_", {{"exp_avg", true}, {"exp_avg_sq", false}}};
  return rule;
}

std::vector<Field> AdamWOptions::fields() {
  return {{"betas", &betas_, &kFraction},
          {"eps", &eps_, &kAtLeastZero},
          {"weight_decay", &weight_decay_, &kAtLeastZero}};
}

}  // namespace shoestring::optim
