#include <typeinfo>
#include <unordered_set>

#include <torch/csrc/autograd/grad_mode.h>

#include "offload/first_error.h"
#include "optim/core/core.h"

namespace shoestring::optim {

using namespace detail;

LowMemoryOptimizer::LowMemoryOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                                       std::unique_ptr<LowMemoryOptions> defaults)
    : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(), std::move(defaults)),
      core_(std::make_shared<Core>(*this)) {
  Access::check(static_cast<const LowMemoryOptions&>(*defaults_), core_->label);
  for (const auto& group : param_groups) add_param_group(group);
}

LowMemoryOptimizer::~LowMemoryOptimizer() = default;

LowMemoryOptimizer::LowMemoryOptimizer(LowMemoryOptimizer&& other) noexcept
    : Optimizer(std::move(other)), core_(std::move(other.core_)) {
  core_->optimizer = this;
}

LowMemoryOptimizer& LowMemoryOptimizer::operator=(LowMemoryOptimizer&& other) noexcept {
  Optimizer::operator=(std::move(other));
  core_ = std::move(other.core_);
  core_->optimizer = this;
  return *this;
}

void LowMemoryOptimizer::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  const auto alone = core_->lock();
  const std::string& name = core_->label;
  if (group.has_options()) {
    expect(typeid(group.options()) == typeid(*defaults_), name, "options",
           c10::str(core_->name(), "Options in every group"), "the options of another optimizer");
    Access::check(static_cast<const LowMemoryOptions&>(group.options()), name);
  }
  const auto& options =
      static_cast<const LowMemoryOptions&>(group.has_options() ? group.options() : *defaults_);
  std::unordered_set<Key> seen;
  for (size_t i = 0; i < group.params().size(); ++i) {
    const Tensor& p = group.params()[i];
    const auto type = p.scalar_type();
    const std::string which = c10::str("params[", i, "]");
    const bool half = type == at::kHalf && Access::weight_rounding(options) != "nearest";
    expect(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf, name, which,
           "fp32, bf16 or fp16", type);
    const SplitParameter* split = split_of(p);
    const Rule& rule = Access::rule(options);
    expect(split == nullptr || rule.takes_parts() || !split->begins.empty(), name, which,
           "a parameter that is split by rows over one dimension of its mesh", "one that is split otherwise");
    expect(whole_sizes(p).size() == 2 || !rule.takes_matrices_alone, name, which,
           "a matrix (use AdamW for parameters of other shapes)", c10::str("shape ", whole_sizes(p)));
    expect(!half, name, which,
           "bf16 (or fp32, on which the option has no effect) with weight_rounding=\"" +
               Access::weight_rounding(options) + "\"",
           type);
    expect(seen.insert(p.unsafeGetTensorImpl()).second, name, which, "each parameter once", "a duplicate");
  }
  Optimizer::add_param_group(group);
  if (group.has_options()) param_groups_.back().set_options(group.options().clone());
  try {
    for (const Tensor& p : group.params()) core_->offload_of(p.device());
    core_->reserve(param_groups_.size() - 1);
  } catch (...) {
    param_groups_.pop_back();
    throw;
  }
  if (core_->step_in_backward || core_->split_gradients != nullptr) core_->watch(group.params());
}

void LowMemoryOptimizer::zero_grad(bool set_to_none) {
  const auto alone = core_->lock();
  if (set_to_none) {
    // LibTorch detaches each gradient first, which fails for views such as those of DataParallel's buckets.
    for (auto& group : param_groups())
      for (at::Tensor& p : group.params()) p.mutable_grad().reset();
  } else {
    Optimizer::zero_grad(false);
  }
  at::NoGradGuard no_grad;
  core_->discard();
}

Tensor LowMemoryOptimizer::step(LossClosure closure) {
  core_->check_step();
  Tensor loss;
  if (closure != nullptr) {
    at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  at::NoGradGuard no_grad;
  core_->step();
  return loss;
}

void LowMemoryOptimizer::set_max_grad_norm(std::optional<double> max_grad_norm) {
  expect(!max_grad_norm || *max_grad_norm > 0, core_->label, "max_grad_norm", "a number above 0, or none",
         max_grad_norm.value_or(0));
  core_->clipping.max_norm = max_grad_norm;
}

Tensor LowMemoryOptimizer::scaled_step(const Tensor& grad_scale, const Tensor& found_inf) {
  core_->check_step();
  at::NoGradGuard no_grad;
  return core_->scaled_step(grad_scale, found_inf);
}

const Tensor& LowMemoryOptimizer::grad_norm() const { return core_->clipping.norm; }

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
  expect(dtype == at::kFloat || dtype == at::kBFloat16, core_->label, "accumulate_dtype",
         "at::kFloat or at::kBFloat16", dtype);
  core_->sums.dtype = dtype;
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
