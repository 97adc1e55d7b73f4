#include <ATen/Functions.h>
#include <shoestring/optim/wrappers.h>
#include <torch/serialize/archive.h>

#include "optim/core/moved_weights.h"
#include "optim/core/scaled.h"

namespace shoestring::optim {

using at::Tensor;

SAM::SAM(std::unique_ptr<torch::optim::Optimizer> base, SAMOptions options)
    : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(),
                base == nullptr ? nullptr : std::as_const(*base).defaults().clone()),
      base_(std::move(base)), options_(options) {
  TORCH_CHECK_VALUE(base_ != nullptr, "SAM: base: expected an optimizer, received none");
  TORCH_CHECK_VALUE(dynamic_cast<ScheduleFreeAdamW*>(base_.get()) == nullptr,
                    "SAM: base: expected an optimizer without train() and eval(), received "
                    "ScheduleFreeAdamW");
  TORCH_CHECK_VALUE(options_.rho() >= 0, "SAM: rho: expected a number of at least 0, received ",
                    options_.rho());
  TORCH_CHECK_VALUE(options_.interval() >= 1, "SAM: interval: expected a number of at least 1, received ",
                    options_.interval());
  for (const auto& group : base_->param_groups()) param_groups_.emplace_back(group);
}

bool SAM::first_step() {
  expect_whole("first_step");
  if (!moves()) return false;
  std::vector<Tensor> params;
  for (const auto& group : param_groups_) {
    for (const Tensor& p : group.params()) {
      if (p.grad().defined()) params.push_back(p);
    }
  }
  moved_ = std::make_shared<detail::MovedWeights>(params);
  try {
    moved_->move(std::vector<double>(params.size(), options_.rho()),
                 std::vector<bool>(params.size(), options_.adaptive()));
  } catch (...) {
    std::exchange(moved_, nullptr)->go_back();
    throw;
  }
  return true;
}

// Restores the weights before the base optimizer's step.
Tensor SAM::descend(const char* what) {
  TORCH_CHECK(moved_ != nullptr || !moves(), "SAM: ", what, ": expected first_step() before, received none");
  const auto moved = std::exchange(moved_, nullptr);
  if (moved != nullptr) moved->go_back();
  // Learning rate schedulers change the options of SAM, so SAM copies its options to the base optimizer.
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    base_->param_groups()[g].set_options(std::as_const(param_groups_[g]).options().clone());
  }
  return moved != nullptr ? moved->finite() : Tensor();
}

void SAM::second_step() {
  descend("second_step");
  base_->step();
  ++steps_;
}

Tensor SAM::scaled_step(const Tensor& grad_scale, const Tensor& found_inf) {
  const Tensor finite = descend("scaled_step");
  const Tensor first = finite.defined() ? finite.logical_not().to(at::kFloat) : finite;
  const Tensor taken = detail::scaled_step(*base_, grad_scale, detail::either(found_inf, first));
  ++steps_;
  return taken;
}

Tensor SAM::step(LossClosure closure) {
  if (closure == nullptr) {
    second_step();
    return {};
  }
  expect_whole("step");
  at::AutoGradMode enable_grad(true);
  const Tensor loss = closure();
  if (first_step()) {
    zero_grad();
    try {
      closure();
    } catch (...) {
      std::exchange(moved_, nullptr)->go_back();
      throw;
    }
  }
  second_step();
  return loss;
}

void SAM::expect_whole(const char* what) const {
  TORCH_CHECK(
      moved_ == nullptr, "SAM: ", what,
      ": expected second_step() after first_step(), received the weights that first_step() has moved");
}

void SAM::save(torch::serialize::OutputArchive& archive) const {
  expect_whole("save");
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    base_->param_groups()[g].set_options(param_groups_[g].options().clone());
  }
  torch::serialize::OutputArchive base(archive.compilation_unit());
  base_->save(base);
  archive.write("base", base);
  archive.write("rho", c10::IValue(options_.rho()));
  archive.write("adaptive", c10::IValue(options_.adaptive()));
  archive.write("interval", c10::IValue(options_.interval()));
  archive.write("steps", c10::IValue(steps_));
}

void SAM::load(torch::serialize::InputArchive& archive) {
  expect_whole("load");
  c10::IValue rho, adaptive, interval, steps;
  torch::serialize::InputArchive base;
  const bool ours = archive.try_read("rho", rho) && archive.try_read("adaptive", adaptive) &&
                    archive.try_read("interval", interval) && archive.try_read("steps", steps) &&
                    archive.try_read("base", base);
  TORCH_CHECK_VALUE(ours, "SAM: load: expected an archive of this optimizer, received another one");
  base_->load(base);
  options_.rho(rho.toDouble()).adaptive(adaptive.toBool()).interval(interval.toInt());
  steps_ = steps.toInt();
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    param_groups_[g].set_options(std::as_const(base_->param_groups()[g]).options().clone());
  }
}

}  // namespace shoestring::optim
