#include "optim/rules/lion_rule.h"

#include <shoestring/optim/rules.h>

#include "optim/optimizer.h"
#include "optim/rule.h"

namespace shoestring::optim::ops {
namespace {

struct Lion {
  using Rule = kernels::LionRule;
  using Options = LionOptions;
  static const auto& table() { return cpu::lion(); }

  static kernels::LionOptions options(const Call& call, const Options& o) {
    const auto [beta1, beta2] = o.betas();
    return {call.options(o.weight_decay()), beta1, beta2};
  }
};

const RegisteredRule<Lion> kLionRegistered;

}  // namespace
}  // namespace shoestring::optim::ops

namespace shoestring::optim {

using namespace detail;

const Rule& LionOptions::rule() const {
  static const Rule rule{"Lion", "lion_", moments_of<kernels::LionRule>({"exp_avg"})};
  return rule;
}

std::vector<Field> LionOptions::fields() {
  return {{"betas", &betas_, &kFraction}, {"weight_decay", &weight_decay_, &kAtLeastZero}};
}

}  // namespace shoestring::optim
