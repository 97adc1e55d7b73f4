#pragma once

// The implementation of LowMemoryOptimizer: steps (base.cpp), gradients before a step (gradients.cpp), and
// steps on the CPU (host.cpp).

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "optim/arena.h"

namespace shoestring::optim::detail {

/// The arenas of a parameter group, and the group's parameters that have no state yet.
struct Layout {
  std::vector<Arena> arenas;
  std::vector<Tensor> absent;
};

/// LibTorch's key of a parameter's state: the address of its TensorImpl.
using Key = c10::TensorImpl*;

inline std::optional<Tensor> some(const Tensor& t) {
  return t.defined() ? std::optional<Tensor>(t) : std::nullopt;
}

/// The backward passes, by id of their graph task, in which a hook has taken a gradient.
struct Backwards {
  std::mutex mutex;
  std::set<int> open;
  bool failed = false;
};

struct Core : std::enable_shared_from_this<Core> {
  explicit Core(LowMemoryOptimizer& optimizer) : optimizer(&optimizer) {}

  // ---- steps

  LowMemoryOptimizer* optimizer;               // the owner; updated when the owner is moved
  std::unordered_map<size_t, Layout> layouts;  // key: index of the parameter group

  const char* name() const;  // returns the name of the optimizer's class
  const LowMemoryOptions& options(size_t group) const;
  const Rule& rule(size_t group) const { return Access::rule(options(group)); }
  const ParamState* state(const Tensor& param) const;
  /// Returns the arenas of a group. They cover all parameters that have state or a gradient, or can get one
  /// in backward.
  Layout& layout(size_t group);
  Tensor step();
  Tensor scaled_step(const Tensor& scale, const Tensor& skip);
  void step_arena(size_t group, Arena& arena, const std::vector<Tensor>& grads, const Tensor& accumulated,
                  const Tensor& clip_coef);

  std::string offload;  // place of the state (see set_offload); "" for the parameters' device
  bool on_cpu() const { return offload == "cpu"; }
  bool streams() const { return !offload.empty() && !on_cpu(); }
  /// Returns the offload that all arenas of a device share; null without offload.
  c10::intrusive_ptr<offload::Offload> offload_of(at::Device device);
  void set_offload(const std::string& where);
  /// Reserves disk space for the state of all trainable parameters, in the groups from `first` on.
  void reserve(size_t first);
  /// Waits until all stepped state has been written back to host memory or to the file.
  void bring_back();
  /// Waits like bring_back(), before state is read or saved. Raises if a failed step has stepped some of the
  /// parameters.
  void settle();
  /// Drops the remains of a failed step or backward pass if it has not stepped any parameter. Called by
  /// zero_grad.
  void discard();

  // ---- gradients

  std::optional<double> max_grad_norm;
  Tensor grad_norm;
  bool step_in_backward = false, accumulating = false;
  at::ScalarType accumulate_dtype = at::kFloat;

  /// Installs hooks on parameters, for settings that take gradients away from grad().
  void watch(const std::vector<Tensor>& params);
  void on_gradient(const Tensor& param);
  /// Drops everything that belongs to the old state. Called after a load.
  void forget();

  // ---- steps by the CPU (host.cpp)

  void flush();
  void drain();
  /// Raises if the last step is unfinished. Called before gradients are accumulated.
  void begin_sums();

 private:
  // The parameters of a group that have the same kind.
  struct Members {
    Kind kind;
    std::vector<Tensor> params;
    std::vector<int64_t> numbers;
  };
  // One call of the operator: an arena, the gradients of its parameters, and the sums that the step adds to
  // them.
  struct Call {
    size_t group;
    Arena* arena;
    std::vector<Tensor> grads;
    Tensor accumulated;
  };
  // The arena of a single parameter, for a step within backward.
  struct Alone {
    size_t group;
    Arena arena;
  };

  // Consecutive parameters of an arena that the CPU steps together.
  struct Bucket {
    size_t group;
    Arena* arena;
    size_t first, last;
    // Indices of parameters whose gradient is being copied to the host.
    std::set<size_t> arrived{};
    // Indices of parameters whose gradient of this step has been handed to a job.
    std::set<size_t> given{};
    bool steps = false;  // whether the bucket's job takes a step
    offload::FencePtr job{};
    struct Result {
      size_t index;
      Tensor grad, norm;
      bool is_sum;
    };
    std::vector<Result> results{};  // results of the bucket's job
  };

