#include <shoestring/optim/rules.h>

#include "optim/rule.h"

namespace shoestring::optim {

using namespace detail;

namespace {
constexpr Allowed kMomentum{"above 0 (without momentum use torch::optim::SGD)",
                            [](double x) { return x > 0; }};
}  // namespace

const Rule& SGDOptions::rule() const {
  static const Rule rule{"SGD", "sgd_", {{"momentum_buffer", true}}};
  return rule;
}

std::vector<Field> SGDOptions::fields() {
  return {{"momentum", &momentum_, &kMomentum},
          {"dampening", &dampening_, &kFinite},
          {"weight_decay", &weight_decay_, &kAtLeastZero},
          {"nesterov", &nesterov_}};
}

void SGDOptions::check() const {
  expect(!nesterov_ || dampening_ == 0, rule().name, "dampening", "0 with nesterov", dampening_);
}

}  // namespace shoestring::optim
