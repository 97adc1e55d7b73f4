#include "runs/run_copy.h"

#include <algorithm>

#include <ATen/core/grad_mode.h>

#include "optim/core/core.h"
#include "optim/core/scaled.h"
#include "runs/generators.h"

namespace shoestring::runs {

using at::Tensor;

namespace {

// Returns the tensors of a run, and parameters of its optimizers that are not among them.
std::vector<Tensor> tensors_of(const TrainingRun& run) {
  std::vector<Tensor> tensors = run.tensors.values();
  for (const auto* optimizer : run.optimizers) {
    for (const auto& group : optimizer->param_groups()) {
      for (const Tensor& p : group.params()) {
        const auto same = [&](const Tensor& t) { return t.is_same(p); };
        if (p.defined() && std::none_of(tensors.begin(), tensors.end(), same)) tensors.push_back(p);
      }
    }
  }
  return tensors;
}

}  // namespace

RunCopy::RunCopy(TrainingRun& run, std::string what)
    : run_(&run), what_(std::move(what)), copy_(tensors_of(run), run.optimizers) {
  const at::NoGradGuard no_grad;
  for (auto* optimizer : run.optimizers) {
    const auto* divided = optim::detail::divides_within_step(*optimizer);
    TORCH_CHECK_VALUE(
        divided == nullptr || !optim::detail::Access::core(*divided).sums.any(), what_,
        ": run: expected gradients in grad(), received sums of accumulate(), which would be lost. "
        "Call step() or zero_grad() before");
  }
  for (const Tensor& t : tensors_of(run)) {
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
  std::vector<std::function<void()>> steps{[this] { copy_.restore(what_); }};
  for (auto& [name, part] : run_->parts) {
    steps.emplace_back([&part = part, &state = parts_[name]] {
      TensorDict copies;  // a part may keep the tensors that it loads
      for (const auto& item : state) copies.insert(item.key(), item.value().clone());
      part.load_state(copies);
    });
  }
  each_generator([&](const std::string& name, at::Generator generator) {
    steps.emplace_back([generator, &state = generators_.at(name)]() mutable {
      const std::lock_guard lock(generator.mutex());
      generator.set_state(state);
    });
  });
  for (const auto& [tensor, copy] : gradients_) {
    steps.emplace_back([&tensor = tensor, &copy = copy] {
      Tensor(tensor).mutable_grad() = copy.defined() ? copy.clone() : Tensor();
    });
  }
  optim::detail::call_all(steps);
}

}  // namespace shoestring::runs
