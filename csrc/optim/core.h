#pragma once

// The implementation of LowMemoryOptimizer: steps (base.cpp), gradients before a step (gradients.cpp), steps
// on the CPU for parameters on a GPU (host.cpp), and failed steps (unfinished.cpp).

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

/// The key under which LibTorch stores a parameter's optimizer state: the address of the parameter's
/// TensorImpl.
using Key = c10::TensorImpl*;

inline std::optional<Tensor> some(const Tensor& t) {
  return t.defined() ? std::optional<Tensor>(t) : std::nullopt;
}

/// The ids (of autograd's graph tasks) of the unfinished backward passes in which a gradient hook of the
/// optimizer has run.
struct Backwards {
  std::mutex mutex;
  std::set<int> open;
  bool failed = false;
};

struct Core : std::enable_shared_from_this<Core> {
  explicit Core(LowMemoryOptimizer& optimizer);

  // ---- steps

  LowMemoryOptimizer* optimizer;  // the optimizer that owns this Core; updated when that optimizer is moved
  std::unordered_map<size_t, Layout> layouts;  // arenas, by the index of the parameter group

  const char* name() const;  // returns the name of the optimizer's class
  /// Keeps other threads from using the optimizer while the result lives.
  [[nodiscard]] std::unique_lock<std::recursive_mutex> lock() { return std::unique_lock(mutex_); }
  std::string label;  // the name of the optimizer in errors; Python sets the name of the Python class
  const LowMemoryOptions& options(size_t group) const;
  const Rule& rule(size_t group) const { return Access::rule(options(group)); }
  const ParamState* state(const Tensor& param) const;
  /// The state of a parameter that this process has: none for a parameter without state. `splits` says which
  /// tensors are parts, with which elements the tensor begins.
  struct OwnState {
    std::map<std::string, Tensor> tensors{};
    std::map<std::string, SplitTensor> splits{};
  };
  /// Returns the state of each parameter of a group.
  std::vector<OwnState> own_states(size_t group) const;
  /// Returns the names of the tensors in a parameter's state, in the order of the operator's arguments.
  std::vector<std::string> names_of_state(size_t group, const Tensor& param) const;
  /// Returns the arenas of a parameter group. The arenas cover all parameters that have state or a gradient,
  /// and all parameters that a hook may step in backward. `has_parts`: the state that state() has of them is
  /// that of own_states().
  Layout& layout(size_t group, bool has_parts = false);
  /// The number of times that arenas were allocated. The tensors in state() change with it.
  int64_t layouts_made = 0;
  /// Set if processes split the steps; see LowMemoryOptimizer::set_shard.
  std::optional<Ranks> ranks;
  using Parts = std::vector<std::vector<ParameterPart>>;
  GatherWeights gather_weights;
  std::shared_ptr<SplitGradients> split_gradients;  // null if each process has whole gradients
  void set_shard(Ranks all, GatherWeights gather, std::shared_ptr<SplitGradients> gradients);
  /// Gives the weights that processes have stepped in parts to all of them. Does nothing with whole steps.
  void share_weights(const std::vector<const Arena*>& arenas) const;
  /// Raises if processes split the steps. `what` is what needs an optimizer that takes whole steps.
  void expect_unsharded(const char* what) const;
  /// Raises if processes have split parameters of the groups from index `first` on, and a rule needs whole
  /// ones. Such a step communicates, so `option` cannot have the value `received`.
  void check_parts(size_t first, const char* option, const std::string& received) const;
  /// Raises if the options of a group allow no step.
  void check_step() const;
  Tensor step();
  /// Takes a step with gradients of a scaled loss; see LowMemoryOptimizer::scaled_step. is_checked: `skip`
  /// already says whether the gradients, without accumulated ones, are finite.
  Tensor scaled_step(const Tensor& scale, const Tensor& skip, bool is_checked = false);
  /// Replaces the parameters of a group by tensors with the same state, for example after a parameter has
  /// been moved to another tensor object.
  void replace_params(size_t group, const std::vector<Tensor>& params);
  void step_arena(size_t group, Arena& arena, const std::vector<Tensor>& grads, const Tensor& accumulated,
                  const Tensor& clip_coef);

