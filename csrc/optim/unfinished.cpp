// An optimizer step or a backward pass that failed leaves work undone; this file finishes or drops that work.

#include <algorithm>
#include <functional>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "offload/first_error.h"
#include "optim/core.h"

namespace shoestring::optim::detail {

void Core::check_process() const {
  for (const auto& [device, offload] : offloads_) offload->check();
}

// ---- steps

Core::Unfinished Core::begin_step() {
  // Waits for pending writes of offloaded state, so that a failed step can drop its chunks of state.
  if (step_in_backward) bring_back();
  Unfinished step{{}, 0, {}, {}, {}, {}};
  if (split_gradients != nullptr) {
    // The last backward may have left out parameters of which accumulate() has summed up gradients.
    for (const auto& group : optimizer->param_groups()) {
      for (const Tensor& p : group.params()) {
        if (!is_pending(p)) continue;
        take_sum(p);
        split_gradient(p);
      }
    }
    if (split_gradients->any()) split_gradients->finish();
  }
  for (size_t g = 0; g < optimizer->param_groups().size(); ++g) {
    const auto& params = optimizer->param_groups()[g].params();
    if (std::none_of(params.begin(), params.end(), [&](const Tensor& p) { return has_gradient(p); }))
      continue;
    for (Arena& arena : layout(g).arenas) step.calls.push_back({g, &arena, {}, {}});
  }
  try {
    for (Call& call : step.calls) gather(call);
    find_inf(step.calls);
    step.coefficient = clip(step.calls);
  } catch (...) {
    // After the error, some accumulated gradients may already include the gradient of the last micro-batch.
    if (!used_.empty()) broken_ = Broken::kSums;
    throw;
  }
  step.grad_scale = grad_scale_;
  step.found_inf = found_inf_;
  return step;
}

// Executes the remaining operator calls of an optimizer step. After a scaled step, returns found_inf, which
// is not zero if the step was skipped.
Tensor Core::finish_step(Unfinished step) {
  const auto give_back = [this, scale = grad_scale_, skip = found_inf_](void*) {
    grad_scale_ = scale;
    found_inf_ = skip;
  };
  const std::unique_ptr<void, decltype(give_back)> guard(this, give_back);
  grad_scale_ = step.grad_scale;
  found_inf_ = step.found_inf;
  try {
    while (step.done < step.calls.size()) {
      const Call& call = step.calls[step.done];
      step_arena(call.group, *call.arena, call.grads, call.accumulated, step.coefficient);
      ++step.done;
      if (call.arena->offloaded != nullptr) call.arena->offloaded->finish();
    }
    bring_back();
  } catch (...) {
    step.gradients = versions();
    unfinished_ = std::move(step);
    throw;
  }
  for (const Call& call : step.calls) {
    if (call.arena->offloaded != nullptr) call.arena->commit();
  }
  drop_sums();
  std::vector<const Arena*> stepped;
  for (const Call& call : step.calls) stepped.push_back(call.arena);
  share_weights(stepped);
  return step.found_inf;
}

Core::Versions Core::versions() const {
  Versions found;
  for (const auto& group : optimizer->param_groups()) {
    for (const Tensor& p : group.params()) {
      const Tensor grad = split_gradients != nullptr ? split_gradients->part(p) : p.grad();
      found.emplace_back(grad, grad.defined() ? grad._version() : 0);
    }
  }
  return found;
}

bool Core::is_resumed() const {
  const auto same = [](const auto& a, const auto& b) {
    return a.first.is_same(b.first) && a.second == b.second;
  };
  const Versions now = versions(), &before = unfinished_->gradients;
  return std::equal(now.begin(), now.end(), before.begin(), before.end(), same);
}

bool Core::has_stepped(const Unfinished& step) const {
  return step.done > 0 || std::any_of(step.calls.begin(), step.calls.end(), [](const Call& call) {
           return call.arena->next_param > 0 ||
                  (call.arena->offloaded != nullptr && call.arena->offloaded->any_done());
         });
}

// Ends a failed step before another step begins. Completes the failed step if it has stepped all parameters,
// drops it if it has stepped none, and raises an error otherwise.
void Core::abandon() {
  if (!unfinished_) return;
  if (unfinished_->done == unfinished_->calls.size()) {
    finish_step(*std::exchange(unfinished_, std::nullopt));
    return;
  }
  TORCH_CHECK(!has_stepped(*unfinished_), label,
              ": step: expected the gradients of the step that failed, which has stepped some parameters, "
              "received others. "
              "Load the weights and the optimizer's state of a checkpoint.");
  for (const Call& call : unfinished_->calls) {
    if (call.arena->offloaded != nullptr) call.arena->offloaded->discard();
    call.arena->stepped = Tensor();
    call.arena->has_fetched = false;
    if (call.arena->host != nullptr) call.arena->host->collect(0, std::ssize(call.arena->params));
  }
  unfinished_.reset();
  drop_all_sums();
}

void Core::drop_all_sums() {
  for (auto& [key, sum] : sums_) sum.zero_();
  drop_sums();
}

// ---- backward

namespace {

// Detects the end of a backward pass. After success, the autograd engine calls a callback, which calls
// close(). After a failure, the engine only destroys this object.
class End {
 public:
  End(std::shared_ptr<Backwards> backwards, int task, std::function<void()> after_failure)
      : backwards_(std::move(backwards)), task_(task), after_failure_(std::move(after_failure)) {}
  ~End() {
    if (close(/*failed=*/true)) after_failure_();
  }
  End(const End&) = delete;
  End& operator=(const End&) = delete;

