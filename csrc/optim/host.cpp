// Optimizer steps on the CPU for parameters on another device, such as a GPU. Gradients are copied to host
// memory and weights are copied back, while the device computes.

#include <algorithm>

#include <ATen/Functions.h>

#include "offload/first_error.h"
#include "optim/core.h"
#include "optim/foreach_norm.h"

namespace shoestring::optim::detail {
namespace {

// Maximum bytes of parameters per bucket: enough for the full bandwidth of the link between host and device,
// and small enough for copies and steps to overlap.
constexpr size_t kBucketBytes = size_t{8} << 20;

}  // namespace

// Splits an arena's parameters into buckets. A parameter larger than a bucket gets a bucket of its own.
std::vector<Core::Bucket> Core::buckets(size_t group, Arena& arena) {
  std::vector<Bucket> found;
  size_t size = 0;
  for (size_t i = 0; i < arena.params.size(); ++i) {
    const size_t bytes = arena.params[i].nbytes();
    if (found.empty() || size + bytes > kBucketBytes) {
      found.push_back({group, &arena, i, i});
      size = 0;
    }
    found.back().last = i + 1;
    size += bytes;
  }
  return found;
}

// ---- A step of all parameters

// Copies the gradients of an arena's parameters to host memory and waits for the copies.
std::vector<Tensor> Core::on_host(Arena& arena, std::vector<Tensor> grads) {
  for (size_t i = 0; i < grads.size(); ++i) {
    if (has_gradient(arena.params[i]))
      arena.host->fetch(static_cast<int64_t>(i), arena.params[i], some(grads[i]));
  }
  const auto fetched = arena.host->collect(0, std::ssize(grads));
  arena.has_fetched = true;
  for (size_t i = 0; i < grads.size(); ++i) {
    const auto kept = collected_.find(arena.params[i].unsafeGetTensorImpl());
    // If grad() is undefined, a gradient in host memory is left over from a failed step and must not be used.
    const bool has = grads[i].defined();
    grads[i] = kept != collected_.end() ? kept->second : has ? fetched[i].value_or(Tensor()) : Tensor();
  }
  return grads;
}

// Steps an arena on the CPU. Starts the copies of all gradients to the host before it waits for the first
// copy. Weights are copied back while later buckets are stepped.
void Core::step_on_host(size_t group, Arena& arena, std::vector<Tensor> grads, const Tensor& accumulated,
                        const Tensor& clip_coef) {
  for (size_t i = arena.next_param; i < grads.size() && !arena.has_fetched; ++i) {
    if (grads[i].defined()) arena.host->fetch(static_cast<int64_t>(i), arena.params[i], grads[i]);
  }
  for (const Bucket& bucket : buckets(group, arena)) {
    if (bucket.first < arena.next_param) continue;
    const auto fetched =
        arena.host->collect(static_cast<int64_t>(bucket.first), static_cast<int64_t>(bucket.last));
    for (size_t i = 0; i < fetched.size() && !arena.has_fetched; ++i) {
      Tensor& grad = grads[bucket.first + i];
      if (grad.defined()) grad = fetched[i].value_or(Tensor());
    }
    const auto begin = grads.begin();
    step_bucket(bucket,
                {begin + static_cast<int64_t>(bucket.first), begin + static_cast<int64_t>(bucket.last)},
                accumulated.defined(), clip_coef);
    arena.next_param = bucket.last;
  }
  arena.has_fetched = false;
  arena.next_param = 0;
  arena.host->receive();
}

// Steps a bucket whose gradients are in host memory.
void Core::step_bucket(const Bucket& bucket, const std::vector<Tensor>& grads, bool summed,
                       const Tensor& clip_coef) {
  const Arena piece = bucket.arena->run(rule(bucket.group), bucket.first, bucket.last);
  step_values(bucket.group, piece, grads, summed ? piece.accumulated : Tensor(), clip_coef);
  std::vector<int64_t> stepped;
  std::vector<Tensor> params;
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!grads[i].defined()) continue;
    stepped.push_back(static_cast<int64_t>(bucket.first + i));
    params.push_back(piece.params[i]);
  }
  bucket.arena->host->send(stepped, params);
}

// ---- within backward

// Called when backward has completed a parameter's gradient. Copies the gradient to the host, and frees it
// after the copy.
void Core::arrive(const Tensor& param) {
  const Key key = param.unsafeGetTensorImpl();
  auto found = bucket_of_.find(key);
  if (found == bucket_of_.end() || (accumulating && !found->second.first->arena->accumulated.defined())) {
    find_buckets();
    found = bucket_of_.find(key);
  }
  auto& [bucket, index] = found->second;
  Access::check_step(options(bucket->group));
  const bool here = bucket->arrived.count(index) > 0;
  check_first(bucket->given.count(index) == 0 && (!here || accumulating));
  // Within the same accumulate(), a second gradient of a parameter arrives: process the first one now.
  if (here) send_job(*bucket);
  if (bucket->job != nullptr) bucket->job->synchronize();
  bucket->arena->host->fetch(static_cast<int64_t>(index), param, param.grad());
  param.mutable_grad() = Tensor();
  if (bucket->arrived.empty()) jobs_.push_back(bucket);
  bucket->arrived.insert(index);
  if (accumulating) pending_.insert(key);
  bool complete = true;
  for (size_t i = bucket->first; i < bucket->last; ++i) {
    complete &= bucket->arrived.count(i) > 0 || !bucket->arena->params[i].requires_grad();
  }
  if (complete) send_job(*bucket);
}

