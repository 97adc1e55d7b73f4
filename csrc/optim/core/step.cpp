// This file takes optimizer steps: it collects the gradients, clips them and calls the operators.

#include <algorithm>
#include <numeric>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "optim/core/core.h"
#include "optim/core/norm.h"
#include "optim/core/scaled.h"
#include "optim/optimizer.h"

namespace shoestring::optim::detail {

void Core::check_step() const {
  for (size_t g = 0; g < optimizer->param_groups().size(); ++g) Access::check_step(options(g));
}

Tensor Core::step(StepFactors factors, bool is_checked) {
  const auto alone = lock();
  check_process();
  std::optional<Step> failed;
  if (backwards_ != nullptr || unfinished.exists()) failed = end_earlier();
  return finish_step(failed ? *std::move(failed) : begin_step(std::move(factors), is_checked));
}

Tensor Core::scaled_step(const Tensor& scale, const Tensor& skip, bool is_checked) {
  const auto is_number = [](const Tensor& t) { return t.scalar_type() == at::kFloat && t.numel() == 1; };
  const auto received = [](const Tensor& t) {
    return t.defined() ? c10::str(t.scalar_type(), " of shape ", t.sizes()) : std::string("none");
  };
  expect(scale.defined() ? is_number(scale) : skip.defined(), label, "grad_scale", "one fp32 number",
         received(scale));
  expect(!skip.defined() || is_number(skip), label, "found_inf", "one fp32 number, or none", received(skip));
  if (!scale.defined()) expect_no_sums("scaled_step");
  expect(!step_in_backward, label, "scaled_step",
         "an optimizer without step_in_backward, which steps before all gradients are known to be finite",
         "one with it");
  return step({{}, scale, skip}, is_checked);
}

bool Core::has_gradient(const Tensor& param) const {
  if (split_gradients != nullptr) return (split_gradients->any() || sums.has(param)) && param.requires_grad();
  return param.grad().defined() || sums.has(param) || host.has(param);
}

bool Core::has_gradients() const {
  const auto& groups = optimizer->param_groups();
  return std::any_of(groups.begin(), groups.end(), [&](const auto& group) {
    return std::any_of(group.params().begin(), group.params().end(),
                       [&](const Tensor& p) { return has_gradient(p); });
  });
}

void Core::check_process() const {
  for (const auto& [device, offload] : offloads_) offload->check();
}

Step Core::begin_step(StepFactors factors, bool is_checked) {
  // Waits for pending writes of offloaded state, so that a failed step can drop its chunks of state.
  if (step_in_backward) bring_back();
  Step step;
  if (split_gradients != nullptr) {
    // The last backward may have left out parameters of which accumulate() has summed up gradients.
    for (const auto& group : optimizer->param_groups()) {
      for (const Tensor& p : group.params()) {
        if (!sums.has(p)) continue;
        take_sum(p);
        split_gradient(p);
      }
    }
    if (split_gradients->any()) split_gradients->finish();
  }
  for (size_t g = 0; g < optimizer->param_groups().size(); ++g) {
    const auto& params = optimizer->param_groups()[g].params();
    if (std::none_of(params.begin(), params.end(), [&](const Tensor& p) { return has_gradient(p); }))
      continue;
    for (Arena& arena : layout(g).arenas) step.calls.push_back({g, &arena});
  }
  try {
    const bool is_scaled = factors.grad_scale.defined();
    for (OperatorCall& call : step.calls) gather(call, is_scaled);
    if (is_scaled && !(is_checked && !sums.any())) factors.found_inf = find_inf(step.calls, factors);
    factors.clip_coef = clip(step.calls, factors.grad_scale);
  } catch (...) {
    // After the error, some accumulated gradients may already include the gradient of the last micro-batch.
    if (sums.are_used()) unfinished.broken = Broken::kSums;
    throw;
  }
  step.factors = std::move(factors);
  return step;
}

// Collects the gradients of an operator call. Clipping and scaled steps need complete gradients before the
// call. In these cases, adds the gradients to the accumulated gradients and passes the sums as the gradients.
void Core::gather(OperatorCall& call, bool is_scaled) {
  if (split_gradients != nullptr) {
    for (const Tensor& p : call.arena->params) {
      const Tensor part = split_gradients->part(p);
      call.grads.push_back(part.numel() == p.numel() ? part.view(p.sizes()) : part);
    }
    return;
  }
  for (const Tensor& p : call.arena->params) call.grads.push_back(p.grad());
  if (backwards_ == nullptr) return;
  const auto& params = call.arena->params;
  // Tells whether some gradients, collected or accumulated, are in host memory.
  const bool here =
      std::any_of(params.begin(), params.end(), [&](const Tensor& p) { return sums.has(p) || host.has(p); });
  if (here && call.arena->host != nullptr) call.grads = host.fetch(*call.arena, std::move(call.grads));
  if (!sums.any_in(*call.arena)) return;
  TORCH_CHECK(!ranks, label,
              ": step: expected a last micro-batch outside of accumulate() that has a gradient ",
              "for each parameter, received sums without one");
  const auto views = sums.into(*call.arena);
  const bool whole = clipping.max_norm || is_scaled;
  for (size_t i = 0; i < views.size(); ++i) {
    const Tensor& p = call.arena->params[i];
    if (!sums.has(p)) continue;
    Tensor& grad = call.grads[i];
    if (whole) {
      sums.use(views[i]);
      if (grad.defined()) views[i].add_(grad);
      grad = views[i];
    } else if (!grad.defined()) {
      grad = at::zeros_like(p, at::TensorOptions().device(call.arena->kind.device));
    }
  }
  if (!whole) call.accumulated = call.arena->accumulated;
}

// Returns 1 if found_inf is not zero or a gradient of any process is not finite, and 0 otherwise.
Tensor Core::find_inf(const std::vector<OperatorCall>& calls, const StepFactors& factors) const {
  std::vector<Tensor> grads;
  for (const OperatorCall& call : calls) {
    for (const Tensor& g : call.grads)
      if (g.defined()) grads.push_back(g);
  }
  Tensor any_inf = non_finite(grads, factors.grad_scale.device());
  std::vector<Shard> shards;  // all processes must skip a step, or none
  for (const OperatorCall& call : calls) {
    const Shard& shard = call.arena->kind.shard;
    if (shard.groups.empty() || std::find(shards.begin(), shards.end(), shard) != shards.end()) continue;
    shards.push_back(shard);
    any_inf = over_groups(any_inf, shard, "max").to(any_inf.device());
  }
  if (factors.found_inf.defined())
    any_inf = any_inf.logical_or(factors.found_inf.to(any_inf.device()).reshape({})).to(at::kFloat);
  return any_inf;
}

Tensor Core::clip(const std::vector<OperatorCall>& calls, const Tensor& grad_scale) {
  if (step_in_backward && !on_cpu()) return {};
  clipping.norm = Tensor();
  if (!clipping.max_norm) return {};
  ByShard grads;
  for (const OperatorCall& call : calls) {
    // The order of the parameters, which owners have changed, keeps the bits of one process.
    std::vector<size_t> order(call.grads.size());
    std::iota(order.begin(), order.end(), 0);
    const auto& numbers = call.arena->numbers;
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return numbers[a] < numbers[b]; });
    for (const size_t i : order)
      if (call.grads[i].defined()) grads[call.arena->kind.shard].push_back(call.grads[i]);
  }
  return clipping.factor(grads, host.norms(), grad_scale);
}

