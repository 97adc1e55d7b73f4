#pragma once

// The base classes that all optimizers share: options, state, steps, and saving to files.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>

#include <shoestring/core/export.h>

namespace shoestring::optim {

namespace detail {  // internal namespace, not part of the API
struct Access;
struct Core;
struct Field;
struct Reporter;
struct Rule;
}  // namespace detail

// ---- Options

/// Options that all optimizers share. Each parameter group has its own copy.
class SHOESTRING_API LowMemoryOptions : public torch::optim::OptimizerOptions {
 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr_; }
  void set_lr(const double lr) override { lr_ = lr; }

 protected:
  explicit LowMemoryOptions(double lr) : lr_(lr) {}

  double lr_;
  bool maximize_ = false;
  std::string state_format_ = "8bit", weight_rounding_ = "nearest";
  int64_t min_quantize_size_ = 0, seed_ = 0;

 private:
  friend struct detail::Access;
  // Replaces lr_ if it is defined: one number, which a step reads on the device of the parameters.
  at::Tensor lr_tensor_;
  virtual const detail::Rule& rule() const = 0;
  // Returns the options that the optimizer class adds to the options of LowMemoryOptions.
  virtual std::vector<detail::Field> fields() = 0;
  // Raises if options are invalid in a way that the range of a single option cannot express.
  virtual void check(const detail::Reporter&) const {}
  // Raises if the optimizer must not step in its current mode, such as the eval mode of Schedule-Free AdamW.
  virtual void check_step() const {}
};

