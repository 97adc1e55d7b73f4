#include "optim/rules/ema_rule.h"

#include "optim/inner.h"
#include "optim/optimizer.h"

namespace shoestring::optim::ops {
namespace {

struct Ema {
  using Rule = kernels::EmaRule;
  using Options = EmaOptions;
  static const auto& table() { return cpu::ema(); }

  static kernels::EmaOptions options(const Call& call, const Options& o) {
    return {call.options(0), o.beta(), o.nesterov()};
  }
};

const RegisteredRule<Ema> kEmaRegistered;

}  // namespace

const detail::Rule& EmaOptions::rule() const {
  static const detail::Rule rule{"ema", "_ema_", detail::moments_of<kernels::EmaRule>({"exp_avg"})};
  return rule;
}

std::vector<detail::Field> EmaOptions::fields() {
  return {{"beta", &beta_, &detail::kFraction},
          {"nesterov", &nesterov_, nullptr, detail::Argument::kOptional}};
}

}  // namespace shoestring::optim::ops