Tensor Core::finish_step(Step step) {
  try {
    while (!step.is_whole()) {
      const OperatorCall& call = step.calls[step.done];
      step_arena(call, step.factors);
      ++step.done;
      if (call.arena->offloaded != nullptr) call.arena->offloaded->finish();
    }
    bring_back();
  } catch (...) {
    unfinished.keep(std::move(step));
    throw;
  }
  for (const OperatorCall& call : step.calls) {
    if (call.arena->offloaded != nullptr) call.arena->commit();
  }
  if (backwards_ != nullptr || split_gradients != nullptr) end_gradients();
  if (ranks.has_value()) {
    std::vector<const Arena*> stepped;
    for (const OperatorCall& call : step.calls) stepped.push_back(call.arena);
    share_weights(stepped);
  }
  return step.factors.found_inf;
}

void Core::step_arena(const OperatorCall& call, const StepFactors& factors) {
  Arena& arena = *call.arena;
  if (arena.host != nullptr) return host.step(call, factors);
  if (arena.offloaded != nullptr) {
    return arena.in_pieces(rule(call.group), call.grads, call.accumulated,
                           [&](const Arena& piece, const auto& own, const Tensor& accumulated) {
                             step_values(call.group, piece, own, accumulated, factors);
                           });
  }
  if (arena.owned.empty()) return step_values(call.group, arena, call.grads, call.accumulated, factors);
  const Owned& own = arena.owned[arena.rank];
  if (own.blocks == 0) return;
  const auto begin = call.grads.begin();
  step_values(call.group, arena.own_piece(),
              {begin + static_cast<int64_t>(own.first), begin + static_cast<int64_t>(own.last)}, {}, factors);
}

