#include <algorithm>
#include <cmath>
#include <numeric>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include "offload/first_error.h"
#include "optim/all_reduce.h"
#include "optim/core.h"
#include "optim/foreach_norm.h"
#include "optim/norm.h"
#include "optim/split_params.h"

namespace shoestring::optim {
namespace detail {
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

bool Core::has_gradient(const Tensor& param) const {
  if (split_gradients != nullptr)
    return (split_gradients->any() || is_pending(param)) && param.requires_grad();
  return param.grad().defined() || is_pending(param) || collected_.count(param.unsafeGetTensorImpl()) > 0;
}

bool Core::has_gradients() const {
  const auto& groups = optimizer->param_groups();
  return std::any_of(groups.begin(), groups.end(), [&](const auto& group) {
    return std::any_of(group.params().begin(), group.params().end(),
                       [&](const Tensor& p) { return has_gradient(p); });
  });
}

void Core::expect_no_sums(const char* what) const {
  expect(pending_.empty(), name(), what, "no gradients of accumulate(), which unscale_ does not divide",
         "some. Clip with set_max_grad_norm, and call GradScaler::step without unscale_.");
}

bool Core::any_pending(const Arena& arena) const {
  return std::any_of(arena.params.begin(), arena.params.end(),
                     [&](const Tensor& p) { return is_pending(p); });
}

void Core::watch(const std::vector<Tensor>& params) {
  if (!installs_hooks) return;
  for (const Tensor& p : params) {
    if (!p.requires_grad() || !watched_.insert(p.unsafeGetTensorImpl()).second) continue;
    auto& place = torch::autograd::impl::post_acc_grad_hooks(p);
    auto hook = std::make_unique<Hook>();
    hook->core = weak_from_this();
    hook->before = std::move(place);
    if (auto* old = dynamic_cast<Hook*>(hook->before.get()); old != nullptr && old->core.expired()) {
      hook->before = std::move(std::exchange(old->before, nullptr));
    }
    torch::autograd::impl::set_post_acc_grad_hooks(p, std::move(hook));
  }
}

void Core::on_gradient(const Tensor& param) {
  const std::lock_guard lock(mutex_);
  at::NoGradGuard no_grad;
  if (accumulating || step_in_backward) begin_backward();
  if (accumulating && takes_norms) add_norm(micro_norms_, param, param.grad());
  if (on_cpu() && (accumulating || step_in_backward)) {
    arrive(param);
  } else if (accumulating) {
    add(param);
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
  const std::lock_guard lock(mutex_);
  at::NoGradGuard no_grad;
  take_sum(param);
}

void Core::take_sum(const Tensor& param) {
  if (!is_pending(param)) return;
  drain();
  Tensor& sum = sums_.at(param.unsafeGetTensorImpl());
  if (!param.grad().defined()) param.mutable_grad() = at::zeros_like(param);
  param.mutable_grad().add_(sum.to(param.device()));
  sum.zero_();
  pending_.erase(param.unsafeGetTensorImpl());
}

void Core::forget() {
  const auto alone = lock();
  end_backward();
  offload::FirstError ignored;  // errors are ignored: they concern optimizer state that is dropped anyway
  ignored.guard([&] { drain(); });
  broken_ = Broken::kNone;
  used_.clear();
  drop_buckets();
  collected_.clear();
  known_norms_.clear();
  layouts.clear();
  unfinished_.reset();
  alone_.clear();
  stepped_alone_.clear();
  sums_.clear();
  pending_.clear();
  norms_.clear();
}

// ---- sums over micro-batches

void Core::add(const Tensor& param) {
  const Tensor grad = param.grad();
  Tensor& sum = sums_[param.unsafeGetTensorImpl()];
  if (!sum.defined()) sum = at::zeros(grad.sizes(), grad.options().dtype(accumulate_dtype));
  sum.add_(grad);
  pending_.insert(param.unsafeGetTensorImpl());
  param.mutable_grad() = Tensor();
}

// Moves the accumulated gradients of an arena's parameters into the arena. Returns views of them.
std::vector<Tensor> Core::into_arena(Arena& arena) {
  const auto views = arena.accumulated_views(accumulate_dtype);
  for (size_t i = 0; i < views.size(); ++i) {
    Tensor& sum = sums_[arena.params[i].unsafeGetTensorImpl()];
    if (is_pending(arena.params[i]) && !sum.is_alias_of(views[i])) views[i].copy_(sum);
    sum = views[i];
  }
  return views;
}

// Collects the gradients of an operator call. Clipping and scaled steps need complete gradients before the
// call. In these cases, adds the gradients to the accumulated gradients and passes the sums as the gradients.
void Core::gather(Call& call) {
  bool here = false;  // whether some gradients, collected or accumulated, are in host memory
  if (split_gradients != nullptr) {
    for (const Tensor& p : call.arena->params) {
      const Tensor part = split_gradients->part(p);
      call.grads.push_back(part.numel() == p.numel() ? part.view(p.sizes()) : part);
    }
    return;
  }
  for (const Tensor& p : call.arena->params) {
    call.grads.push_back(p.grad());
    here |= is_pending(p) || collected_.count(p.unsafeGetTensorImpl()) > 0;
  }
  if (here && call.arena->host != nullptr) call.grads = on_host(*call.arena, std::move(call.grads));
  if (!any_pending(*call.arena)) return;
  TORCH_CHECK(!ranks, label,
              ": step: expected a last micro-batch outside of accumulate() that has a gradient ",
              "for each parameter, received sums without one");
  const auto views = into_arena(*call.arena);
  const bool whole = max_grad_norm || grad_scale_.defined();
  for (size_t i = 0; i < views.size(); ++i) {
    const Tensor& p = call.arena->params[i];
    if (!is_pending(p)) continue;
    Tensor& grad = call.grads[i];
    if (whole) {
      used_.push_back(views[i]);
      if (grad.defined()) views[i].add_(grad);
      grad = views[i];
    } else if (!grad.defined()) {
      grad = at::zeros_like(p, at::TensorOptions().device(call.arena->kind.device));
    }
  }
  if (!whole) call.accumulated = call.arena->accumulated;
}

void Core::drop_sums() {
  for (const Tensor& view : used_) view.zero_();
  used_.clear();
  pending_.clear();
  collected_.clear();
  known_norms_.clear();
  micro_norms_.clear();
  if (split_gradients != nullptr) split_gradients->clear();
}

// ---- scaled losses

std::vector<Tensor> Core::gradients_of(const std::vector<Call>& calls) {
  std::vector<Tensor> grads;
  for (const Call& call : calls) {
    for (const Tensor& g : call.grads) {
      if (g.defined()) grads.push_back(g);
    }
  }
  return grads;
}

namespace {

// Reduces a number of this process over the process groups of a shard: the sum or the maximum ("max") over
// all shards of a parameter.
Tensor over_groups(const Tensor& number, const Shard& shard, const char* how) {
  Tensor reduced = number.to(shard.device);
  for (const std::string& group : shard.groups) reduced = all_reduce(reduced, how, group);
  return reduced;
}

}  // namespace

void Core::find_inf(const std::vector<Call>& calls) {
  if (!grad_scale_.defined() || (is_checked_ && pending_.empty())) return;
  Tensor found = non_finite(gradients_of(calls), grad_scale_.device());
  std::vector<Shard> shards;  // all processes must skip a step, or none
  for (const Call& call : calls) {
    const Shard& shard = call.arena->kind.shard;
    if (shard.groups.empty() || std::find(shards.begin(), shards.end(), shard) != shards.end()) continue;
    shards.push_back(shard);
    found = over_groups(found, shard, "max").to(found.device());
  }
  if (found_inf_.defined())
    found = found.logical_or(found_inf_.to(found.device()).reshape({})).to(at::kFloat);
  found_inf_ = found;
}

Tensor Core::scaled_step(const Tensor& scale, const Tensor& skip, bool is_checked) {
  const auto alone = lock();
  const auto is_number = [](const Tensor& t) { return t.scalar_type() == at::kFloat && t.numel() == 1; };
  const auto received = [](const Tensor& t) {
    return t.defined() ? c10::str(t.scalar_type(), " of shape ", t.sizes()) : std::string("none");
  };
  expect(scale.defined() ? is_number(scale) : skip.defined(), name(), "grad_scale", "one fp32 number",
         received(scale));
  expect(!skip.defined() || is_number(skip), name(), "found_inf", "one fp32 number, or none", received(skip));
  if (!scale.defined()) expect_no_sums("scaled_step");
  expect(!step_in_backward, name(), "scaled_step",
         "an optimizer without step_in_backward, which steps before all gradients are known to be finite",
         "one with it");
  const auto done = [this](void*) {
    grad_scale_ = found_inf_ = Tensor();
    is_checked_ = false;
  };
  const std::unique_ptr<void, decltype(done)> guard(this, done);
  grad_scale_ = scale;
  found_inf_ = skip;
  is_checked_ = is_checked;
  return step();
}

// ---- clipping

// Computes the norm of all gradients. Returns the factor by which clipping multiplies the gradients, or an
// undefined tensor without clipping.
Tensor Core::clip(const std::vector<Call>& calls) {
  if (step_in_backward && !on_cpu()) return {};
  grad_norm = Tensor();
  if (!max_grad_norm) return {};
  // The gradients of one Shard have one norm, so that each group of processes communicates once.
  ByShard grads, norms;
  for (const Call& call : calls) {
    // The order of the parameters, which owners have changed, keeps the bits of one process.
    std::vector<size_t> order(call.grads.size());
    std::iota(order.begin(), order.end(), 0);
    const auto& numbers = call.arena->numbers;
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return numbers[a] < numbers[b]; });
    for (const size_t i : order) {
      if (call.grads[i].defined()) of_shard(grads, call.arena->kind.shard).push_back(call.grads[i]);
    }
  }
  if (grads.empty()) return {};
  for (const auto& [shard, some] : grads) norms.push_back({shard, {total_norm(some, known_norms_)}});
  grad_norm = norm_over(norms);
  if (grad_scale_.defined()) grad_norm = grad_norm / grad_scale_.to(grad_norm.device()).squeeze();
  return clip_coef(grad_norm, *max_grad_norm);
}

// Returns the norm of all gradients of all processes. Every process gets the same norm, since all of them
// call this function with the same groups in the same order.
Tensor Core::norm_over(const ByShard& norms) {
  std::vector<Tensor> whole;
  for (const auto& [shard, some] : norms) {
    std::vector<Tensor> here;
    for (const Tensor& norm : some) here.push_back(norm.to(some[0].device()));
    const Tensor norm = here.size() == 1 ? here[0] : at::linalg_vector_norm(at::stack(here));
    whole.push_back(shard.groups.empty() ? norm : over_groups(norm.square(), shard, "sum").sqrt());
  }
  if (whole.size() == 1) return whole[0];
  for (Tensor& norm : whole) norm = norm.to(whole[0].device());
  return at::linalg_vector_norm(at::stack(whole));
}

std::vector<Tensor>& Core::of_shard(ByShard& all, const Shard& shard) {
  const auto same =
      std::find_if(all.begin(), all.end(), [&](const auto& entry) { return entry.first == shard; });
  return same != all.end() ? same->second : all.emplace_back(shard, std::vector<Tensor>()).second;
}

// ---- norms for GradientNoise

Shard Core::shard_of(const Tensor& param) const {
  if (const SplitParameter* split = split_of(param)) return {split->groups, split->piece, split->device};
  return {};
}

void Core::add_norm(ByShard& norms, const Tensor& param, const Tensor& gradient) const {
  constexpr size_t kMost = 1024;
  auto& some = of_shard(norms, shard_of(param));
  some.push_back(ops::foreach_norm({gradient})[0]);
  if (some.size() >= kMost) some = {at::linalg_vector_norm(at::stack(some))};
}

Tensor Core::take_squares() {
  const std::lock_guard lock(mutex_);
  expect(!micro_norms_.empty(), name(), "gradients", "micro-batches within accumulate()",
         "none. Call update() before step().");
  for (const auto& group : optimizer->param_groups()) {
    for (const Tensor& p : group.params()) {
      if (p.grad().defined()) add_norm(micro_norms_, p, p.grad());
    }
  }
  const ByShard norms = std::exchange(micro_norms_, {});
  return norm_over(norms).square();
}

Tensor Core::whole_square() {
  const std::lock_guard lock(mutex_);
  drain();
  ByShard norms;
  for (const auto& group : optimizer->param_groups()) {
    for (const Tensor& p : group.params()) {
      const Tensor grad = p.grad();
      if (!is_pending(p)) {
        if (grad.defined()) add_norm(norms, p, grad);
        continue;
      }
      const Tensor& sum = sums_.at(p.unsafeGetTensorImpl());
      add_norm(norms, p, grad.defined() ? sum + grad.to(sum.device(), sum.scalar_type()) : sum);
    }
  }
  expect(!norms.empty(), name(), "gradients", "some", "none. Call backward() first.");
  return norm_over(norms).square();
}

// ---- steps within backward

void Core::step_alone(const Tensor& param) {
  const Key key = param.unsafeGetTensorImpl();
  check_first(stepped_alone_.count(key) == 0);
  const bool summed = is_pending(param);
  auto found = alone_.find(key);
  if (found == alone_.end() || (summed && !found->second.arena.accumulated.defined())) {
    alone_.clear();
    find_alone();
    found = alone_.find(key);
  }
  auto& [group, arena] = found->second;
  arena.check_place(label);
  Access::check_step(options(group));
  Tensor grad = param.grad(), accumulated = summed ? arena.accumulated : Tensor(), coefficient;
  if (max_grad_norm) {
    if (summed) grad = sums_.at(key).add_(grad);
    accumulated = Tensor();
    of_shard(norms_, arena.kind.shard).push_back(ops::foreach_norm({grad})[0]);
    if (grad_norm.defined()) coefficient = clip_coef(grad_norm, *max_grad_norm);
  }
  try {
    step_arena(group, arena, {grad}, accumulated, coefficient);
  } catch (...) {
    if (arena.offloaded != nullptr && arena.offloaded->any_done()) stepped_in_backward_ = true;
    arena.stepped = Tensor();
    throw;
  }
  stepped_in_backward_ = true;
  stepped_alone_.insert(key);
  if (arena.offloaded != nullptr) arena.commit();
  if (max_grad_norm && summed) grad.zero_();
  pending_.erase(key);
  param.mutable_grad() = Tensor();
}

void Core::find_alone() {
  const size_t groups = optimizer->param_groups().size();
  for (size_t g = 0; g < groups; ++g) layout(g);
  for (size_t g = 0; g < groups; ++g) {
    for (Arena& arena : layout(g).arenas) {
      if (any_pending(arena)) into_arena(arena);
      for (size_t i = 0; i < arena.params.size(); ++i) {
        alone_.insert({arena.params[i].unsafeGetTensorImpl(), Alone{g, arena.run(rule(g), i, i + 1)}});
      }
    }
  }
}

void Core::check_first(bool is_first) {
  // This error must not drop the gradients of the previous backward pass, since step() can still use them.
  if (!is_first && !stepped_in_backward_) {
    const std::lock_guard lock(backwards_->mutex);
    backwards_->open.clear();
  }
  TORCH_CHECK(is_first, label,
              ": step_in_backward: expected step() after each backward, received a second gradient of a "
              "parameter. Use accumulate() around all backwards but the last of a step, and "
              "use_reentrant=False in torch.utils.checkpoint.");
}

void Core::finish_backward() {
  stepped_alone_.clear();
  if (norms_.empty()) return;
  grad_norm = norm_over(norms_);
  norms_.clear();
}

}  // namespace detail

