#include <ATen/Functions.h>
#include <shoestring/optim/guard.h>

#include "optim/core/core.h"
#include "optim/core/host_copy.h"
#include "optim/core/scaled.h"
#include "optim/core/stored.h"
#include "optim/wrappers/guard_core.h"

namespace shoestring::optim {

using namespace detail;

Guard::Guard(torch::optim::Optimizer& optimizer, const GuardOptions& options)
    : Guard(std::vector{&optimizer}, options) {}
Guard::Guard(std::vector<torch::optim::Optimizer*> optimizers, const GuardOptions& options)
    : optimizers_(std::move(optimizers)), core_(std::make_unique<GuardCore>(options)) {
  expect(!optimizers_.empty(), "Guard", "optimizers", "at least one", "none");
  for (auto* optimizer : optimizers_) {
    // An optimizer of a class that cannot be stored is refused here, and not at the first copy.
    if (options.on() == "rollback") store(*optimizer);
  }
}
Guard::Guard(Guard&&) noexcept = default;
Guard& Guard::operator=(Guard&&) noexcept = default;
Guard::~Guard() = default;

void Guard::include(torch::nn::Module& module) { modules_.push_back(&module); }
void Guard::watch(const Tensor& loss) { core_->watch(loss); }

void Guard::copy() {
  std::vector<Tensor> tensors;
  for (const auto* optimizer : optimizers_) {
    for (const auto& group : optimizer->param_groups()) {
      for (const Tensor& p : group.params()) {
        if (p.defined()) tensors.push_back(p);
      }
    }
  }
  copy_ = std::make_unique<HostCopy>(tensors, optimizers_, modules_);
  core_->copied();
}

bool Guard::review() {
  if (!core_->review()) return false;
  if (copy_ == nullptr) return false;  // the first step was bad; the weights are those of the beginning
  // The optimizer drops the sums of accumulate(), which belong to the weights that are gone.
  copy_->restore("Guard: rollback");
  return true;
}

void Guard::take(const c10::function_ref<Tensor(torch::optim::Optimizer&, const Tensor&)>& step,
                 bool with_gradients) {
  for (auto* optimizer : optimizers_) {
    auto* low_memory = divides_within_step(*optimizer);
    expect(low_memory == nullptr || !Access::core(*low_memory).step_in_backward, "Guard", "optimizers",
           "step_in_backward=false", "true: the optimizer steps before the guard can judge");
    expect(low_memory == nullptr || optimizers_.size() == 1 || !Access::core(*low_memory).sums.any(), "Guard",
           "optimizers", "gradients in grad(), because several optimizers are judged together",
           "some of accumulate()");
  }
  if (review()) {
    core_->drop();
    return;
  }
  std::vector<Tensor> gradients;
  if (with_gradients) {
    for (const auto* optimizer : optimizers_) {
      for (const Tensor& gradient : gradients_of(*optimizer)) gradients.push_back(gradient);
    }
  }
  const Tensor bad = core_->judge(gradients);
  if (core_->is_copy_due() && bad.item<float>() == 0) copy();
  Tensor skipped;
  for (auto* optimizer : optimizers_) skipped = either(skipped, step(*optimizer, bad));
  core_->record(skipped);
}

void Guard::step(const Tensor& loss) {
  if (loss.defined()) core_->watch(loss);
  take(
      [](torch::optim::Optimizer& optimizer, const Tensor& bad) {
        auto* low_memory = divides_within_step(optimizer);
        const bool sums = low_memory != nullptr && Access::core(*low_memory).sums.any();
        return scaled_step(optimizer, sums ? at::ones_like(bad) : Tensor(), bad);
      },
      /*with_gradients=*/true);
}

void Guard::step(GradScaler& scaler, const Tensor& loss) {
  if (loss.defined()) core_->watch(loss);
  take(
      [&](torch::optim::Optimizer& optimizer, const Tensor& bad) {
        scaler.step(optimizer, bad);
        return bad;
      },
      /*with_gradients=*/false);
}

void Guard::check() { review(); }

int64_t Guard::steps() const { return core_->steps(); }
int64_t Guard::rollbacks() const { return core_->rollbacks(); }
const std::vector<BadStep>& Guard::bad_steps() const { return core_->bad_steps(); }
TensorDict Guard::state() const { return core_->state(); }
void Guard::load_state(const TensorDict& state) {
  core_->load_state(state);
  copy_ = nullptr;
}

}  // namespace shoestring::optim
