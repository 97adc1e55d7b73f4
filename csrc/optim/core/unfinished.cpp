#include "optim/core/unfinished.h"

#include <algorithm>

#include <torch/csrc/autograd/engine.h>

#include "optim/core/core.h"

namespace shoestring::optim::detail {

bool Step::has_stepped() const {
  return done > 0 || std::any_of(calls.begin(), calls.end(), [](const OperatorCall& call) {
           return call.arena->next_param > 0 ||
                  (call.arena->offloaded != nullptr && call.arena->offloaded->any_done());
         });
}

// ---- steps

UnfinishedStep::Versions UnfinishedStep::versions() const {
  Versions found;
  for (const auto& group : core_.optimizer->param_groups()) {
    for (const Tensor& p : group.params()) {
      const Tensor grad = core_.split_gradients != nullptr ? core_.split_gradients->part(p) : p.grad();
      found.emplace_back(grad, grad.defined() ? grad._version() : 0);
    }
  }
  return found;
}

void UnfinishedStep::keep(Step step) {
  gradients_ = versions();
  step_ = std::move(step);
}

std::optional<Step> UnfinishedStep::resume() {
  if (!step_) return std::nullopt;
  const auto same = [](const auto& a, const auto& b) {
    return a.first.is_same(b.first) && a.second == b.second;
  };
  const Versions now = versions();
  if (!std::equal(now.begin(), now.end(), gradients_.begin(), gradients_.end(), same)) end();
  return std::exchange(step_, std::nullopt);
}

void UnfinishedStep::end() {
  if (!step_) return;
  if (step_->is_whole()) {
    core_.finish_step(*std::exchange(step_, std::nullopt));
    return;
  }
  TORCH_CHECK(!step_->has_stepped(), core_.label,
              ": step: expected the gradients of the step that failed, which has stepped some parameters, "
              "received others. Load the weights and the optimizer's state of a checkpoint.");
  for (const OperatorCall& call : step_->calls) {
    if (call.arena->offloaded != nullptr) call.arena->offloaded->discard();
    call.arena->stepped = Tensor();
    call.arena->has_fetched = false;
    if (call.arena->host != nullptr) call.arena->host->collect(0, std::ssize(call.arena->params));
  }
  step_.reset();
  core_.drop_sums();
}

void UnfinishedStep::end_unless_partial() {
  if (step_ && (step_->is_whole() || !step_->has_stepped())) end();
}

void UnfinishedStep::settle(const char* what) {
  if (!step_) return;
  if (step_->is_whole()) return end();
  TORCH_CHECK(!step_->has_stepped(), core_.label, ": ", what,
              ": expected a whole step, received one that failed after it had stepped "
              "some parameters. Call step() again with its gradients, or load a checkpoint.");
}

void UnfinishedStep::check_whole(const char* what) const {
  TORCH_CHECK(broken != Broken::kWeights, core_.label, ": ", what,
              ": expected a whole step before, received one that failed after it had stepped some "
              "parameters. Load the weights and the optimizer's state of a checkpoint.");
  TORCH_CHECK(broken != Broken::kSums, core_.label, ": ", what,
              ": expected whole sums of gradients, received those of a step that failed. Call zero_grad() to "
              "drop them, and begin with the first micro-batch of the step.");
}

void UnfinishedStep::forget() {
  broken = Broken::kNone;
  step_.reset();
}

// ---- backward

// Detects the end of a backward pass. After success, the autograd engine calls a callback, which calls
// close(). After a failure, the engine only destroys this object.
class Backwards::End {
 public:
  End(std::shared_ptr<Backwards> backwards, int task, std::function<void()> after_failure)
      : backwards_(std::move(backwards)), task_(task), after_failure_(std::move(after_failure)) {}
  ~End() {
    if (close(/*failed=*/true)) after_failure_();
  }
  End(const End&) = delete;
  End& operator=(const End&) = delete;

  bool close(bool failed) {
    const std::lock_guard lock(backwards_->mutex_);
    const bool was_open = backwards_->open_.erase(task_) > 0;
    backwards_->failed_ |= was_open && failed;
    return was_open;
  }

 private:
  const std::shared_ptr<Backwards> backwards_;
  const int task_;
  const std::function<void()> after_failure_;
};

bool Backwards::any() const {
  const std::lock_guard lock(mutex_);
  return !open_.empty();
}

bool Backwards::has(int task) const {
  const std::lock_guard lock(mutex_);
  return open_.count(task) > 0;
}

void Backwards::begin(int task, std::function<void()> after_failure) {
  {
    const std::lock_guard lock(mutex_);
    open_.insert(task);
  }
  const auto end = std::make_shared<End>(shared_from_this(), task, std::move(after_failure));
  torch::autograd::Engine::get_default_engine().queue_callback([end] { end->close(/*failed=*/false); });
}

bool Backwards::take_failure() {
  const std::lock_guard lock(mutex_);
  return std::exchange(failed_, false);
}

void Backwards::forget_running() {
  const std::lock_guard lock(mutex_);
  open_.clear();
}

}  // namespace shoestring::optim::detail
