#include "optim/schedule_free_adamw_rule.h"

#include "optim/optimizer.h"

namespace shoestring::optim::ops {
namespace {

struct ScheduleFreeAdamW {
  using Rule = kernels::ScheduleFreeAdamWRule;
  static constexpr const char* kNames[] = {"offset", "exp_avg_sq"};
  static const auto& table() { return cpu::schedule_free_adamw(); }

  static kernels::ScheduleFreeAdamWOptions options(const Call& call) {
    const double beta1 = call.number("beta1");
    TORCH_CHECK(beta1 > 0 && beta1 < 1, call.op, ": beta1: expected a number between 0 and 1, received ",
                beta1);
    const int64_t warmup_steps = call["warmup_steps"].toInt();
    TORCH_CHECK(warmup_steps >= 0, call.op,
                ": warmup_steps: expected a number of steps of at least 0, received ", warmup_steps);
    return {call.options(), beta1, call.fraction("beta2"), call.at_least_zero("eps"),
            static_cast<double>(warmup_steps)};
  }
};

const RegisteredRule<ScheduleFreeAdamW> kScheduleFreeAdamWRegistered("schedule_free_adamw_");

}  // namespace
}  // namespace shoestring::optim::ops