namespace {
// Returns a different seed for each shard, since operators count elements from the start of their shard.
int64_t seed_of(int64_t seed, const Shard& shard) {
  return static_cast<int64_t>(static_cast<uint64_t>(seed) +
                              static_cast<uint64_t>(shard.piece) * 0x9E3779B97F4A7C15u);
}
}  // namespace

void Core::step_values(size_t group, const Arena& arena, const std::vector<Tensor>& grads,
                       const Tensor& accumulated, const StepFactors& factors) const {
  const LowMemoryOptions& o = options(group);
  const auto number = [&](const Tensor& t) {
    return t.defined() ? std::optional(number_on(arena.kind.device, t)) : std::nullopt;
  };
  Tensor lr_tensor = Access::lr_tensor(o);
  double lr = o.get_lr();
  if (lr_tensor.defined()) {
    const bool here = lr_tensor.device() == arena.kind.device;
    lr = here ? 0 : lr_tensor.item<double>();
    lr_tensor = here ? lr_tensor.detach().to(at::kFloat) : Tensor();
  }
  const auto value = [&](const std::string& name) {
    const auto entry = arena.values.find(name);
    return entry == arena.values.end() ? std::nullopt : std::optional(entry->second);
  };
  ops::Arguments arguments(o);
  arguments.params = arena.stepped_params();
  for (const Tensor& g : grads) arguments.grads.push_back(some(g));
  arguments.step = arena.step;
  for (ops::Moment& moment : arguments.moments) {
    moment.values = value(moment.rule->name);
    moment.scale = value(moment.rule->scale);
  }
  for (size_t i = 0; i < arguments.extras.size(); ++i) {
    const char* name = arguments.rule.extras[i].name;
    for (const Tensor& p : arena.params) arguments.extras[i].push_back((*state(p))[name]);
  }
  arguments.lr = lr;
  arguments.lr_tensor = some(lr_tensor);
  arguments.grad_scale = number(factors.grad_scale);
  arguments.clip_coef = number(factors.clip_coef);
  arguments.found_inf = number(factors.found_inf);
  arguments.weight_remainder = value("weight_remainder");
  arguments.accumulated = some(accumulated);
  arguments.stochastic_rounding = Access::weight_rounding(o) == "stochastic";
  arguments.seed = seed_of(Access::seed(o), arena.kind.shard);
  arguments.numbers = arena.numbers;
  if (arena.part) std::tie(arguments.first_block, arguments.blocks) = *arena.part;
  arguments.call();
}

void Core::end_gradients() {
  sums.end_step();
  host.forget_gradients();
  micro_norms_.clear();
  if (split_gradients != nullptr) split_gradients->clear();
}

void Core::settle(const char* what) {
  const auto alone = lock();
  end_backward();
  host.drain();
  unfinished.settle(what);
  bring_back();
}

void Core::discard() {
  const auto alone = lock();
  end_backward();
  unfinished.end_unless_partial();
  if (split_gradients != nullptr) split_gradients->clear();
  if (unfinished.broken == Broken::kSums) {
    drop_sums();
    unfinished.broken = Broken::kNone;
  }
  if (!step_in_backward || accumulating) return;
  // zero_grad() ends a backward pass without step(). Parameters that were stepped within backward stay
  // stepped. Gradients that were collected for clipping are dropped.
  host.drain();
  if (host.has_any()) drop_sums();
  bring_back();
  finish_backward();
}

}  // namespace shoestring::optim::detail
