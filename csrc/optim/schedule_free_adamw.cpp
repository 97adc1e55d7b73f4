#include "optim/schedule_free_adamw_rule.h"

#include <torch/csrc/autograd/grad_mode.h>

#include <shoestring/optim/rules.h>

#include "optim/core.h"
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

namespace shoestring::optim {

using namespace detail;

const Rule& ScheduleFreeAdamWOptions::rule() const {
  static const Rule rule{"ScheduleFreeAdamW",
                         "schedule_free_adamw_",
                         {{"offset", true, /*is_long=*/true}, {"exp_avg_sq", false}}};
  return rule;
}

std::vector<Field> ScheduleFreeAdamWOptions::fields() {
  return {{"betas", &betas_, &kFraction},
          {"eps", &eps_, &kAtLeastZero},
          {"weight_decay", &weight_decay_, &kAtLeastZero},
          {"warmup_steps", &warmup_steps_, &kAtLeastZero},
          {"train_mode", &train_mode_, nullptr, /*of_operator=*/false}};
}

void ScheduleFreeAdamWOptions::check() const {
  const double beta1 = std::get<0>(betas_);
  expect(beta1 > 0, rule().name, "betas", "a first number above 0", beta1);
}

void ScheduleFreeAdamWOptions::check_step() const {
  expect(train_mode_, rule().name, "step", "train mode", "eval mode; call train() before backward");
}

// Moves the parameters from the training point y to the average x, or back. x is y - offset * (1 - beta1) /
// beta1, where `offset` is a tensor of the state.
void ScheduleFreeAdamW::set_mode(bool train_mode) {
  at::NoGradGuard no_grad;
  Core& core = Access::core(*this);
  for (size_t g = 0; g < param_groups().size(); ++g) {
    auto& options = static_cast<ScheduleFreeAdamWOptions&>(param_groups()[g].options());
    if (options.train_mode() == train_mode) continue;
    const double beta1 = std::get<0>(options.betas());
    for (const Arena& arena : core.layouts[g].arenas) {
      const auto apply = [&](const Arena& some) {
        c10::List<std::optional<Tensor>> offsets;
        const auto device = some.params[0].device();
        for (const Tensor& p : some.params) offsets.push_back((*core.state(p))["offset"].to(device));
        NamedArguments arguments{
            {"params", some.params},
            {"grads", offsets},
            {"step", some.step.to(device, some.step.scalar_type(), false, /*copy=*/true)},
            {"lr", (1 - beta1) / beta1},
            {"weight_decay", 0.0},
            {"maximize", train_mode}};
        const auto kept = some.values.find("weight_remainder");
        const Tensor remainder = kept == some.values.end() ? Tensor() : kept->second.to(device);
        if (remainder.defined()) arguments.emplace_back("weight_remainder", remainder);
        call_by_name("shoestring::_apply_", arguments);
        if (remainder.defined() && !remainder.is_same(kept->second)) kept->second.copy_(remainder);
      };
      if (arena.offloaded == nullptr && arena.host == nullptr) {
        apply(arena);
      } else {
        // Offloaded state is copied to the device one parameter at a time, since the device may not have
        // memory for all of it.
        for (size_t i = 0; i < arena.params.size(); ++i) apply(arena.run(core.rule(g), i, i + 1));
      }
    }
    options.train_mode(train_mode);
  }
}

}  // namespace shoestring::optim