  using Versions = std::vector<std::pair<Tensor, uint32_t>>;  // each gradient with its version counter

  void step_values(size_t group, const Arena& arena, const std::vector<Tensor>& grads,
                   const Tensor& accumulated, const Tensor& clip_coef);
  // A step that is in progress or has failed.
  struct Unfinished {
    std::vector<Call> calls;
    size_t done;  // number of calls that have finished
    Tensor coefficient, grad_scale, found_inf;
    Versions gradients;
  };
  // The part of the state that an error has left incomplete, apart from an unfinished step.
  enum class Broken { kNone, kSums, kWeights };

  std::vector<Members> members(size_t group, c10::function_ref<bool(const Tensor&)> belongs) const;
  void check_process() const;
  Versions versions() const;
  Unfinished begin_step();
  Tensor finish_step(Unfinished step);
  bool is_resumed() const;
  bool has_stepped(const Unfinished& step) const;
  void abandon();
  void begin_backward();
  void end_backward();
  void check_whole(const char* what) const;
  void drop_all_sums();
  bool has_gradient(const Tensor& param) const;
  bool is_pending(const Tensor& param) const { return pending_.count(param.unsafeGetTensorImpl()) > 0; }
  bool any_pending(const Arena& arena) const;
  void add(const Tensor& param);
  std::vector<Tensor> into_arena(Arena& arena);
  void gather(Call& call);
  void find_inf(const std::vector<Call>& calls);
  void drop_sums();
  static std::vector<Tensor> gradients_of(const std::vector<Call>& calls);
  Tensor clip(const std::vector<Call>& calls);
  static std::vector<Bucket> buckets(size_t group, Arena& arena);
  std::vector<Tensor> on_host(Arena& arena, std::vector<Tensor> grads);
  void step_on_host(size_t group, Arena& arena, std::vector<Tensor> grads, const Tensor& accumulated,
                    const Tensor& clip_coef);
  void step_bucket(const Bucket& bucket, const std::vector<Tensor>& grads, bool summed,
                   const Tensor& clip_coef);
  void arrive(const Tensor& param);
  void find_buckets();
  void drop_buckets();
  void send_job(Bucket& bucket);
  void send_jobs();
  void step_alone(const Tensor& param);
  void find_alone();
  void finish_backward();

  std::map<at::Device, c10::intrusive_ptr<offload::Offload>, bool (*)(at::Device, at::Device)> offloads_{
      [](at::Device a, at::Device b) { return a.str() < b.str(); }};
  std::optional<Unfinished> unfinished_;
  Broken broken_ = Broken::kNone;
  bool stepped_in_backward_ = false;  // whether the last backward has stepped any parameter
  const std::shared_ptr<Backwards> backwards_ = std::make_shared<Backwards>();
  // Set while scaled_step() runs. found_inf_ tells the operator to skip the step.
  Tensor grad_scale_, found_inf_;
  // Sums of gradients; views into arenas, once the arenas exist.
  std::unordered_map<Key, Tensor> sums_;
  // Parameters whose sum is not empty.
  std::unordered_set<Key> pending_;
  // Sums that replace gradients in this step, and must be cleared after it.
  std::vector<Tensor> used_;
  std::unordered_set<Key> watched_;
  // For steps within backward: the state of each parameter.
  std::unordered_map<Key, Alone> alone_;
  // Norms of gradients that have been freed.
  std::vector<Tensor> norms_;
  // Guards the hooks, since backward runs one thread per device.
  std::mutex mutex_;
  std::vector<std::unique_ptr<Bucket>> buckets_;
  // The bucket of a parameter, and the parameter's index in the arena.
  std::unordered_map<Key, std::pair<Bucket*, size_t>> bucket_of_;
  // Buckets with gradients being copied, or with a running job.
  std::vector<Bucket*> jobs_;
  // Gradients in host memory that wait for the norm of all gradients.
  std::unordered_map<Key, Tensor> collected_;
  // Norms of the collected gradients, by their address.
  std::unordered_map<const void*, Tensor> known_norms_;
  // Declared last, so that the worker thread ends before the members that it uses.
  std::unique_ptr<offload::CopyLane> worker_;
};

}  // namespace shoestring::optim::detail
