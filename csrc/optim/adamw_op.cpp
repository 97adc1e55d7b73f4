#include "optim/adamw_rule.h"

#include "optim/optimizer.h"

namespace shoestring::optim::ops {
namespace {

struct AdamW {
  using Rule = kernels::AdamWRule;
  static constexpr const char* kNames[] = {"exp_avg", "exp_avg_sq"};
  static const auto& table() { return cpu::adamw(); }

  static kernels::AdamWOptions options(const Call& call) {
    return {call.options(), call.fraction("beta1"), call.fraction("beta2"), call.at_least_zero("eps")};
  }
};

const RegisteredRule<AdamW> kAdamWRegistered("adamw_");

}  // namespace
}  // namespace shoestring::optim::ops
