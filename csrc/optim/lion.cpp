#include "optim/lion_rule.h"

#include <shoestring/optim/rules.h>

#include "optim/optimizer.h"
#include "optim/rule.h"

namespace shoestring::optim::ops {
namespace {

struct Lion {
  using Rule = kernels::LionRule;
  static constexpr const char* kNames[] = {"exp_avg"};
  static const auto& table() { return cpu::lion(); }

  static kernels::LionOptions options(const Call& call) {
    return {call.options(), call.fraction("beta1"), call.fraction("beta2")};
  }
};

const RegisteredRule<Lion> kLionRegistered("lion_");

}  // namespace
}  // namespace shoestring::optim::ops

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
