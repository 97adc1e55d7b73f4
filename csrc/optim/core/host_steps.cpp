#include "optim/core/host_steps.h"

#include <algorithm>

#include <ATen/Functions.h>

#include "offload/first_error.h"
#include "optim/core/core.h"
#include "optim/core/foreach_norm.h"

namespace shoestring::optim::detail {
namespace {

// Maximum bytes of parameters per bucket: enough for the full bandwidth of the link between host and device,
// and small enough for copies and steps to overlap.
constexpr size_t kBucketBytes = size_t{8} << 20;

}  // namespace

// Splits an arena's parameters into buckets. A parameter larger than a bucket gets a bucket of its own.
std::vector<HostSteps::Bucket> HostSteps::buckets(size_t group, Arena& arena) {
  std::vector<Bucket> result;
  size_t size = 0;
  for (size_t i = 0; i < arena.params.size(); ++i) {
    const size_t bytes = arena.params[i].nbytes();
    if (result.empty() || size + bytes > kBucketBytes) {
      result.push_back({group, &arena, i, i});
      size = 0;
    }
    result.back().last = i + 1;
    size += bytes;
  }
  return result;
}

// ---- A step of all parameters

std::vector<Tensor> HostSteps::fetch(Arena& arena, std::vector<Tensor> grads) {
  for (size_t i = 0; i < grads.size(); ++i) {
    if (core_.has_gradient(arena.params[i]))
      arena.host->fetch(static_cast<int64_t>(i), arena.params[i], some(grads[i]));
  }
  const auto fetched = arena.host->collect(0, std::ssize(grads));
  arena.has_fetched = true;
  for (size_t i = 0; i < grads.size(); ++i) {
    const auto collected = kept_.find(arena.params[i].unsafeGetTensorImpl());
    // If grad() is undefined, a gradient in host memory is left over from a failed step and must not be used.
    const bool has = grads[i].defined();
    grads[i] = collected != kept_.end() ? collected->second : has ? fetched[i].value_or(Tensor()) : Tensor();
  }
  return grads;
}

void HostSteps::step(const OperatorCall& call, const StepFactors& factors) {
  Arena& arena = *call.arena;
  std::vector<Tensor> grads = call.grads;
  for (size_t i = arena.next_param; i < grads.size() && !arena.has_fetched; ++i) {
    if (grads[i].defined()) arena.host->fetch(static_cast<int64_t>(i), arena.params[i], grads[i]);
  }
  for (const Bucket& bucket : buckets(call.group, arena)) {
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
                call.accumulated.defined(), factors);
    arena.next_param = bucket.last;
  }
  arena.has_fetched = false;
  arena.next_param = 0;
  arena.host->receive();
}

// Steps a bucket whose gradients are in host memory.
void HostSteps::step_bucket(const Bucket& bucket, const std::vector<Tensor>& grads, bool summed,
                            const StepFactors& factors) {
  const Arena piece = bucket.arena->run(core_.rule(bucket.group), bucket.first, bucket.last);
  core_.step_values(bucket.group, piece, grads, summed ? piece.accumulated : Tensor(), factors);
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

void HostSteps::arrive(const Tensor& param) {
  const Key key = param.unsafeGetTensorImpl();
  auto entry = bucket_of_.find(key);
  if (entry == bucket_of_.end() ||
      (core_.accumulating && !entry->second.first->arena->accumulated.defined())) {
    find_buckets();
    entry = bucket_of_.find(key);
  }
  auto& [bucket, index] = entry->second;
  Access::check_step(core_.options(bucket->group));
  const bool here = bucket->arrived.count(index) > 0;
  core_.check_first(bucket->given.count(index) == 0 && (!here || core_.accumulating));
  // Within the same accumulate(), a second gradient of a parameter arrives: process the first one now.
  if (here) send_job(*bucket);
  if (bucket->job != nullptr) bucket->job->synchronize();
  bucket->arena->host->fetch(static_cast<int64_t>(index), param, param.grad());
  param.mutable_grad() = Tensor();
  if (bucket->arrived.empty()) jobs_.push_back(bucket);
  bucket->arrived.insert(index);
  if (core_.accumulating) core_.sums.note(param);
  bool complete = true;
  for (size_t i = bucket->first; i < bucket->last; ++i) {
    complete &= bucket->arrived.count(i) > 0 || !bucket->arena->params[i].requires_grad();
  }
  if (complete) send_job(*bucket);
}

void HostSteps::find_buckets() {
  drain();
  drop_buckets();
  const size_t groups = core_.optimizer->param_groups().size();
  for (size_t g = 0; g < groups; ++g) core_.layout(g);
  for (size_t g = 0; g < groups; ++g) {
    for (Arena& arena : core_.layout(g).arenas) {
      if (core_.accumulating || core_.sums.any_in(arena)) core_.sums.into(arena);
      for (Bucket& bucket : buckets(g, arena)) {
        const auto& added = buckets_.emplace_back(std::make_unique<Bucket>(std::move(bucket)));
        for (size_t i = added->first; i < added->last; ++i) {
          bucket_of_[arena.params[i].unsafeGetTensorImpl()] = {added.get(), i};
        }
      }
    }
  }
}

void HostSteps::drop_buckets() {
  bucket_of_.clear();
  buckets_.clear();
}

// Gives the worker thread a job that processes the gradients that the bucket has received. The job
// accumulates the gradients, keeps them for clipping, or steps the parameters. Jobs run in the order of the
// calls of send_job.
void HostSteps::send_job(Bucket& bucket) {
  if (worker_ == nullptr) worker_ = std::make_unique<offload::CopyLane>(at::kCPU, /*threads=*/0);
  // The accumulated gradient of each parameter; undefined for a parameter that has none.
  std::vector<Tensor> sums(bucket.last - bucket.first);
  for (const size_t i : bucket.arrived) {
    const Tensor& param = bucket.arena->params[i];
    if (core_.sums.has(param)) sums[i - bucket.first] = core_.sums.of(param);
    if (!core_.accumulating) core_.sums.erase(param);
  }
  enum class Aim { kAdd, kKeep, kStep };
  const Aim aim = core_.accumulating ? Aim::kAdd : core_.clipping.max_norm ? Aim::kKeep : Aim::kStep;
  if (!core_.accumulating) bucket.given.insert(bucket.arrived.begin(), bucket.arrived.end());
  bucket.arrived.clear();
  bucket.steps = aim == Aim::kStep;
  core_.stepped_in_backward |= bucket.steps;
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

void HostSteps::send_jobs() {
  for (Bucket* bucket : jobs_) {
    if (!bucket->arrived.empty()) send_job(*bucket);
  }
}

void HostSteps::finish_jobs() {
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
      if (is_sum) core_.sums.use(grad);
      norms_[grad.const_data_ptr()] = norm;
      kept_[bucket->arena->params[index].unsafeGetTensorImpl()] = grad;
    }
  }
  Broken& broken = core_.unfinished.broken;
  if (error && any_stepped) broken = Broken::kWeights;
  if (error && broken == Broken::kNone) {
    if (core_.sums.is_allocated()) {
      broken = Broken::kSums;
    } else {
      core_.end_gradients();
    }
  }
  error.rethrow();
}

void HostSteps::drop_incomplete() {
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
}

void HostSteps::forget_gradients() {
  kept_.clear();
  norms_.clear();
}

}  // namespace shoestring::optim::detail
