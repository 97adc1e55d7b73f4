// Gradients within backward: hooks, sums over micro-batches, and steps of single parameters.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "optim/core/core.h"
#include "optim/core/norm.h"

namespace shoestring::optim::detail {
namespace {

// A post-accumulate-grad hook. A tensor has room for only one such hook, so this hook first calls the hook
// that it replaces.
struct Hook final : torch::autograd::PostAccumulateGradHook {
  std::weak_ptr<Core> core;
  std::unique_ptr<PostAccumulateGradHook> before;

  void operator()(const Tensor& param) override {
    if (before != nullptr) (*before)(param);
    const auto alive = core.lock();
    if (alive != nullptr && param.grad().defined()) alive->on_gradient(param);
  }
};

}  // namespace

void Core::expect_no_sums(const char* what) const {
  expect(!sums.any(), label, what, "no gradients of accumulate(), which unscale_ does not divide",
         "some. Clip with set_max_grad_norm, and call GradScaler::step without unscale_.");
}

void Core::watch(const std::vector<Tensor>& params) {
  if (!installs_hooks) return;
  for (const Tensor& p : params) {
    if (!p.requires_grad() || !watched_.insert(p.unsafeGetTensorImpl()).second) continue;
    auto& hook_slot = torch::autograd::impl::post_acc_grad_hooks(p);
    auto hook = std::make_unique<Hook>();
    hook->core = weak_from_this();
    hook->before = std::move(hook_slot);
    if (auto* old = dynamic_cast<Hook*>(hook->before.get()); old != nullptr && old->core.expired()) {
      hook->before = std::move(std::exchange(old->before, nullptr));
    }
    torch::autograd::impl::set_post_acc_grad_hooks(p, std::move(hook));
  }
}

void Core::on_gradient(const Tensor& param) {
  const auto alone = lock();
  at::NoGradGuard no_grad;
  if (accumulating || step_in_backward) begin_backward();
  if (accumulating && takes_norms) micro_norms_.add(shard_of(param), param.grad());
  if (on_cpu() && (accumulating || step_in_backward)) {
    host.arrive(param);
  } else if (accumulating) {
    sums.add(param);
  } else if (step_in_backward) {
    step_alone(param);
  } else if (ranks.has_value()) {
    take_sum(param);
    if (split_gradients != nullptr) split_gradient(param);
  }
}

// Gives a complete gradient to split_gradients.
void Core::split_gradient(const Tensor& param) {
  if (!knows_parts_) {
    std::vector<Tensor> params;
    std::vector<const Arena*> arenas;
    for (size_t g = 0; g < optimizer->param_groups().size(); ++g) {
      for (const Arena& arena : layout(g).arenas) arenas.push_back(&arena);
      for (const Tensor& p : optimizer->param_groups()[g].params())
        if (p.requires_grad()) params.push_back(p);
    }
    split_gradients->set_parts(params, parts_of(arenas));
    knows_parts_ = true;
  }
  split_gradients->add(param);
}

void Core::add_sum_to_gradient(const Tensor& param) {
  const auto alone = lock();
  at::NoGradGuard no_grad;
  take_sum(param);
}

void Core::take_sum(const Tensor& param) {
  if (!sums.has(param)) return;
  host.drain();
  sums.add_to_gradient(param);
}

void Core::begin_sums() {
  const auto alone = lock();
  check_process();
  end_backward();
  unfinished.check_whole("accumulate");
  unfinished.end();
}

void Core::flush() {
  const auto alone = lock();
  host.send_jobs();
}

void Core::drop() {
  const auto alone = lock();
  host.drain();
  drop_sums();
}

void Core::drop_sums() {
  sums.drop();
  end_gradients();
}

// ---- the running backward

// The gradient hook calls this function for each gradient. The first call in a backward pass registers the
// pass.
void Core::begin_backward() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (backwards_ == nullptr) backwards_ = std::make_shared<Backwards>();
  if (backwards_->has(task)) return;
  if (!backwards_->any()) {
    check_process();
    end_backward();
    unfinished.check_whole("backward");
    unfinished.end();
    stepped_in_backward = false;
  }
  if (task < 0) return;
  backwards_->begin(task, [core = weak_from_this()] {
    const auto alive = core.lock();
    if (alive == nullptr) return;
    const auto alone = alive->lock();
    const at::NoGradGuard no_grad;
    // After the failed backward, the caller may load weights. Wait for all jobs now, since a later job would
    // step the loaded weights.
    alive->end_backward();
  });
}