/// Base class of an optimizer's options, such as AdamWOptions. As in LibTorch, each setter returns the
/// options.
template <class Options>
class OptionsOf : public LowMemoryOptions {
 public:
#define SHOESTRING_OPTION(type, name)          \
  const type& name() const { return name##_; } \
  type& name() { return name##_; }             \
  Options& name(type value) {                  \
    name##_ = std::move(value);                \
    return static_cast<Options&>(*this);       \
  }
  /// Learning rate.
  SHOESTRING_OPTION(double, lr)
  /// Maximise the objective instead of minimising it.
  SHOESTRING_OPTION(bool, maximize)
  /// Format of the moments. "8bit" and "4bit" store codes in blocks with fp32 scales. "bf16" rounds
  /// stochastically. "fp32" stores full precision. A moment that changes per step by less than one
  /// quantisation level is stored as bf16 instead of codes.
  SHOESTRING_OPTION(std::string, state_format)
  /// Parameters with fewer elements than this have fp32 state.
  SHOESTRING_OPTION(int64_t, min_quantize_size)
  /// How updates are applied to bf16 weights:
  /// - "nearest" rounds to nearest, which loses updates below half a unit in the last place;
  /// - "stochastic" rounds up or down at random, so that the expected value is right;
  /// - "remainder" stores 16 more bits per weight, which gives exactly the weights of fp32 training.
  SHOESTRING_OPTION(std::string, weight_rounding)
  /// Seed of stochastic rounding. The random bits depend on the seed, the step number, the parameter's number
  /// in the optimizer and the element's index. They do not depend on the device, and Python draws the same
  /// bits.
  SHOESTRING_OPTION(int64_t, seed)
#undef SHOESTRING_OPTION

  std::unique_ptr<OptimizerOptions> clone() const override {
    return std::make_unique<Options>(static_cast<const Options&>(*this));
  }

 protected:
  using LowMemoryOptions::LowMemoryOptions;
};

// ---- State

/// State of one parameter by name, as in Python: step (an fp32 scalar); for each moment its tensor, such as
/// exp_avg, and exp_avg_scale if the moment is stored as codes; and weight_remainder. The tensors are views
/// into memory that the parameters of a group share. Change their values in place, or replace them by loading
/// a state.
class SHOESTRING_API ParamState : public torch::optim::OptimizerCloneableParamState<ParamState> {
 public:
  ParamState() = default;
  explicit ParamState(std::map<std::string, at::Tensor> tensors) : tensors_(std::move(tensors)) {}

  const std::map<std::string, at::Tensor>& tensors() const { return tensors_; }
  bool contains(const std::string& name) const { return tensors_.count(name) > 0; }
  /// Returns the tensor called `name`. Raises c10::Error, which lists the existing names, if there is none.
  const at::Tensor& operator[](const std::string& name) const;

  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;

 private:
  std::map<std::string, at::Tensor> tensors_;
};

/// The elements [begin, end) of a contiguous parameter.
struct ParameterPart {
  at::Tensor param;
  int64_t begin, end;
};
/// Copies the weights of the parts of each process from that process to all others.
using GatherWeights = std::function<void(const std::vector<std::vector<ParameterPart>>&)>;

/// Gradients of which each process keeps only the parts that it steps (ZeRO-2). An optimizer gives every
/// gradient to this interface as soon as it is complete on this process; shoestring/distributed/distributed.h
/// implements it over a process group.
class SHOESTRING_API SplitGradients {
 public:
  virtual ~SplitGradients() = default;
  /// Returns the name under which c10d knows the group of the processes. Norms are added over the group.
  virtual std::string group() const = 0;
  /// Receives the parts of each process, before the first gradient. `params` are the optimizer's parameters
  /// that require gradients, in its order.
  virtual void set_parts(const std::vector<at::Tensor>& params,
                         const std::vector<std::vector<ParameterPart>>& parts) = 0;
  /// Takes the gradient of a parameter out of grad(), and adds it to that of the other processes.
  virtual void add(const at::Tensor& param) = 0;
  /// Returns whether any gradient has arrived.
  virtual bool any() const = 0;
  /// Waits until all gradients are complete. Raises if some are missing.
  virtual void finish() = 0;
  /// Returns the gradient of the part of a parameter that this process steps: its elements, one after the
  /// other. Undefined if no gradient has arrived.
  virtual at::Tensor part(const at::Tensor& param) const = 0;
  /// Drops all gradients.
  virtual void clear() = 0;
};

/// Base class of all optimizers in shoestring::optim. It stores moments in few bits, and steps all tensors of
/// a group in one pass. Parameters are fp32, bf16 or fp16. A parameter's state is created when it first has a
/// gradient.
class SHOESTRING_API LowMemoryOptimizer : public torch::optim::Optimizer {
 public:
  ~LowMemoryOptimizer() override;
  LowMemoryOptimizer(LowMemoryOptimizer&& other) noexcept;
  LowMemoryOptimizer& operator=(LowMemoryOptimizer&& other) noexcept;

  /// Adds a parameter group. If `group` has options of this optimizer's type, they are kept. (Newer releases
  /// of LibTorch keep options only for LibTorch's own optimizers, and replace the options of all other groups
  /// by the defaults.)
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  at::Tensor step(LossClosure closure = nullptr) override;

  /// Clears gradients like torch::optim::Optimizer::zero_grad. If a step or a backward pass has raised an
  /// error before it stepped any parameter, also drops its remains, including the gradients of accumulate().
  void zero_grad(bool set_to_none = true);

  /// Takes a step with gradients of a loss that was multiplied by grad_scale (fp32, one element), for fp16
  /// training. The step divides the gradients by grad_scale before clipping; grad() does not change.
  ///
  /// The step is skipped if any gradient of the optimizer, including accumulated gradients, is not finite, or
  /// if found_inf is given and not zero. A skipped step changes nothing, except that it drops the accumulated
  /// gradients.
  ///
  /// An undefined grad_scale means that the gradients are divided already. found_inf is then required, and
  /// the step does not look for gradients that are not finite.
  ///
  /// Returns 1 if the step was skipped and 0 otherwise, as fp32 on the gradients' device, without a
  /// synchronisation. GradScaler calls this function and adjusts the scale.
  ///
  /// Cannot be combined with set_step_in_backward.
  at::Tensor scaled_step(const at::Tensor& grad_scale, const at::Tensor& found_inf = {});

  /// Sets the norm to which each step clips the gradients, like torch::nn::utils::clip_grad_norm_. The norm
  /// is that of all parameters that have a gradient. Clipping happens within the step; grad() does not
  /// change. save() does not save max_grad_norm.
  void set_max_grad_norm(std::optional<double> max_grad_norm);
  /// Returns the norm of all gradients before clipping in the last step, an fp32 scalar on the gradients'
  /// device. Undefined without max_grad_norm.
  const at::Tensor& grad_norm() const;

  /// Steps each parameter within backward, as soon as its gradient is complete, and frees the gradient. So
  /// the gradients of all parameters never exist at the same time. step() must still be called after each
  /// backward, to complete the step. Clipping uses the gradient norm of the previous step (the first step is
  /// not clipped), which differs from exact clipping. save() does not save this setting.
  void set_step_in_backward(bool step_in_backward);

  /// Selects the place of the optimizer state:
  /// - none: on the parameters' device;
  /// - "cpu": in host memory, and the CPU takes the steps;
  /// - "stream": in host memory, which is pinned for a GPU;
  /// - "nvme:DIR": in an unnamed file in the folder DIR. Space in the file is reserved by this call, and
  ///   freed when the process ends.
  ///
  /// "stream" and "nvme:DIR": a step copies the state to the device in chunks of 8 MiB, and overlaps reads,
  /// writes and computation. The results are bit for bit those without offload. The state takes four chunks
  /// of device memory. A chunk of one large parameter exceeds 8 MiB on a GPU, and in optimizers that step
  /// whole parameters.
  ///
  /// If state cannot be read or written, step() raises c10::Error with the file and the offset. The
  /// parameters before that offset have been stepped and the later parameters have not; nothing is lost.
  /// Calling step() again with unchanged gradients finishes the step. If no parameter had been stepped,
  /// zero_grad() drops the failed step, and training can go on. If some had been stepped, a step with other
  /// gradients raises, and the weights and the state of a checkpoint must be loaded. A checkpoint must also
  /// be loaded after a backward pass that failed after it had stepped parameters. A forked child process may
  /// read the state, but its steps raise.
  ///
  /// "cpu": gradients are copied to the host and weights are copied back, in buckets of about 8 MiB.
  /// Gradients and weights have host buffers of exactly their size, pinned for a GPU. One bucket is copied
  /// while another is stepped. Changes of parameters between steps are detected by the parameters' version
  /// counters. Changes through data pointers or .data are therefore not detected. With set_step_in_backward,
  /// each gradient is copied as soon as it is complete, and its parameter is stepped while backward
  /// continues. If max_grad_norm is also set, backward collects the gradients and their norms and step()
  /// applies the gradients, so clipping is exact. Each backward then needs its own step(). The gradients that
  /// accumulate() adds up are in host memory, too.
  ///
  /// Existing state moves to the new place. save() does not save this setting.
  void set_offload(const std::optional<std::string>& where);

  /// Splits the steps over processes (ZeRO-1): each has the state of its part of the parameters alone, and
  /// steps this part. shoestring/distributed/distributed.h has a function that does so over a process group.
  ///
  /// `gather` is called at the end of each step with the parts of each process, and must copy the weights of
  /// each part from the process that has stepped it to the others. The parts are whole blocks of 256 elements
  /// in the order of the parameters; on a GPU, and in optimizers that step whole parameters, they are whole
  /// parameters. So the weights are bit for bit those of one process with the same gradients.
  ///
  /// With `gradients`, each process also has its parts of the gradients alone (ZeRO-2): a gradient leaves
  /// grad() as soon as backward has completed it. Clip with set_max_grad_norm.
  ///
  /// All processes must have the same parameters and options, and gradients of all parameters that require
  /// them. Call it before the first step. The last micro-batch after accumulate() must have a gradient of
  /// each parameter. With set_offload("stream") or ("nvme:DIR"), before it or after it, the state of this
  /// process's part is away. Raises c10::Error with set_offload("cpu"), set_step_in_backward or parameters
  /// that are not contiguous.
  ///
  /// All processes must call save() and the functions that write files, which write the state that one
  /// process would have. Only the first process writes a file. Any number of processes can load it. The parts
  /// of each tensor are gathered over the process group that c10d knows as `group`, one tensor at a time
  /// except in save().
  void set_shard(int64_t rank, int64_t ranks, std::string group, GatherWeights gather,
                 std::shared_ptr<SplitGradients> gradients = nullptr);

  /// Adds up gradients over micro-batches, and frees grad(), for as long as the returned object lives. Hold
  /// the object during forward and backward of every micro-batch of a step except the last. Run the last
  /// micro-batch without the object: step(), or the step within backward, adds the last gradient to the
  /// accumulated gradient. Divide the loss by the number of micro-batches, as usual. zero_grad() keeps the
  /// accumulated gradients; a step clears them.
  [[nodiscard]] std::shared_ptr<void> accumulate();
  /// Sets the dtype of the gradients that accumulate() adds up: at::kFloat (the default, exact up to fp32
  /// rounding) or at::kBFloat16.
  void set_accumulate_dtype(at::ScalarType dtype);

  /// Saves and loads the state and options of all parameter groups in LibTorch's archives. (save_optimizer
  /// writes files that Python reads, too.) If the archive does not match the optimizer, load raises an error
  /// and changes nothing.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  LowMemoryOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                     std::unique_ptr<LowMemoryOptions> defaults);

 private:
  friend struct detail::Access;
  std::shared_ptr<detail::Core> core_;
};

/// Base class of the optimizers whose options have the type Options. It provides their constructors.
template <class Options>
class OptimizerOf : public LowMemoryOptimizer {
 public:
  explicit OptimizerOf(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                       Options defaults = {})
      : LowMemoryOptimizer(param_groups, std::make_unique<Options>(std::move(defaults))) {}
  explicit OptimizerOf(std::vector<at::Tensor> params, Options defaults = {})
      : OptimizerOf({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}
};

// ---- Files

/// Writes the state and options of all groups to the safetensors file `path`, which
/// shoestring.optim.load_optimizer in Python can read. An existing file is replaced only when the new one is
/// complete and on disk.
SHOESTRING_API void save_optimizer(const LowMemoryOptimizer& optimizer, const std::string& path);

/// Restores a file that save_optimizer has written, in C++ or in Python. An optimizer of the same class, with
/// the same parameters in the same groups and order, continues bit for bit. If the file does not match the
/// optimizer, raises c10::Error and changes nothing.
SHOESTRING_API void load_optimizer(LowMemoryOptimizer& optimizer, const std::string& path);

}  // namespace shoestring::optim
