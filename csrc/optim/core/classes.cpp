// Registers the class OptimizerCore, with which Python's optimizers step. It owns a C++ optimizer; Python
// adapts parameter groups, DTensors and state dicts to it. A class of PyTorch's own registry needs no code of
// a Python version, and its methods run without Python's global lock.

#include <map>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <shoestring/optim/rules.h>

#include "optim/core/core.h"
#include "optim/core/host_copy.h"
#include "optim/core/optimizer_holder.h"
#include "optim/core/saved.h"
#include "optim/core/stored.h"
#include "optim/core/values.h"
#include "optim/split/split_params.h"

namespace shoestring::optim {
namespace {

using namespace detail;
using Entries = c10::Dict<std::string, Tensor>;

template <class Optimizer>
std::unique_ptr<LowMemoryOptimizer> make() {
  return std::make_unique<Optimizer>(std::vector<torch::optim::OptimizerParamGroup>());
}

std::unique_ptr<LowMemoryOptimizer> make_by_name(const std::string& name) {
  static const std::map<std::string, std::unique_ptr<LowMemoryOptimizer> (*)()> kClasses{
      {"AdEMAMix", make<AdEMAMix>},
      {"Adafactor", make<Adafactor>},
      {"AdamW", make<AdamW>},
      {"CAME", make<CAME>},
      {"LAMB", make<LAMB>},
      {"Lion", make<Lion>},
      {"Muon", make<Muon>},
      {"SGD", make<SGD>},
      {"ScheduleFreeAdamW", make<ScheduleFreeAdamW>},
  };
  const auto maker = kClasses.find(name);
  TORCH_CHECK_VALUE(maker != kClasses.end(), "OptimizerCore: expected the class of an optimizer, received ",
                    name);
  return maker->second();
}

/// The state that processes have split, as tensors of a file.
struct SplitState : torch::CustomClassHolder {
  explicit SplitState(std::vector<files::Source> all) : sources(std::move(all)) {}

  /// Returns the names of the tensors.
  std::vector<std::string> names() {
    std::vector<std::string> result;
    for (const files::Source& source : sources) result.push_back(source.info.name);
    return result;
  }
  /// Returns for each tensor a meta tensor of its shape and dtype.
  std::vector<Tensor> likes() {
    std::vector<Tensor> result;
    for (const files::Source& source : sources)
      result.push_back(at::empty(source.info.shape, at::device(at::kMeta).dtype(source.info.dtype)));
    return result;
  }
  /// Returns a tensor. All processes must call it in the same order.
  Tensor whole(int64_t index) { return sources.at(static_cast<size_t>(index)).whole(); }

  std::vector<files::Source> sources;
};

/// A copy in host memory of an optimizer's state and options, of which this process has a part.
struct StateCopy : torch::CustomClassHolder {
  explicit StateCopy(LowMemoryOptimizer& optimizer) : copy({}, {&optimizer}) {}

  void restore() { copy.restore("load_state_dict"); }

  HostCopy copy;
};

/// Sets all options without checking their ranges. Returns the learning rate if it is a tensor. `name` begins
/// messages.
Tensor read_unchecked(const Options& values, LowMemoryOptions& options, const std::string& name) {
  Tensor lr;
  for (const Field& field : Access::fields(options)) {
    const c10::IValue value = values.at(field.name);
    if (value.isTensor()) {
      lr = value.toTensor();  // only a learning rate can be a tensor
    } else {
      const bool fits = std::visit([&](auto* place) { return read_value(value, *place); }, field.value);
      if (fits) continue;
      // A stream writes 0.9 as a double in 6 digits, and as an IValue in 17.
      expect(false, name, field.name, expected_of(field),
             value.isDouble() ? c10::str(value.toDouble()) : c10::str(value));
    }
  }
  return lr;
}

/// Sets all options, or raises before any has changed.
void read_options(const Options& values, LowMemoryOptions& to, const std::string& name) {
  const auto read = to.clone();
  auto& options = static_cast<LowMemoryOptions&>(*read);
  const Tensor lr = read_unchecked(values, options, name);
  Access::check(options, name);
  Access::assign(to, options);
  Access::lr_tensor(to) = lr;
}

// ---- The class

class OptimizerCore : public OptimizerHolder {
 public:
  OptimizerCore(const std::string& name, std::string label) : optimizer_(make_by_name(name)) {
    core().label = std::move(label);
    core().installs_hooks = false;
  }

