#include "optim/rules/schedule_free_adamw_rule.h"

#include <torch/csrc/autograd/grad_mode.h>

#include <shoestring/optim/rules.h>

#include "optim/core/core.h"
#include "optim/inner.h"
#include "optim/optimizer.h"

namespace shoestring::optim::ops {
namespace {

struct ScheduleFreeAdamW {
  using Rule = kernels::ScheduleFreeAdamWRule;
  using Options = ScheduleFreeAdamWOptions;
  static const auto& table() { return cpu::schedule_free_adamw(); }

  static kernels::ScheduleFreeAdamWOptions options(const Call& call, const Options& o) {
    const auto [beta1, beta2] = o.betas();
    return {call.options(o.weight_decay()), beta1, beta2, o.eps(), static_cast<double>(o.warmup_steps())};
  }
};

const RegisteredRule<ScheduleFreeAdamW> kScheduleFreeAdamWRegistered;

}  // namespace
}  // namespace shoestring::optim::ops

namespace shoestring::optim {

using namespace detail;

const Rule& ScheduleFreeAdamWOptions::rule() const {
  static const Rule rule{"ScheduleFreeAdamW", "schedule_free_adamw_",
                         moments_of<kernels::ScheduleFreeAdamWRule>({"offset", "exp_avg_sq"})};
  return rule;
}

std::vector<Field> ScheduleFreeAdamWOptions::fields() {
  return {{"betas", &betas_, &kFraction},
          {"eps", &eps_, &kAtLeastZero},
          {"weight_decay", &weight_decay_, &kAtLeastZero},
          {"warmup_steps", &warmup_steps_, &kAtLeastZero, Argument::kOptional},
          {"train_mode", &train_mode_, nullptr, Argument::kNone}};
}

void ScheduleFreeAdamWOptions::check(const Reporter& reporter) const {
  const double beta1 = std::get<0>(betas_);
  if (beta1 == 0) reporter.refuse_element("betas", 1, "above 0", beta1);
}

void ScheduleFreeAdamWOptions::check_step() const {
  expect(train_mode_, rule().name, "step", "train mode", "eval mode; call train() before backward");
}

// Moves the parameters from the training point y to the average x, or back. x is y - offset * (1 - beta1) /
// beta1, where `offset` is a tensor of the state.
void ScheduleFreeAdamW::set_mode(bool train_mode) {
  at::NoGradGuard no_grad;
  Core& core = Access::core(*this);
  std::vector<const Arena*> moved;
  for (size_t g = 0; g < param_groups().size(); ++g) {
    auto& options = static_cast<ScheduleFreeAdamWOptions&>(param_groups()[g].options());
    if (options.train_mode() == train_mode) continue;
    const double beta1 = std::get<0>(options.betas());
    const ops::ApplyOptions move((1 - beta1) / beta1);
    for (const Arena& arena : core.layouts[g].arenas) {
      const auto apply = [&](const Arena& some) {
        const auto device = some.params[0].device();
        ops::Arguments arguments(move);
        arguments.params = some.params;
        for (const Tensor& p : some.params) {
          const Tensor offset = (*core.state(p))["offset"].to(device);
          arguments.grads.emplace_back(offset.numel() == p.numel() ? offset.view(p.sizes()) : offset);
        }
        if (some.part) std::tie(arguments.first_block, arguments.blocks) = *some.part;
        arguments.step = some.step.to(device, some.step.scalar_type(), false, /*copy=*/true);
        arguments.maximize = train_mode;
        const auto stored = some.values.find("weight_remainder");
        const Tensor remainder = stored == some.values.end() ? Tensor() : stored->second.to(device);
        if (remainder.defined()) arguments.weight_remainder = remainder;
        arguments.call();
        if (remainder.defined() && !remainder.is_same(stored->second)) stored->second.copy_(remainder);
      };
      moved.push_back(&arena);
      if (!arena.owned.empty() && arena.owned[arena.rank].blocks == 0) continue;
      const Arena stepped_piece = arena.owned.empty() ? arena : arena.own_piece();
      if (stepped_piece.offloaded == nullptr && stepped_piece.host == nullptr) {
        apply(stepped_piece);
      } else {
        // Offloaded state is copied to the device one parameter at a time, since the device may not have
        // memory for all of it.
        for (size_t i = 0; i < stepped_piece.params.size(); ++i)
          apply(stepped_piece.run(core.rule(g), i, i + 1));
      }
    }
    options.train_mode(train_mode);
  }
  core.share_weights(moved);
}

}  // namespace shoestring::optim
