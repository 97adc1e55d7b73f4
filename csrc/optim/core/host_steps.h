#pragma once

#include <cstddef>
#include <memory>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "offload/copy_lane.h"
#include "optim/core/gradient_sums.h"
#include "optim/core/unfinished.h"

namespace shoestring::optim::detail {

/// Optimizer steps on the CPU for parameters on another device, such as a GPU. Gradients are copied to host
/// memory and weights are copied back, while the device computes.
class HostSteps {
 public:
  explicit HostSteps(Core& core) : core_(core) {}

  // ---- a step of all parameters

  /// Copies the gradients of an arena's parameters to host memory, waits for the copies and returns them.
  std::vector<Tensor> fetch(Arena& arena, std::vector<Tensor> grads);
  /// Steps an arena. Starts the copies of all gradients to the host before it waits for the first copy.
  /// Weights are copied back while later buckets are stepped.
  void step(const OperatorCall& call, const StepFactors& factors);

  // ---- within backward

  /// Called when backward has completed a parameter's gradient. Copies the gradient to the host, and frees it
  /// after the copy.
  void arrive(const Tensor& param);
  /// Starts the jobs of all buckets that have received a gradient, even if gradients of other parameters in
  /// the bucket are missing.
  void send_jobs();
  /// Waits until the worker thread has processed all received gradients. Work that is later submitted to the
  /// device sees the new weights.
  void drain() {
    if (!jobs_.empty()) finish_jobs();
  }
  /// Drops the gradients that a failed backward pass has delivered to incomplete buckets, and waits for the
  /// jobs.
  void drop_incomplete();
  /// Forgets the buckets, which are parts of the arenas.
  void drop_buckets();

  // ---- gradients in host memory that wait for clipping, which needs the norm of all gradients first

  bool has(const Tensor& param) const { return kept_.count(param.unsafeGetTensorImpl()) > 0; }
  bool has_any() const { return !kept_.empty(); }
  /// Returns their norms, by the address of the gradient's data.
  const std::unordered_map<const void*, Tensor>& norms() const { return norms_; }
  void forget_gradients();
  void follow(const std::unordered_map<Key, Tensor>& replaced) { detail::follow(kept_, replaced); }

 private:
  // Consecutive parameters of an arena that the CPU steps together.
  struct Bucket {
    size_t group;
    Arena* arena;
    size_t first, last;
    // Indices of parameters whose gradient is being copied to the host.
    std::set<size_t> arrived{};
    // Indices of parameters whose gradient in this step has been passed to a job of the worker thread.
    std::set<size_t> given{};
    // Whether the bucket's job steps the parameters, or only accumulates or keeps gradients.
    bool steps = false;
    offload::FencePtr job{};
    struct Result {
      size_t index;
      Tensor grad, norm;
      bool is_sum;
    };
    std::vector<Result> results{};  // gradients that the bucket's job has kept for clipping
  };

  static std::vector<Bucket> buckets(size_t group, Arena& arena);
  void step_bucket(const Bucket& bucket, const std::vector<Tensor>& grads, bool summed,
                   const StepFactors& factors);
  void find_buckets();
  void send_job(Bucket& bucket);
  void finish_jobs();

  Core& core_;
  std::vector<std::unique_ptr<Bucket>> buckets_;
  // For each parameter: its bucket, and its index in the bucket's arena.
  std::unordered_map<Key, std::pair<Bucket*, size_t>> bucket_of_;
  // Buckets whose gradients are being copied to the host, or whose job is running.
  std::vector<Bucket*> jobs_;
  std::unordered_map<Key, Tensor> kept_;
  std::unordered_map<const void*, Tensor> norms_;
  // Declared last, so that the worker thread ends before the members that it uses are destroyed.
  std::unique_ptr<offload::CopyLane> worker_;
};

}  // namespace shoestring::optim::detail