  std::string offload;  // place of the optimizer state (see set_offload); "" for the parameters' device
  bool on_cpu() const { return offload == "cpu"; }
  bool streams() const { return !offload.empty() && !on_cpu(); }
  /// Returns the Offload object that all arenas with parameters on `device` share; null without offload.
  c10::intrusive_ptr<offload::Offload> offload_of(at::Device device);
  void set_offload(const std::string& where);
  /// Returns the bytes of host memory that offloading takes.
  int64_t host_bytes() const;
  /// Reserves disk space for the state of all trainable parameters in the parameter groups from index `first`
  /// on.
  void reserve(size_t first);
  /// Waits until all new optimizer state has been written back to host memory or to the file.
  void bring_back();
  /// Waits until all new optimizer state has been written back, before the state is read or saved. Raises if
  /// a failed step has stepped some of the parameters, but not all. `what` is the caller's name in the error.
  void settle(const char* what = "save");
  /// Drops the gradients that a failed step or backward pass has left, if it has not stepped any parameter.
  /// zero_grad calls this function.
  void discard();

  // ---- gradients

  std::optional<double> max_grad_norm;
  Tensor grad_norm;
  bool step_in_backward = false, accumulating = false;
  bool watches = false;  // whether hooks outside of the core call on_gradient
  // Whether watch() installs hooks. Python's optimizers have hooks of their own.
  bool installs_hooks = true;
  at::ScalarType accumulate_dtype = at::kFloat;

  /// Installs a post-accumulate-grad hook on each parameter. step_in_backward and accumulate() need the
  /// hooks, because they free grad() during backward.
  void watch(const std::vector<Tensor>& params);
  void on_gradient(const Tensor& param);
  /// Adds the accumulated gradient of a parameter, if there is any, to its gradient.
  void add_sum_to_gradient(const Tensor& param);
  bool has_sums() const { return !pending_.empty(); }
  /// Waits for work under way, and drops the accumulated gradients.
  void drop();
  /// Returns whether a step has failed and can be finished.
  bool is_unfinished() const { return unfinished_.has_value(); }
  /// Returns whether any parameter has a gradient, or an accumulated one.
  bool has_gradients() const;
  /// Raises if there are accumulated gradients, which GradScaler::unscale_ has not divided. `what` is the
  /// function that needs divided gradients.
  void expect_no_sums(const char* what) const;
  /// Selects whether accumulate() takes the norms of the gradients of its micro-batches, for GradientNoise.
  bool takes_norms = false;
  /// Returns the sum of the squared norms of all micro-batches' gradients since the last call, with those in
  /// grad(). The gradients of one micro-batch count as one vector.
  Tensor take_squares();
  /// Returns the squared norm of the gradients of the coming step: grad() with the accumulated gradients.
  Tensor whole_square();
  /// Drops arenas, accumulated gradients and unfinished steps, which belong to the old state. Called when a
  /// saved state is loaded.
  void forget();

  // ---- steps by the CPU (host.cpp)

  void flush();
  void drain();
  /// Raises if a step has failed after it had stepped some of the parameters, or if accumulated gradients are
  /// incomplete. accumulate() calls this function first.
  void begin_sums();

 private:
  // The parameters of a parameter group that have the same Kind (state format and devices), and the index of
  // each one among all parameters of the optimizer.
  struct Members {
    Kind kind;
    std::vector<Tensor> params;
    std::vector<int64_t> numbers;
  };
  // Gradients of this process, or their norms, by the Shard that they have in common.
  using ByShard = std::vector<std::pair<Shard, std::vector<Tensor>>>;
  // One call of the optimizer's operator: an arena, the gradients of the arena's parameters, and the
  // accumulated gradients that the operator adds to the gradients.
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

  // The gradients of all parameters, each with its version counter, to detect gradients that have changed
  // since a failed step.
  using Versions = std::vector<std::pair<Tensor, uint32_t>>;

