#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>

#include <shoestring/export.h>

namespace shoestring::optim {

namespace detail {  // not part of the API
struct Access;
struct Core;
struct Field;
struct Rule;
}  // namespace detail

// ---- Options

/// The options that all optimizers have, each group of parameters its own.
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
  std::string state_ = "8bit", weights_ = "plain";
  int64_t min_quantize_size_ = 0, seed_ = 0;

 private:
  friend struct detail::Access;
  virtual const detail::Rule& rule() const = 0;
  virtual std::vector<detail::Field> fields() = 0;  // those of the rule
  virtual void check() const {}                     // what the fields do not say of themselves
  virtual void check_step() const {}                // whether a step may be taken
};

/// The same for an optimizer's own Options, which follow LibTorch's convention: each setter returns the
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
  /// Ascend instead.
  SHOESTRING_OPTION(bool, maximize)
  /// How moments are kept: "8bit" or "4bit", codes in blocks with fp32 scales; "bf16", rounded
  /// stochastically; or "fp32". One that moves by less in a step than codes are apart is bf16 in place of
  /// codes.
  SHOESTRING_OPTION(std::string, state)
  /// Parameters with fewer elements have fp32 state.
  SHOESTRING_OPTION(int64_t, min_quantize_size)
  /// How bf16 weights take an update: "plain", rounded to nearest, which loses updates below half a unit in
  /// the last place; "stochastic", rounded up or down so that the mean is right; or "remainder", with 16 more
  /// bits a weight: exactly as fp32 weights would.
  SHOESTRING_OPTION(std::string, weights)
  /// Of what is rounded stochastically. Random bits follow from it, the number of the step, that of the
  /// parameter in the optimizer, and the place of the element in it: the same on every device, and in Python.
  SHOESTRING_OPTION(int64_t, seed)
#undef SHOESTRING_OPTION

  std::unique_ptr<OptimizerOptions> clone() const override {
    return std::make_unique<Options>(static_cast<const Options&>(*this));
  }

 protected:
  using LowMemoryOptions::LowMemoryOptions;
};

// ---- State

/// A parameter's state by name, as in Python: step (an fp32 scalar), then for each moment e.g. exp_avg,
/// exp_avg_scale (where it is codes), and weight_remainder. Views into memory that the parameters of a group
/// share: change their values in place, or replace them through a load.
class SHOESTRING_API ParamState : public torch::optim::OptimizerCloneableParamState<ParamState> {
 public:
  ParamState() = default;
  explicit ParamState(std::map<std::string, at::Tensor> tensors) : tensors_(std::move(tensors)) {}

  const std::map<std::string, at::Tensor>& tensors() const { return tensors_; }
  bool contains(const std::string& name) const { return tensors_.count(name) > 0; }
  /// Raises c10::Error, with the names that there are, where there is no `name`.
  const at::Tensor& operator[](const std::string& name) const;

  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;

 private:
  std::map<std::string, at::Tensor> tensors_;
};

// ---- Optimizer

/// What all optimizers share: moments in few bits, one pass over all tensors of a group. Parameters: fp32,
/// bf16 or fp16. State is made when a parameter first has a gradient.
class SHOESTRING_API LowMemoryOptimizer : public torch::optim::Optimizer {
 public:
  ~LowMemoryOptimizer() override;
  LowMemoryOptimizer(LowMemoryOptimizer&& other) noexcept;
  LowMemoryOptimizer& operator=(LowMemoryOptimizer&& other) noexcept;

  /// A group's own options, of this optimizer's type, are taken as they are. (Newer releases of LibTorch keep
  /// them for their own optimizers only, and give the groups of any other the defaults.)
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  at::Tensor step(LossClosure closure = nullptr) override;

  /// As in torch::optim::Optimizer. It also drops what is left of a step or a backward that raised an error,
  /// sums of accumulate() included, where no parameter had been stepped.
  void zero_grad(bool set_to_none = true);

