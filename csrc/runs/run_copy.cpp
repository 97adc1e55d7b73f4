#include "runs/run_copy.h"

#include <ATen/core/grad_mode.h>

#include "optim/host_copy.h"
#include "runs/generators.h"

namespace shoestring::runs {

using at::Tensor;
using optim::detail::on_host;

RunCopy::RunCopy(TrainingRun& run) : run_(&run) {
  const at::NoGradGuard no_grad;
  for (const auto& item : run.tensors) {
    const Tensor& t = item.value();
    tensors_.emplace_back(t, on_host(t));
    if (t.requires_grad()) gradients_.emplace_back(t, t.grad().defined() ? t.grad().clone() : Tensor());
  }
  for (auto* optimizer : run.optimizers) optimizers_.push_back(on_host(optim::detail::store(*optimizer)));
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
  for (size_t i = 0; i < optimizers_.size(); ++i) {
    optim::detail::restore(*run_->optimizers[i], optimizers_[i], "restore");
  }
  for (auto& [name, part] : run_->parts) part.load_state(parts_[name]);
  each_generator([&](const std::string& name, at::Generator generator) {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(generators_.at(name));
  });
  for (const auto& [tensor, host] : tensors_) Tensor(tensor).copy_(host);
  for (const auto& [tensor, copy] : gradients_) {
    Tensor(tensor).mutable_grad() = copy.defined() ? copy.clone() : Tensor();
  }
}

}  // namespace shoestring::runs
