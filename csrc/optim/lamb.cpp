#include <shoestring/optim/rules.h>

#include "optim/rule.h"

namespace shoestring::optim {

using namespace detail;

const Rule& LAMBOptions::rule() const {
  static const Rule rule{"LAMB",  "lamb_", {{"exp_avg", true}, {"exp_avg_sq", false}},
                         nullptr, false,   /*takes_whole_parameters=*/true};
  return rule;
}

std::vector<Field> LAMBOptions::fields() {
  return {{"betas", &betas_, &kFraction},
          {"eps", &eps_, &kAtLeastZero},
          {"weight_decay", &weight_decay_, &kAtLeastZero}};
}

}  // namespace shoestring::optim
