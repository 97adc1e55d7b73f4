#include <shoestring/optim/rules.h>

#include "optim/rule.h"

namespace shoestring::optim {

using namespace detail;

const Rule& LionOptions::rule() const {
  static const Rule rule{"Lion", "lion_", {{"exp_avg", true}}};
  return rule;
}

std::vector<Field> LionOptions::fields() {
  return {{"betas", &betas_, &kFraction}, {"weight_decay", &weight_decay_, &kAtLeastZero}};
}

}  // namespace shoestring::optim
