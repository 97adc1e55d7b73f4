#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <shoestring/optim/guard.h>

#include "optim/core.h"
#include "optim/guard_core.h"
#include "optim/host_copy.h"
#include "optim/scaled.h"
#include "optim/stored.h"

namespace shoestring::optim {

using namespace detail;

namespace {

std::vector<Tensor> gradients_of(const torch::optim::Optimizer& optimizer) {
  std::vector<Tensor> gradients;
  for (const auto& group : optimizer.param_groups()) {
    for (const Tensor& p : group.params()) {
      const Tensor& g = p.grad();
      if (g.defined()) gradients.push_back(g.is_sparse() ? g._values() : g);
    }
  }
  return gradients;
}

}  // namespace

// Copies in host memory of weights and buffers, and of the optimizer's state.
struct Guard::Copy {
  std::vector<std::pair<Tensor, Tensor>> tensors;  // of the model, and their copies
  Stored state;
};

Guard::Guard(torch::optim::Optimizer& optimizer, const GuardOptions& options)
    : optimizer_(&optimizer), core_(std::make_unique<GuardCore>(options)) {
  // An optimizer of a class that cannot be stored is refused here, and not at the first copy.
  if (options.on() == "rollback") store(optimizer);
}
Guard::Guard(Guard&&) noexcept = default;
Guard& Guard::operator=(Guard&&) noexcept = default;
Guard::~Guard() = default;

void Guard::include(torch::nn::Module& module) { modules_.push_back(&module); }
void Guard::watch(const Tensor& loss) { core_->watch(loss); }

void Guard::copy() {
  const at::NoGradGuard no_grad;
  auto copy = std::make_unique<Copy>();
  const auto add = [&](const Tensor& t) {
    if (t.defined()) copy->tensors.emplace_back(t, on_host(t));
  };
  for (const auto& group : optimizer_->param_groups()) {
    for (const Tensor& p : group.params()) add(p);
  }
  for (auto* module : modules_) {
    for (const Tensor& b : module->buffers()) add(b);
  }
  copy->state = on_host(store(*optimizer_));
  copy_ = std::move(copy);
  core_->copied();
}

bool Guard::review() {
  if (!core_->review()) return false;
  if (copy_ == nullptr) return false;  // the first step was bad; the weights are those of the beginning
  const at::NoGradGuard no_grad;
  // The optimizer drops the sums of accumulate(), which belong to the weights that are gone.
  restore(*optimizer_, copy_->state, "Guard: rollback");
  for (const auto& [tensor, host] : copy_->tensors) {
    Tensor(tensor).copy_(host, /*non_blocking=*/true);
  }
  return true;
}

void Guard::take(const c10::function_ref<Tensor(const Tensor&)>& step, bool with_gradients) {
  auto* own = divides_within_step(*optimizer_);
  expect(own == nullptr || !Access::core(*own).step_in_backward, "Guard", "optimizer",
         "one without step_in_backward, which steps before the guard can judge", "one with it");
  if (review()) {
    core_->drop();
    return;
  }
  const Tensor bad = core_->judge(with_gradients ? gradients_of(*optimizer_) : std::vector<Tensor>());
  if (core_->is_copy_due() && bad.item<float>() == 0) copy();
  core_->record(step(bad));
}

void Guard::step(const Tensor& loss) {
  if (loss.defined()) core_->watch(loss);
  take(
      [&](const Tensor& bad) {
        auto* own = divides_within_step(*optimizer_);
        const bool sums = own != nullptr && Access::core(*own).has_sums();
        return scaled_step(*optimizer_, sums ? at::ones_like(bad) : Tensor(), bad);
      },
      /*with_gradients=*/true);
}

void Guard::step(GradScaler& scaler, const Tensor& loss) {
  if (loss.defined()) core_->watch(loss);
  take(
      [&](const Tensor& bad) {
        scaler.step(*optimizer_, bad);
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