using namespace detail;

void LowMemoryOptimizer::set_max_grad_norm(std::optional<double> max_grad_norm) {
  expect(!max_grad_norm || *max_grad_norm > 0, core_->name(), "max_grad_norm", "a number above 0, or none",
         max_grad_norm.value_or(0));
  core_->max_grad_norm = max_grad_norm;
}

Tensor LowMemoryOptimizer::scaled_step(const Tensor& grad_scale, const Tensor& found_inf) {
  core_->check_step();
  at::NoGradGuard no_grad;
  return core_->scaled_step(grad_scale, found_inf);
}

const Tensor& LowMemoryOptimizer::grad_norm() const { return core_->grad_norm; }

void LowMemoryOptimizer::set_shard(int64_t rank, int64_t ranks, std::string group, GatherWeights gather,
                                   std::shared_ptr<SplitGradients> gradients) {
  core_->set_shard({rank, ranks, std::move(group)}, std::move(gather), std::move(gradients));
  if (core_->split_gradients == nullptr) return;
  for (const auto& group : param_groups_) core_->watch(group.params());
}

void LowMemoryOptimizer::set_step_in_backward(bool step_in_backward) {
  if (step_in_backward) {
    core_->expect_unsharded("set_step_in_backward");
    core_->check_parts(0, "set_step_in_backward", "true");
  }
  core_->step_in_backward = step_in_backward;
  if (!step_in_backward) return;
  for (const auto& group : param_groups_) core_->watch(group.params());
}

void LowMemoryOptimizer::set_offload(const std::optional<std::string>& where) {
  core_->set_offload(where.value_or(""));
}

void LowMemoryOptimizer::set_accumulate_dtype(at::ScalarType dtype) {
  expect(dtype == at::kFloat || dtype == at::kBFloat16, core_->name(), "accumulate_dtype",
         "at::kFloat or at::kBFloat16", dtype);
  core_->accumulate_dtype = dtype;
}

std::shared_ptr<void> LowMemoryOptimizer::accumulate() {
  core_->begin_sums();
  for (const auto& group : param_groups_) core_->watch(group.params());
  const bool before = std::exchange(core_->accumulating, true);
  const auto end = [before](Core* core) {
    // This function may run while an exception unwinds the stack, so it must not throw. step() reports the
    // error again.
    offload::FirstError ignored;
    ignored.guard([&] { core->flush(); });
    core->accumulating = before;
  };
  // The deleter of the pointer that accumulate() returns ends the accumulation of gradients. The deleter
  // holds a reference to the Core, which therefore lives as long as the returned pointer.
  return std::shared_ptr<void>(core_.get(), [core = core_, end](void*) { end(core.get()); });
}

}  // namespace shoestring::optim
