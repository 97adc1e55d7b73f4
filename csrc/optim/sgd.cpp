#include "optim/sgd_rule.h"

#include <cmath>

#include <shoestring/optim/rules.h>

#include "optim/optimizer.h"
#include "optim/rule.h"

namespace shoestring::optim::ops {
namespace {

struct SGD {
  using Rule = kernels::SGDRule;
  static constexpr const char* kNames[] = {"momentum_buffer"};
  static const auto& table() { return cpu::sgd(); }

  static kernels::SGDOptions options(const Call& call) {
    const double momentum = call.number("momentum"), dampening = call.number("dampening");
    const bool nesterov = call["nesterov"].toBool();
    TORCH_CHECK(momentum > 0, call.op, ": momentum: expected a number above 0, received ", momentum,
                "; without momentum there is no state to keep: use torch.optim.SGD");
    TORCH_CHECK(std::isfinite(dampening), call.op, ": dampening: expected a finite number, received ",
                dampening);
    TORCH_CHECK(!nesterov || dampening == 0, call.op, ": dampening: expected 0 with nesterov=True, received ",
                dampening);
    return {call.options(), momentum, dampening, nesterov};
  }
};

const RegisteredRule<SGD> kSGDRegistered("sgd_");

}  // namespace
}  // namespace shoestring::optim::ops

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