// Cleans up after a failed backward pass that has delivered only some of the gradients.
void Core::end_backward() {
  if (backwards_ == nullptr || !backwards_->take_failure()) return;
  host.drop_incomplete();
  clipping.in_backward.clear();
  if (stepped_in_backward) {
    unfinished.broken = Broken::kWeights;
  } else if (sums.any() || sums.are_used()) {
    unfinished.broken = Broken::kSums;
  } else {
    end_gradients();
  }
}

// Ends what gradient hooks and a failed step have begun. Returns the failed step, if it can be finished.
std::optional<Step> Core::end_earlier() {
  end_backward();
  host.drain();
  unfinished.check_whole("step");
  finish_backward();
  return unfinished.resume();
}

// ---- norms for GradientNoise

Tensor Core::take_squares() {
  const auto alone = lock();
  expect(!micro_norms_.empty(), label, "gradients", "micro-batches within accumulate()",
         "none. Call update() before step().");
  for (const auto& group : optimizer->param_groups()) {
    for (const Tensor& p : group.params()) {
      if (p.grad().defined()) micro_norms_.add(shard_of(p), p.grad());
    }
  }
  const Norms norms = std::exchange(micro_norms_, {});
  return norms.total().square();
}

Tensor Core::whole_square() {
  const auto alone = lock();
  host.drain();
  Norms norms;
  for (const auto& group : optimizer->param_groups()) {
    for (const Tensor& p : group.params()) {
      const Tensor grad = p.grad();
      if (!sums.has(p)) {
        if (grad.defined()) norms.add(shard_of(p), grad);
        continue;
      }
      const Tensor& sum = sums.of(p);
      norms.add(shard_of(p), grad.defined() ? sum + grad.to(sum.device(), sum.scalar_type()) : sum);
    }
  }
  expect(!norms.empty(), label, "gradients", "some", "none. Call backward() first.");
  return norms.total().square();
}

// ---- steps within backward

void Core::step_alone(const Tensor& param) {
  const Key key = param.unsafeGetTensorImpl();
  check_first(stepped_alone_.count(key) == 0);
  const bool summed = sums.has(param);
  auto entry = alone_.find(key);
  if (entry == alone_.end() || (summed && !entry->second.arena.accumulated.defined())) {
    alone_.clear();
    find_alone();
    entry = alone_.find(key);
  }
  auto& [group, arena] = entry->second;
  arena.check_place(label);
  Access::check_step(options(group));
  Tensor grad = param.grad(), accumulated = summed ? arena.accumulated : Tensor();
  StepFactors factors;
  if (clipping.max_norm) {
    if (summed) grad = sums.of(param).add_(grad);
    accumulated = Tensor();
    clipping.in_backward.add(arena.kind.shard, grad);
    if (clipping.norm.defined()) factors.clip_coef = clip_coef(clipping.norm, *clipping.max_norm);
  }
  try {
    step_arena({group, &arena, {grad}, accumulated}, factors);
  } catch (...) {
    if (arena.offloaded != nullptr && arena.offloaded->any_done()) stepped_in_backward = true;
    arena.stepped = Tensor();
    throw;
  }
  stepped_in_backward = true;
  stepped_alone_.insert(key);
  if (arena.offloaded != nullptr) arena.commit();
  if (clipping.max_norm && summed) grad.zero_();
  sums.erase(param);
  param.mutable_grad() = Tensor();
}

void Core::find_alone() {
  const size_t groups = optimizer->param_groups().size();
  for (size_t g = 0; g < groups; ++g) layout(g);
  for (size_t g = 0; g < groups; ++g) {
    for (Arena& arena : layout(g).arenas) {
      if (sums.any_in(arena)) sums.into(arena);
      for (size_t i = 0; i < arena.params.size(); ++i) {
        alone_.insert({arena.params[i].unsafeGetTensorImpl(), Alone{g, arena.run(rule(g), i, i + 1)}});
      }
    }
  }
}

void Core::check_first(bool is_first) {
  // This error must not drop the gradients of the previous backward pass, since step() can still use them.
  if (!is_first && !stepped_in_backward) backwards_->forget_running();
  TORCH_CHECK(is_first, label,
              ": step_in_backward: expected step() after each backward, received a second gradient of a "
              "parameter. Use accumulate() around all backwards but the last of a step, and "
              "use_reentrant=False in torch.utils.checkpoint.");
}

void Core::finish_backward() {
  stepped_alone_.clear();
  if (clipping.in_backward.empty()) return;
  clipping.norm = clipping.in_backward.total();
  clipping.in_backward.clear();
}

}  // namespace shoestring::optim::detail
