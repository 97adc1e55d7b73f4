#include <shoestring/optim/rules.h>

#include "optim/rule.h"

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
