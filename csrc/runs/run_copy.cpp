#include "runs/run_copy.h"

#include <ATen/core/grad_mode.h>

#include "runs/generators.h"

namespace shoestring::runs {

using at::Tensor;

RunCopy::RunCopy(TrainingRun& run, std::string what)
    : run_(&run), what_(std::move(what)), copy_(run.tensors.values(), run.optimizers) {
  const at::NoGradGuard no_grad;
  for (const auto& item : run.tensors) {
    const Tensor& t = item.value();
    if (t.requires_grad()) gradients_.emplace_back(t, t.grad().defined() ? t.grad().clone() : Tensor());
  }
  for (const auto& [name, part] : run.parts) {
    for (const auto& item : part.state()) parts_[name].insert(item.key(), item.value().clone());
  }
  each_generator([&](const std::string& name, at::Generator generator) {
    const std::lock_guard lock(generator.mutex());
    generators_[name] = generator.get_state();
  });
}

void RunCopy::restore() {
  const at::NoGradGuard no_grad;
  copy_.restore(what_);
  for (auto& [name, part] : run_->parts) part.load_state(parts_[name]);
  each_generator([&](const std::string& name, at::Generator generator) {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(generators_.at(name));
  });
  for (const auto& [tensor, copy] : gradients_) {
    Tensor(tensor).mutable_grad() = copy.defined() ? copy.clone() : Tensor();
  }
}

}  // namespace shoestring::runs