  LowMemoryOptimizer& optimizer() override { return *optimizer_; }

  // ---- groups

  /// Adds a group. A parameter that is a shard has the names of its process groups in `split`; see
  /// set_splits.
  void add_group(const std::vector<Tensor>& params, const Options& options,
                 const std::vector<std::vector<std::string>>& split, const std::vector<int64_t>& pieces,
                 const std::vector<std::vector<int64_t>>& sizes,
                 const std::vector<std::vector<int64_t>>& begins, at::Device device) {
    auto group_options = clone_defaults();
    read_options(options, *group_options, core().label);
    set_splits(params, split, pieces, sizes, begins, device.type());
    optimizer_->add_param_group({params, std::move(group_options)});
  }
  /// Returns the names of the options of a group.
  std::vector<std::string> option_names() {
    std::vector<std::string> names;
    for (const Field& field : Access::fields(defaults())) names.emplace_back(field.name);
    return names;
  }
  /// Raises if an option of a group is invalid.
  void check_options(const Options& options) { read_options(options, *clone_defaults(), core().label); }
  /// Returns the state tensors of a parameter of a group with these options, in the order of the operator's
  /// arguments: the name, an empty tensor of the dtype with as many elements as 256 elements of the parameter
  /// have, and whether the state tensor has the parameter's shape.
  std::vector<std::tuple<std::string, Tensor, bool>> parts(const Options& options, const std::string& state,
                                                           bool remainder) {
    const auto group_options = clone_defaults();
    read_unchecked(options, *group_options, core().label);
    std::vector<std::tuple<std::string, Tensor, bool>> result;
    for (const Part& part :
         detail::parts(Access::rule(*group_options), {state, remainder, at::kCPU, at::kCPU})) {
      const auto like = at::empty({part.per_block}, at::TensorOptions(at::kMeta).dtype(part.dtype));
      result.emplace_back(part.name, like, part.shaped);
    }
    return result;
  }
  /// Returns the moments that the rule keeps with these options: the name, whether it can be negative, and
  /// whether it is long.
  std::vector<std::tuple<std::string, bool, bool>> moments(const Options& options) {
    const auto group_options = clone_defaults();
    read_unchecked(options, *group_options, core().label);
    std::vector<std::tuple<std::string, bool, bool>> result;
    for (const Moment& m : Access::rule(*group_options).moments)
      if (m.is_kept) result.emplace_back(m.name, m.is_signed, m.is_long);
    return result;
  }
  /// Returns the names and shapes of the state tensors outside of the arenas, of a parameter of this shape.
  std::vector<std::tuple<std::string, std::vector<int64_t>>> extras(const std::vector<int64_t>& shape) {
    const Tensor param = at::empty(shape, at::kMeta);
    std::vector<std::tuple<std::string, std::vector<int64_t>>> result;
    for (const Extra& extra : Access::rule(defaults()).extras)
      result.emplace_back(extra.name, extra.shape_of(param));
    return result;
  }
  /// Returns whether the operator can step a part of a parameter.
  bool takes_parts() { return Access::rule(defaults()).takes_parts(); }
  /// Returns the ranges of these parameters' elements that each of `ranks` processes steps.
  std::vector<std::vector<std::tuple<Tensor, int64_t, int64_t>>> split(const std::vector<Tensor>& params,
                                                                       int64_t ranks, bool on_cpu) {
    std::vector<std::vector<std::tuple<Tensor, int64_t, int64_t>>> result;
    for (const auto& parts : Arena::split(Access::rule(defaults()), params, ranks, on_cpu)) {
      auto& ranges = result.emplace_back();
      for (const auto& [param, begin, end] : parts) ranges.emplace_back(param, begin, end);
    }
    return result;
  }
  void pop_group() { optimizer_->param_groups().pop_back(); }
  void set_options(int64_t group, const Options& options) {
    auto& group_options = optimizer_->param_groups().at(static_cast<size_t>(group)).options();
    read_options(options, static_cast<LowMemoryOptions&>(group_options), core().label);
  }
  void replace_params(int64_t group, const std::vector<Tensor>& params) {
    core().replace_params(static_cast<size_t>(group), params);
  }
  void set_offload(const std::optional<std::string>& where) {
    const at::NoGradGuard no_grad;
    optimizer_->set_offload(where);
  }
  int64_t host_bytes() { return core().host_bytes(); }
  void set_max_grad_norm(std::optional<double> norm) { optimizer_->set_max_grad_norm(norm); }
  void set_step_in_backward(bool step_in_backward) {
    if (step_in_backward) core().expect_unsharded("step_in_backward");
    core().step_in_backward = step_in_backward;
  }
  void set_accumulate_dtype(at::ScalarType dtype) { optimizer_->set_accumulate_dtype(dtype); }