  bool close(bool failed) {
    const std::lock_guard lock(backwards_->mutex);
    const bool was_open = backwards_->open.erase(task_) > 0;
    backwards_->failed |= was_open && failed;
    return was_open;
  }

 private:
  const std::shared_ptr<Backwards> backwards_;
  const int task_;
  const std::function<void()> after_failure_;
};

}  // namespace

// The gradient hook calls this function for each gradient. The first call in a backward pass registers the
// pass. A backward pass can run within another one, for example in a checkpoint that recomputes.
void Core::begin_backward() {
  const int task = torch::autograd::get_current_graph_task_id();
  bool is_first = true;
  {
    const std::lock_guard lock(backwards_->mutex);
    if (backwards_->open.count(task) > 0) return;
    is_first = backwards_->open.empty();
  }
  if (is_first) {
    check_process();
    end_backward();
    check_whole("backward");
    abandon();
    stepped_in_backward_ = false;
  }
  if (task < 0) return;
  {
    const std::lock_guard lock(backwards_->mutex);
    backwards_->open.insert(task);
  }
  const auto end = std::make_shared<End>(backwards_, task, [core = weak_from_this()] {
    const auto alive = core.lock();
    if (alive == nullptr) return;
    const std::lock_guard lock(alive->mutex_);
    const at::NoGradGuard no_grad;
    // After the failed backward, the caller may load weights. Wait for all jobs now, since a later job would
    // step the loaded weights.
    alive->end_backward();
  });
  torch::autograd::Engine::get_default_engine().queue_callback([end] { end->close(/*failed=*/false); });
}

// Cleans up after a failed backward pass that has delivered only some of the gradients.
void Core::end_backward() {
  {
    const std::lock_guard lock(backwards_->mutex);
    if (!std::exchange(backwards_->failed, false)) return;
  }
  offload::FirstError ignored;  // the backward has already failed, so further errors are not reported
  std::vector<Bucket*> partial;
  for (Bucket* bucket : jobs_) {
    if (!std::exchange(bucket->arrived, {}).empty()) partial.push_back(bucket);
  }
  ignored.guard([&] { drain(); });
  for (Bucket* bucket : partial) {
    ignored.guard([&] {
      bucket->arena->host->collect(static_cast<int64_t>(bucket->first), static_cast<int64_t>(bucket->last));
    });
  }
  norms_.clear();
  if (stepped_in_backward_) {
    broken_ = Broken::kWeights;
  } else if (!pending_.empty() || !used_.empty()) {
    broken_ = Broken::kSums;
  } else {
    drop_sums();
  }
}

void Core::check_whole(const char* what) const {
  TORCH_CHECK(broken_ != Broken::kWeights, label, ": ", what,
              ": expected a whole step before, received one that failed after it had stepped some "
              "parameters. Load the "
              "weights and the optimizer's state of a checkpoint.");
  TORCH_CHECK(broken_ != Broken::kSums, label, ": ", what,
              ": expected whole sums of gradients, received those of a step that failed. Call zero_grad() to "
              "drop them, and "
              "begin with the first micro-batch of the step.");
}

void Core::begin_sums() {
  const std::lock_guard lock(mutex_);
  check_process();
  end_backward();
  check_whole("accumulate");
  abandon();
}

void Core::settle(const char* what) {
  const std::lock_guard lock(mutex_);
  end_backward();
  drain();
  TORCH_CHECK(!unfinished_ || unfinished_->done == unfinished_->calls.size() || !has_stepped(*unfinished_),
              label, ": ", what,
              ": expected a whole step, received one that failed after it had stepped "
              "some parameters. Call step() again with its gradients, or load a checkpoint.");
  if (unfinished_ && unfinished_->done == unfinished_->calls.size()) abandon();
  bring_back();
}

void Core::drop() {
  const std::lock_guard lock(mutex_);
  drain();
  drop_all_sums();
}

void Core::discard() {
  const std::lock_guard lock(mutex_);
  end_backward();
  if (unfinished_ && (unfinished_->done == unfinished_->calls.size() || !has_stepped(*unfinished_)))
    abandon();
  if (split_gradients != nullptr) split_gradients->clear();
  if (broken_ == Broken::kSums) {
    drop_all_sums();
    broken_ = Broken::kNone;
  }
  if (!step_in_backward || accumulating) return;
  // zero_grad() ends a backward pass without step(). Parameters that were stepped within backward stay
  // stepped. Gradients that were collected for clipping are dropped.
  drain();
  if (!collected_.empty()) drop_all_sums();
  bring_back();
  finish_backward();
}

}  // namespace shoestring::optim::detail