  /// A step with gradients of a loss that was multiplied by grad_scale (fp32, one element), for training in
  /// fp16: they are divided by it within the step, before clipping; grad() stays as it is. Where any gradient
  /// of the optimizer is not finite, sums of micro-batches included, or found_inf is given and not zero,
  /// nothing changes (but that sums are dropped). Returns whether that was so, 1 or 0, fp32 on a gradient's
  /// device; nothing waits for it. What torch.amp.GradScaler does in Python:
  ///
  ///     at::Tensor scale = at::full({}, 65536.0, device), tracker = at::zeros({},
  ///     scale.options().dtype(at::kInt)); (loss * scale).backward(); at::_amp_update_scale_(scale, tracker,
  ///     optimizer.scaled_step(scale), 2.0, 0.5, 2000);
  ///
  /// Not with steps within backward.
  at::Tensor scaled_step(const at::Tensor& grad_scale, const at::Tensor& found_inf = {});

  /// Clips the gradients to this norm, over all parameters that have one, as
  /// torch::nn::utils::clip_grad_norm_ does, but within the step: grad() stays as it is. Not saved.
  void set_max_grad_norm(std::optional<double> max_grad_norm);
  /// The last step's norm before clipping, an fp32 scalar on the gradients' device; undefined without
  /// max_grad_norm.
  const at::Tensor& grad_norm() const;

  /// Each parameter is stepped as soon as its gradient is complete, which is then freed: gradients are never
  /// all alive. step() still has to be called, after each backward; it only counts. Clipping then is by the
  /// norm of the step before (the first is not clipped), which is not the same. Not saved.
  void set_step_in_backward(bool step_in_backward);

  /// Where the state lies: none, on the parameters' device; "cpu" (below); "stream", in host memory,
  /// page-locked for a GPU; or "nvme:DIR", in a file without a name in the folder DIR, whose space is
  /// reserved here and free again when the process ends. A step takes it to the device in chunks, some of
  /// which are read and written meanwhile, and does the same, bit for bit; state takes 4 chunks of memory
  /// there, 8 MiB each (one of a single parameter, in a step that is more than a rule, may be larger). Where
  /// something cannot be read or written, step() raises c10::Error with the file and the place; parameters
  /// before it are stepped and the others are not, nothing is lost, and calling step() again, with the
  /// gradients as they are, finishes that step. After zero_grad() the next step goes on where none had been
  /// stepped; else it raises: load the weights and the state of a checkpoint. (The same after a backward that
  /// failed and whose gradients have been stepped within it.) A forked child may read the state; its steps
  /// raise. "cpu": in host memory, and the CPU steps it. Gradients go there and weights come back, both
  /// page-locked for a GPU and of exactly their size, in buckets of some 8 MiB; while one is copied another
  /// is stepped. Changes of parameters between steps are seen by their version counters (those made below,
  /// through data pointers or .data, are not). With set_step_in_backward gradients leave as soon as they are
  /// complete and are stepped while backward runs on; with set_max_grad_norm as well, gradients are collected
  /// and their norms taken in backward, and step() applies them: this clipping is exact. Each backward then
  /// needs its step(). Sums of accumulate() are in host memory, too. State that there is moves. Not saved.
  void set_offload(const std::optional<std::string>& where);

  /// While the result lives, gradients are added up and grad() is freed: it stands around forward and
  /// backward of every micro-batch but the last of a step. That one runs outside; step(), or the step within
  /// backward, adds its gradient on the way. The loss has to be divided by the number of micro-batches, as
  /// ever. zero_grad does not drop the sums; a step does.
  [[nodiscard]] std::shared_ptr<void> accumulate();
  /// What sums are kept in: at::kFloat, exact but for its rounding (the default), or at::kBFloat16.
  void set_accumulate_dtype(at::ScalarType dtype);

  /// State and options of all groups, in LibTorch's archives; save_optimizer writes files that Python reads,
  /// too. load refuses what does not fit, and changes nothing then.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  LowMemoryOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                     std::unique_ptr<LowMemoryOptions> defaults);

 private:
  friend struct detail::Access;
  std::shared_ptr<detail::Core> core_;
};

/// The constructors of an optimizer with these Options.
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

/// Writes state and options of all groups to the safetensors file `path`, which Python's
/// shoestring.optim.load_optimizer reads as well. A file that is there is replaced once the new one is
/// complete and on disk.
SHOESTRING_API void save_optimizer(const LowMemoryOptimizer& optimizer, const std::string& path);

/// Restores what save_optimizer, in either language, has written: an optimizer of the same class over the
/// same parameters, in the same groups and order, goes on bit for bit. Raises c10::Error where the file does
/// not fit; nothing has changed then.
SHOESTRING_API void load_optimizer(LowMemoryOptimizer& optimizer, const std::string& path);

}  // namespace shoestring::optim