void Core::find_buckets() {
  drain();
  drop_buckets();
  const size_t groups = optimizer->param_groups().size();
  for (size_t g = 0; g < groups; ++g) layout(g);
  for (size_t g = 0; g < groups; ++g) {
    for (Arena& arena : layout(g).arenas) {
      if (accumulating || any_pending(arena)) into_arena(arena);
      for (Bucket& bucket : buckets(g, arena)) {
        const auto& kept = buckets_.emplace_back(std::make_unique<Bucket>(std::move(bucket)));
        for (size_t i = kept->first; i < kept->last; ++i) {
          bucket_of_[arena.params[i].unsafeGetTensorImpl()] = {kept.get(), i};
        }
      }
    }
  }
}

void Core::drop_buckets() {
  bucket_of_.clear();
  buckets_.clear();
}

// Gives the worker thread a job that processes the gradients that the bucket has received. The job
// accumulates the gradients, keeps them for clipping, or steps the parameters. Jobs run in the order of the
// calls of send_job.
void Core::send_job(Bucket& bucket) {
  if (worker_ == nullptr) worker_ = std::make_unique<offload::CopyLane>(at::kCPU, /*threads=*/0);
  // The accumulated gradient of each parameter; undefined for a parameter that has none.
  std::vector<Tensor> sums(bucket.last - bucket.first);
  for (const size_t i : bucket.arrived) {
    const Key key = bucket.arena->params[i].unsafeGetTensorImpl();
    if (pending_.count(key) > 0) sums[i - bucket.first] = sums_.at(key);
    if (!accumulating) pending_.erase(key);
  }
  enum class Aim { kAdd, kKeep, kStep };
  const Aim aim = accumulating ? Aim::kAdd : max_grad_norm ? Aim::kKeep : Aim::kStep;
  if (!accumulating) bucket.given.insert(bucket.arrived.begin(), bucket.arrived.end());
  bucket.arrived.clear();
  bucket.steps = aim == Aim::kStep;
  stepped_in_backward_ |= bucket.steps;
  bucket.job = worker_->run({}, [this, &bucket, sums = std::move(sums), aim] {
    std::vector<Tensor> grads;
    const auto fetched =
        bucket.arena->host->collect(static_cast<int64_t>(bucket.first), static_cast<int64_t>(bucket.last));
    for (const auto& grad : fetched) grads.push_back(grad.value_or(Tensor()));
    if (aim == Aim::kStep) {
      const bool summed =
          std::any_of(sums.begin(), sums.end(), [](const Tensor& sum) { return sum.defined(); });
      return step_bucket(bucket, grads, summed, {});
    }
    for (size_t i = 0; i < grads.size(); ++i) {
      if (!grads[i].defined()) continue;
      const Tensor grad = sums[i].defined() ? sums[i].add_(grads[i]) : grads[i];
      if (aim == Aim::kKeep)
        bucket.results.push_back({bucket.first + i, grad, ops::foreach_norm({grad}), sums[i].defined()});
    }
  });
}

// Starts the jobs of all buckets that have received a gradient, even if gradients of other parameters in the
// bucket are missing.
void Core::send_jobs() {
  for (Bucket* bucket : jobs_) {
    if (!bucket->arrived.empty()) send_job(*bucket);
  }
}

void Core::flush() {
  const std::lock_guard lock(mutex_);
  send_jobs();
}

// Waits until the worker thread has processed all received gradients. Work that is later submitted to the
// device sees the new weights.
void Core::drain() {
  send_jobs();
  offload::FirstError error;
  bool any_stepped = false;
  for (Bucket* bucket : std::exchange(jobs_, {})) {
    error.guard([&, job = std::exchange(bucket->job, nullptr)] {
      if (job != nullptr) job->synchronize();
      any_stepped |= job != nullptr && bucket->steps;
      bucket->arena->host->receive();
    });
    bucket->given.clear();
    for (auto& [index, grad, norm, is_sum] : std::exchange(bucket->results, {})) {
      if (is_sum) used_.push_back(grad);
      known_norms_[grad.const_data_ptr()] = norm;
      collected_[bucket->arena->params[index].unsafeGetTensorImpl()] = grad;
    }
  }
  if (error && any_stepped) broken_ = Broken::kWeights;
  if (error && broken_ == Broken::kNone) {
    if (sums_.empty()) {
      drop_sums();
    } else {
      broken_ = Broken::kSums;
    }
  }
  error.rethrow();
}

}  // namespace shoestring::optim::detail