  // ---- steps

  /// Returns whether the step was skipped, as scaled_step() does, if found_inf is given.
  std::optional<Tensor> step(const std::optional<Tensor>& grad_scale,
                             const std::optional<Tensor>& found_inf) {
    const at::NoGradGuard no_grad;
    core().check_step();
    if (found_inf) return core().scaled_step(grad_scale.value_or(Tensor()), *found_inf, /*is_checked=*/true);
    core().step();
    return std::nullopt;
  }
  void set_train_mode(bool train_mode) {
    auto& optimizer = dynamic_cast<ScheduleFreeAdamW&>(*optimizer_);
    train_mode ? optimizer.train() : optimizer.eval();
  }
  void on_gradient(const Tensor& param) { core().on_gradient(param); }
  void add_sum_to_gradient(const Tensor& param) { core().add_sum_to_gradient(param); }
  bool has_sums() { return core().sums.any(); }
  bool is_unfinished() { return core().unfinished.exists(); }
  void begin_sums() {
    const at::NoGradGuard no_grad;
    core().begin_sums();
    core().watches = true;
  }
  bool set_accumulating(bool accumulating) { return std::exchange(core().accumulating, accumulating); }
  void flush() {
    const at::NoGradGuard no_grad;
    core().flush();
  }
  void discard() {
    const at::NoGradGuard no_grad;
    core().discard();
  }
  void settle() {
    const at::NoGradGuard no_grad;
    core().settle("state_dict");
  }
  void set_takes_norms(bool takes) { core().takes_norms = takes; }
  Tensor take_squares() {
    const at::NoGradGuard no_grad;
    return core().take_squares();
  }
  Tensor whole_square() {
    const at::NoGradGuard no_grad;
    return core().whole_square();
  }
  /// Drops the sums of gradients, and waits for the work of a failed step.
  void drop() {
    const at::NoGradGuard no_grad;
    core().drop();
  }

  // ---- state

  int64_t layouts_made() { return core().layouts_made; }
  std::optional<Tensor> grad_norm() { return some(core().clipping.norm); }
  void set_grad_norm(const std::optional<Tensor>& norm) { core().clipping.norm = norm.value_or(Tensor()); }

  /// Returns the state of each parameter of a group; empty for a parameter without state.
  std::vector<Entries> states(int64_t group) {
    std::vector<Entries> result;
    for (const Tensor& p : optimizer_->param_groups().at(static_cast<size_t>(group)).params()) {
      Entries& entries = result.emplace_back();
      const ParamState* state = core().state(p);
      if (state == nullptr) continue;
      for (const std::string& name : core().names_of_state(static_cast<size_t>(group), p)) {
        entries.insert(name, (*state)[name]);
      }
    }
    return result;
  }

  bool writes() { return detail::writes(*optimizer_); }
  bool is_split() { return detail::is_split(*optimizer_); }

  /// Returns the state that processes have split, as tensors of a file.
  c10::intrusive_ptr<SplitState> split_state() {
    const at::NoGradGuard no_grad;
    return c10::make_intrusive<SplitState>(sources_of(store(*optimizer_), "", "save", core().label));
  }

  /// Returns a copy of the state that processes have split, which must not outlive this object.
  c10::intrusive_ptr<StateCopy> copy_state() { return c10::make_intrusive<StateCopy>(*optimizer_); }

  /// Returns the memory of each arena: its flat tensors by name, the copies of its parameters in host memory,
  /// and its offloaded state.
  using Memory = std::tuple<Entries, std::vector<Tensor>, c10::IValue>;
  std::vector<Memory> arenas() {
    std::vector<Memory> result;
    for (const auto& [group, layout] : core().layouts) {
      for (const Arena& arena : layout.arenas) {
        Entries tensors;
        tensors.insert("step", arena.step);
        for (const auto& [name, tensor] : arena.values) tensors.insert(name, tensor);
        if (arena.accumulated.defined()) tensors.insert("accumulated", arena.accumulated);
        // A signature cannot name the class of the offloaded state, which another file registers.
        c10::IValue offloaded;
        if (arena.offloaded != nullptr) offloaded = arena.offloaded;
        result.emplace_back(std::move(tensors), arena.weights, std::move(offloaded));
      }
    }
    return result;
  }

