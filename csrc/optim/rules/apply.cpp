#include "optim/rules/apply_rule.h"

#include "optim/inner.h"
#include "optim/optimizer.h"

namespace shoestring::optim::ops {
namespace {

struct Apply {
  using Rule = kernels::ApplyRule;
  using Options = ApplyOptions;
  static const auto& table() { return cpu::apply(); }

  static kernels::ApplyOptions options(const Call& call, const Options& o) {
    return {call.options(o.weight_decay())};
  }
};

const RegisteredRule<Apply> kApplyRegistered;

}  // namespace

const detail::Rule& ApplyOptions::rule() const {
  static const detail::Rule rule{"apply", "_apply_"};
  return rule;
}

std::vector<detail::Field> ApplyOptions::fields() {
  return {{"weight_decay", &weight_decay_, &detail::kAtLeastZero}};
}

}  // namespace shoestring::optim::ops
