#pragma once

// The implementation of LowMemoryOptimizer: the state of the parameters (layout.cpp), steps (step.cpp) and
// gradients within backward (backward.cpp). Classes of their own hold sums over micro-batches
// (gradient_sums.h), norms (clipping.h), steps by the CPU (host_steps.h) and what errors leave
// (unfinished.h).

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "optim/core/clipping.h"
#include "optim/core/gradient_sums.h"
#include "optim/core/host_steps.h"
#include "optim/core/unfinished.h"

namespace shoestring::optim::detail {

/// The arenas of a parameter group, and the group's parameters that have no state yet.
struct Layout {
  std::vector<Arena> arenas;
  std::vector<Tensor> absent;
};

inline std::optional<Tensor> some(const Tensor& t) {
  return t.defined() ? std::optional<Tensor>(t) : std::nullopt;
}

struct Core : std::enable_shared_from_this<Core> {
  explicit Core(LowMemoryOptimizer& optimizer);

  LowMemoryOptimizer* optimizer;  // the optimizer that owns this Core; updated when that optimizer is moved
  std::string label;  // the name of the optimizer in errors; Python sets the name of the Python class

  const char* name() const;  // returns the name of the optimizer's class
  /// Keeps other threads from using the optimizer while the result lives.
  [[nodiscard]] std::unique_lock<std::recursive_mutex> lock() { return std::unique_lock(mutex_); }
  const LowMemoryOptions& options(size_t group) const;
  const Rule& rule(size_t group) const { return Access::rule(options(group)); }

  // ---- the state of the parameters (layout.cpp)

  std::unordered_map<size_t, Layout> layouts;  // arenas, by the index of the parameter group
  /// The number of times that arenas were allocated. The tensors in state() change with it.
  int64_t layouts_made = 0;

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
  /// Replaces the parameters of a group by tensors with the same state, for example after a parameter has
  /// been moved to another tensor object.
  void replace_params(size_t group, const std::vector<Tensor>& params);
  /// Drops arenas, accumulated gradients and unfinished steps, which belong to the old state. Called when a
  /// saved state is loaded.
  void forget();

  // ---- processes that split the steps (layout.cpp)

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

  // ---- state away from the parameters' device (layout.cpp)

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

  // ---- steps (step.cpp)

  /// Raises if the options of a group allow no step.
  void check_step() const;
  /// Takes a step. With factors of a scaled loss, returns found_inf, which is not zero if the step was
  /// skipped. is_checked: found_inf already says whether the gradients, without accumulated ones, are finite.
  Tensor step(StepFactors factors = {}, bool is_checked = false);
  /// Takes a step with gradients of a scaled loss; see LowMemoryOptimizer::scaled_step.
  Tensor scaled_step(const Tensor& scale, const Tensor& skip, bool is_checked = false);
  /// Executes the remaining operator calls of a step. Returns its found_inf.
  Tensor finish_step(Step step);
  /// Calls the operator for an arena in this process's memory.
  void step_values(size_t group, const Arena& arena, const std::vector<Tensor>& grads,
                   const Tensor& accumulated, const StepFactors& factors) const;
  /// Waits until all new optimizer state has been written back, before the state is read or saved. Raises if
  /// a failed step has stepped some of the parameters, but not all. `what` is the caller's name in the error.
  void settle(const char* what = "save");
  /// Drops the gradients that a failed step or backward pass has left, if it has not stepped any parameter.
  /// zero_grad calls this function.
  void discard();
  /// Returns whether any parameter has a gradient, or an accumulated one; whether `param` has one.
  bool has_gradients() const;
  bool has_gradient(const Tensor& param) const;
  /// Ends the use of a step's gradients: sets the sums among them to zero, and frees what is in host memory.
  void end_gradients();

  Clipping clipping;
  GradientSums sums;
  UnfinishedStep unfinished{*this};

  // ---- sums over micro-batches (backward.cpp)

  bool accumulating = false;
  /// Raises if a step has failed after it had stepped some of the parameters, or if accumulated gradients are
  /// incomplete. accumulate() calls this function first.
  void begin_sums();
  /// Adds the accumulated gradient of a parameter, if there is any, to its gradient.
  void add_sum_to_gradient(const Tensor& param);
  /// Waits for work under way, and drops the accumulated gradients.
  void drop();
  void drop_sums();
  /// Starts the work on the gradients of the last micro-batch.
  void flush();
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

  // ---- gradients within backward (backward.cpp)

  bool step_in_backward = false;
  bool stepped_in_backward = false;  // whether the last backward has stepped any parameter
  bool watches = false;              // whether hooks outside of the core call on_gradient
  // Whether watch() installs hooks. Python's optimizers have hooks of their own.
  bool installs_hooks = true;

  /// Installs a post-accumulate-grad hook on each parameter. step_in_backward and accumulate() need the
  /// hooks, because they free grad() during backward.
  void watch(const std::vector<Tensor>& params);
  void on_gradient(const Tensor& param);
  /// Raises if a parameter gets a second gradient of a step that steps parameters within backward.
  void check_first(bool is_first);

 private:
  // The parameters of a parameter group that have the same Kind (state format and devices), and the index of
  // each one among all parameters of the optimizer.
  struct Members {
    Kind kind;
    std::vector<Tensor> params;
    std::vector<int64_t> numbers;
  };
  // The arena of a single parameter, for a step within backward.
  struct Alone {
    size_t group;
    Arena arena;
  };

  std::vector<Members> members(size_t group, c10::function_ref<bool(const Tensor&)> belongs) const;
  Parts parts_of(const std::vector<const Arena*>& arenas) const;
  void check_process() const;

  Step begin_step(StepFactors factors, bool is_checked);
  void gather(OperatorCall& call, bool is_scaled);
  Tensor find_inf(const std::vector<OperatorCall>& calls, const StepFactors& factors) const;
  Tensor clip(const std::vector<OperatorCall>& calls, const Tensor& grad_scale);
  void step_arena(const OperatorCall& call, const StepFactors& factors);

  void begin_backward();
  void end_backward();
  std::optional<Step> end_earlier();
  void finish_backward();
  void split_gradient(const Tensor& param);
  void take_sum(const Tensor& param);
  void step_alone(const Tensor& param);
  void find_alone();

  std::map<at::Device, c10::intrusive_ptr<offload::Offload>, bool (*)(at::Device, at::Device)> offloads_{
      [](at::Device a, at::Device b) { return a.str() < b.str(); }};
  // The running backward passes. Null before the first gradient hook: until then no backward has collected
  // gradients, added them up or stepped parameters.
  std::shared_ptr<Backwards> backwards_;
  bool knows_parts_ = false;  // whether split_gradients knows the parts of each process
  std::unordered_set<Key> watched_;
  // The arena of each single parameter, for steps within backward.
  std::unordered_map<Key, Alone> alone_;
  // Parameters that the backward passes since the last step() have stepped.
  std::unordered_set<Key> stepped_alone_;
  // Norms of the gradients of micro-batches, if takes_norms is set.
  Norms micro_norms_;
  // Serialises the gradient hooks, since backward runs one thread per device, and the calls of several
  // threads. Recursive, because a hook may run while its thread holds it.
  std::recursive_mutex mutex_;

 public:
  HostSteps host{*this};  // declared last, since its thread uses the other members
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