  void step_values(size_t group, const Arena& arena, const std::vector<Tensor>& grads,
                   const Tensor& accumulated, const Tensor& clip_coef);
  // An optimizer step that is in progress, or that has failed.
  struct Unfinished {
    std::vector<Call> calls;
    size_t done;  // number of operator calls that have finished
    Tensor coefficient, grad_scale, found_inf;
    Versions gradients;
  };
  // The data that an error has left incomplete: none, the accumulated gradients, or the weights and the
  // optimizer state.
  enum class Broken { kNone, kSums, kWeights };

  std::vector<Members> members(size_t group, c10::function_ref<bool(const Tensor&)> belongs) const;
  Parts parts_of(const std::vector<const Arena*>& arenas) const;
  void split_gradient(const Tensor& param);
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
  void take_sum(const Tensor& param);
  std::vector<Tensor> into_arena(Arena& arena);
  void gather(Call& call);
  void find_inf(const std::vector<Call>& calls);
  void drop_sums();
  static std::vector<Tensor> gradients_of(const std::vector<Call>& calls);
  Tensor clip(const std::vector<Call>& calls);
  Shard shard_of(const Tensor& param) const;
  void add_norm(ByShard& norms, const Tensor& param, const Tensor& gradient) const;
  static std::vector<Tensor>& of_shard(ByShard& all, const Shard& shard);
  static Tensor norm_over(const ByShard& norms);
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
  void check_first(bool is_first);
  void find_alone();
  void finish_backward();

  std::map<at::Device, c10::intrusive_ptr<offload::Offload>, bool (*)(at::Device, at::Device)> offloads_{
      [](at::Device a, at::Device b) { return a.str() < b.str(); }};
  std::optional<Unfinished> unfinished_;
  Broken broken_ = Broken::kNone;
  bool stepped_in_backward_ = false;  // whether the last backward has stepped any parameter
  const std::shared_ptr<Backwards> backwards_ = std::make_shared<Backwards>();
  // Arguments of scaled_step(), set while it runs. If found_inf_ is not zero, the operators skip the step.
  Tensor grad_scale_, found_inf_;
  bool is_checked_ = false;
  bool knows_parts_ = false;  // whether split_gradients knows the parts of each process
  // The accumulated gradient of each parameter; a view into an arena, once the arena exists.
  std::unordered_map<Key, Tensor> sums_;
  // Parameters whose accumulated gradient contains at least one micro-batch.
  std::unordered_set<Key> pending_;
  // Accumulated gradients that are the gradients of the current step, and are set to zero after it.
  std::vector<Tensor> used_;
  std::unordered_set<Key> watched_;
  // The arena of each single parameter, for steps within backward.
  std::unordered_map<Key, Alone> alone_;
  // Parameters that the backward passes since the last step() have stepped.
  std::unordered_set<Key> stepped_alone_;
  // Norms of the gradients that steps within backward have freed.
  ByShard norms_;
  // Norms of the gradients of micro-batches, if takes_norms is set.
  ByShard micro_norms_;
  // Serialises the gradient hooks, since backward runs one thread per device, and the calls of several
  // threads. Recursive, because a hook may run while its thread holds it.
  std::recursive_mutex mutex_;
  std::vector<std::unique_ptr<Bucket>> buckets_;
  // For each parameter: its bucket, and its index in the bucket's arena.
  std::unordered_map<Key, std::pair<Bucket*, size_t>> bucket_of_;
  // Buckets whose gradients are being copied to the host, or whose job is running.
  std::vector<Bucket*> jobs_;
  // Gradients in host memory that are applied later, because clipping needs the norm of all gradients first.
  std::unordered_map<Key, Tensor> collected_;
  // Norms of the gradients that wait in host memory for clipping, by the address of the gradient's data.
  std::unordered_map<const void*, Tensor> known_norms_;
  // Declared last, so that the worker thread ends before the members that it uses are destroyed.
  std::unique_ptr<offload::CopyLane> worker_;
};

/// Gives an optimizer, for as long as this object lives, the state that one process would have, if processes
/// have split it. All of them must make such an object.
class WholeState {
 public:
  explicit WholeState(Core& core);
  ~WholeState();
  WholeState(const WholeState&) = delete;
  WholeState& operator=(const WholeState&) = delete;

 private:
  Core& core_;
  std::optional<std::decay_t<decltype(core_.optimizer->state())>> own_;
};

}  // namespace shoestring::optim::detail
