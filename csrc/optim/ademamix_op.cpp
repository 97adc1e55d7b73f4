#include "optim/ademamix_rule.h"

#include "optim/optimizer.h"

namespace shoestring::optim::ops {
namespace {

struct AdEMAMix {
  using Rule = kernels::AdEMAMixRule;
  static constexpr const char* kNames[] = {"exp_avg", "exp_avg_slow", "exp_avg_sq"};
  static const auto& table() { return cpu::ademamix(); }

  static kernels::AdEMAMixOptions options(const Call& call) {
    const double beta1 = call.fraction("beta1"), beta3 = call.fraction("beta3");
    const double t_alpha = steps(call, "t_alpha"), t_beta3 = steps(call, "t_beta3");
    TORCH_CHECK(t_beta3 == 0 || (beta1 > 0 && beta3 >= beta1), call.op,
                ": beta3: expected at least beta1, and that above 0, with t_beta3, received ", beta3, " and ",
                beta1);
    return {call.options(),
            beta1,
            call.fraction("beta2"),
            beta3,
            call.at_least_zero("alpha"),
            call.at_least_zero("eps"),
            t_alpha,
            t_beta3};
  }

 private:
  static double steps(const Call& call, const char* name) {
    const auto value = call[name].toOptional<int64_t>();
    TORCH_CHECK(!value || *value > 0, call.op, ": ", name, ": expected None or a number of steps, received ",
                *value);
    return static_cast<double>(value.value_or(0));
  }
};

const RegisteredRule<AdEMAMix> kAdEMAMixRegistered("ademamix_");

}  // namespace
}  // namespace shoestring::optim::ops