  /// Replaces the state of all parameters, and drops what belongs to the old state.
  void load(const std::vector<std::vector<Entries>>& groups, const std::optional<Tensor>& grad_norm) {
    Saved saved{{}, /*has_parts=*/!core().ranks, grad_norm.value_or(Tensor())};
    for (size_t g = 0; g < groups.size(); ++g) {
      auto& to = saved.groups.emplace_back();
      to.options = optimizer_->param_groups().at(g).options().clone();
      for (const Entries& entries : groups[g]) {
        std::map<std::string, Tensor> tensors;
        for (const auto& entry : entries) tensors[entry.key()] = entry.value();
        to.states.emplace_back(std::move(tensors));
      }
    }
    restore(*optimizer_, std::move(saved));
  }

 private:
  Core& core() { return Access::core(*optimizer_); }
  const LowMemoryOptions& defaults() { return static_cast<LowMemoryOptions&>(optimizer_->defaults()); }
  std::unique_ptr<LowMemoryOptions> clone_defaults() {
    return std::unique_ptr<LowMemoryOptions>(static_cast<LowMemoryOptions*>(defaults().clone().release()));
  }

  std::unique_ptr<LowMemoryOptimizer> optimizer_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  m.class_<SplitState>("SplitState")
      .def("names", &SplitState::names)
      .def("likes", &SplitState::likes)
      .def("whole", &SplitState::whole);
  m.class_<StateCopy>("StateCopy").def("restore", &StateCopy::restore);
  m.class_<OptimizerCore>("OptimizerCore")
      .def(torch::init<std::string, std::string>())
      .def("add_group", &OptimizerCore::add_group)
      .def("option_names", &OptimizerCore::option_names)
      .def("check_options", &OptimizerCore::check_options)
      .def("parts", &OptimizerCore::parts)
      .def("moments", &OptimizerCore::moments)
      .def("extras", &OptimizerCore::extras)
      .def("takes_parts", &OptimizerCore::takes_parts)
      .def("split", &OptimizerCore::split)
      .def("pop_group", &OptimizerCore::pop_group)
      .def("set_options", &OptimizerCore::set_options)
      .def("replace_params", &OptimizerCore::replace_params)
      .def("set_offload", &OptimizerCore::set_offload)
      .def("host_bytes", &OptimizerCore::host_bytes)
      .def("set_max_grad_norm", &OptimizerCore::set_max_grad_norm)
      .def("set_step_in_backward", &OptimizerCore::set_step_in_backward)
      .def("set_accumulate_dtype", &OptimizerCore::set_accumulate_dtype)
      .def("step", &OptimizerCore::step)
      .def("set_train_mode", &OptimizerCore::set_train_mode)
      .def("on_gradient", &OptimizerCore::on_gradient)
      .def("add_sum_to_gradient", &OptimizerCore::add_sum_to_gradient)
      .def("has_sums", &OptimizerCore::has_sums)
      .def("set_takes_norms", &OptimizerCore::set_takes_norms)
      .def("take_squares", &OptimizerCore::take_squares)
      .def("whole_square", &OptimizerCore::whole_square)
      .def("is_unfinished", &OptimizerCore::is_unfinished)
      .def("begin_sums", &OptimizerCore::begin_sums)
      .def("set_accumulating", &OptimizerCore::set_accumulating)
      .def("flush", &OptimizerCore::flush)
      .def("discard", &OptimizerCore::discard)
      .def("settle", &OptimizerCore::settle)
      .def("drop", &OptimizerCore::drop)
      .def("layouts_made", &OptimizerCore::layouts_made)
      .def("grad_norm", &OptimizerCore::grad_norm)
      .def("set_grad_norm", &OptimizerCore::set_grad_norm)
      .def("states", &OptimizerCore::states)
      .def("split_state", &OptimizerCore::split_state)
      .def("copy_state", &OptimizerCore::copy_state)
      .def("writes", &OptimizerCore::writes)
      .def("is_split", &OptimizerCore::is_split)
      .def("arenas", &OptimizerCore::arenas)
      .def("load", &OptimizerCore::load);
}

}  // namespace shoestring::optim
