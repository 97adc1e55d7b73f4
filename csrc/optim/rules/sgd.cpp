#include "optim/rules/sgd_rule.h"

#include <shoestring/optim/rules.h>

#include "optim/optimizer.h"
#include "optim/rule.h"

namespace shoestring::optim::ops {
namespace {

struct SGD {
  using Rule = kernels::SGDRule;
  using Options = SGDOptions;
  static const auto& table() { return cpu::sgd(); }

  static kernels::SGDOptions options(const Call& call, const Options& o) {
    return {call.options(o.weight_decay()), o.momentum(), o.dampening(), o.nesterov()};
  }
};

const RegisteredRule<SGD> kSGDRegistered;

}  // namespace
}  // namespace shoestring::optim::ops

namespace shoestring::optim {

using namespace detail;

namespace {
constexpr Allowed kMomentum{"above 0 (without momentum use torch::optim::SGD)",
                            [](double x) { return x > 0; }};
}  // namespace

const Rule& SGDOptions::rule() const {
  static const Rule rule{"SGD", "sgd_", moments_of<kernels::SGDRule>({"momentum_buffer"})};
  return rule;
}

std::vector<Field> SGDOptions::fields() {
  return {{"momentum", &momentum_, &kMomentum},
          {"dampening", &dampening_, &kFinite},
          {"weight_decay", &weight_decay_, &kAtLeastZero},
          {"nesterov", &nesterov_, nullptr, Argument::kOptional}};
}

void SGDOptions::check(const Reporter& reporter) const {
  if (nesterov_ && dampening_ != 0) reporter.refuse("dampening", "0 with nesterov", dampening_);
}

}  // namespace shoestring::optim
