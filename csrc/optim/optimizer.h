#pragma once

// Host side of the optimizers' operators, for any update rule (optim/optimizer_table.h): their arguments,
// with which they are defined, called and read; checks; and threads or kernels. The options that only one
// operator has are those of the optimizer class (optim/rule.h).

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/FunctionRef.h>
#include <torch/library.h>

#include "core/arguments.h"
#include "core/cuda.h"
#include "optim/optimizer_table.h"
#include "optim/rule.h"

namespace shoestring::optim::detail {

/// Returns the moments of an update rule, which has given their signs and lengths already, by their names.
template <class KernelRule>
std::vector<Moment> moments_of(const char* const (&names)[KernelRule::kMoments]) {
  std::vector<Moment> moments;
  for (int k = 0; k < KernelRule::kMoments; ++k) {
    moments.emplace_back(names[k], KernelRule::kSigned[k], kernels::LongMoments<KernelRule>::has(k));
  }
  return moments;
}

}  // namespace shoestring::optim::detail

namespace shoestring::optim::ops {

using at::Tensor;
using kernels::kStateBlock;
using OptionalTensor = std::optional<Tensor>;

// One moment (such as exp_avg) of all parameters, in one arena, and its scales.
struct Moment {
  const detail::Moment* rule;
  OptionalTensor values{}, scale{};

  const char* name() const { return rule->name.c_str(); }
};

// The arguments of an optimizer's operator; schema.cpp describes them.
struct Arguments {
  /// The arguments own, lr, maximize and seed are those of `options`. The elements of `own` refer to
  /// `options`.
  explicit Arguments(const LowMemoryOptions& options);

  const detail::Rule& rule;
  std::vector<Tensor> params{};
  std::vector<OptionalTensor> grads{};
  Tensor step{};
  std::vector<Moment> moments{};
  std::vector<std::vector<Tensor>> extras;  // the tensors of each name in rule.extras
  double lr;
  std::vector<detail::Field> own;  // the options that only this optimizer class has
  bool maximize;
  OptionalTensor lr_tensor{}, grad_scale{}, clip_coef{}, found_inf{}, weight_remainder{}, accumulated{};
  bool stochastic_rounding = false;
  int64_t seed;
  std::vector<int64_t> numbers{};
  // first_block: index of the block in the first parameter at which the arenas begin. blocks: number of
  // blocks in each arena; none for all blocks of all parameters.
  int64_t first_block = 0;
  std::optional<int64_t> blocks{};

  /// Calls the operator through PyTorch's dispatcher.
  void call() const;

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit.changed("params", self.params);
    visit("grads", self.grads);
    visit.changed("step", self.step);
    for (auto& moment : self.moments) {
      visit.state(moment.name(), moment.values, moment.rule->is_optional);
      if (!moment.rule->is_long) visit.state(moment.rule->scale.c_str(), moment.scale, true);
    }
    for (size_t i = 0; i < self.extras.size(); ++i) visit.changed(self.rule.extras[i].name, self.extras[i]);
    visit.keywords();
    visit.required("lr", self.lr);
    detail::visit_arguments(self.own, visit);
    visit("maximize", self.maximize);
    visit("lr_tensor", self.lr_tensor);
    visit("grad_scale", self.grad_scale);
    visit("clip_coef", self.clip_coef);
    visit("found_inf", self.found_inf);
    visit.changed("weight_remainder", self.weight_remainder);
    visit.changed("accumulated", self.accumulated);
    visit("stochastic_rounding", self.stochastic_rounding);
    visit("seed", self.seed);
    visit("numbers", self.numbers);
    visit("first_block", self.first_block);
    visit("blocks", self.blocks);
  }
};

// The arguments of one call of an optimizer's operator, as the operator reads them. `moments` does not
// contain the moments that are None.
class Call : public Arguments {
 public:
  /// Reads the `count` arguments from the stack, and this operator's own options into `options`. Raises if an
  /// option is out of range.
  Call(const torch::jit::Stack& stack, size_t count, LowMemoryOptions& options);

  const char* op;        // the operator's name, without the namespace
  int64_t arena_blocks;  // number of blocks in each arena

  /// Returns whether the arenas hold all blocks of all parameters.
  bool is_whole() const { return first_block == 0 && !blocks; }

  uint32_t number_of(int64_t param) const {
    return static_cast<uint32_t>(numbers.empty() ? param : numbers[param]);
  }

  /// Returns the options that the kernels of all operators take.
  kernels::StepOptions options(double weight_decay) const;
};

// A parameter that has a gradient.
struct Stepped {
  // index: index of the parameter in the operator call. block: block of the arena at which the parameter's
  // state begins; negative if the arena begins after the parameter's first block.
  int64_t index, block;
  int64_t first, last;  // range of the parameter's blocks to step
  Tensor param, grad;
  Tensor strided;      // the original parameter, if `param` is a contiguous copy
  int64_t grad_begin;  // index in the parameter of the first element that `grad` has

  /// Returns the address at which the gradient of the parameter's first element would be.
  const void* grad_data() const {
    return static_cast<const char*>(grad.const_data_ptr()) - grad_begin * grad.element_size();
  }
};

kernels::ElementType type_of(const Tensor& t);
int64_t blocks_of(const Tensor& param);

/// Checks all arguments of the operator call before anything changes. Returns the parameters that have a
/// gradient.
std::vector<Stepped> checked(const Call& call);
void make_contiguous(std::vector<Stepped>& work);
void copy_back(const std::vector<Stepped>& work);

/// Sets the accumulated gradients of the parameters in `work` to zero. A skipped optimizer step does only
/// this.
void drop_accumulated(const Call& call, const std::vector<Stepped>& work);

/// Returns the storage format that all moments share. (Long moments change too little per step for codes.
/// They are stored as bf16 if the other moments are codes.)
kernels::StateType state_of(const Call& call);

/// Splits the blocks of all parameters in `work` into ranges. Calls body(index in `work`, first block, last
/// block + 1) for each range, in parallel.
void over_blocks(const std::vector<Stepped>& work, c10::function_ref<void(size_t, int64_t, int64_t)> body);

/// Raises unless the arenas are aligned to 16 bytes, because the CUDA kernels read them in vectors.
void check_aligned(const Call& call);

template <class Rule>
auto arenas_of(const Call& call) {
  kernels::OptimizerArenas<Rule::kMoments> a{};
  a.type = state_of(call);
  for (int k = 0; k < Rule::kMoments; ++k) {
    const Moment& moment = call.moments[k];
    a.moment[k] = moment.values->mutable_data_ptr();
    a.scale[k] = moment.scale ? moment.scale->mutable_data_ptr<float>() : nullptr;
  }
  a.rounding = kernels::Rounding::kNearest;
  if (call.stochastic_rounding) a.rounding = kernels::Rounding::kStochastic;
  if (call.weight_remainder) {
    a.rounding = kernels::Rounding::kRemainder;
    a.remainder = call.weight_remainder->mutable_data_ptr<int16_t>();
  }
  if (call.accumulated) {
    a.accumulated = call.accumulated->mutable_data_ptr();
    a.accumulated_type = type_of(*call.accumulated);
  }
  a.seed = call.seed;
  return a;
}

/// The CPU implementation of an operator that applies an update rule to each element and does nothing else.
/// Op provides Rule, Options (the options of the optimizer class), options(call, own), which converts them to
/// Rule::Options, and table(), the CPU kernels.
template <class Op>
void step_cpu(const Call& call, const typename Op::Options& own) {
  using Rule = typename Op::Rule;
  const auto options = Op::options(call, own);
  std::vector<Stepped> stepped = checked(call);
  if (stepped.empty()) return;
  const auto arenas = arenas_of<Rule>(call);
  if (options.skips()) return drop_accumulated(call, stepped);
  make_contiguous(stepped);
  std::vector<kernels::OptimizerTensor<Rule>> work;
  work.reserve(stepped.size());
  Rule rule{};
  float* steps = call.step.mutable_data_ptr<float>();
  float previous = -1;
  for (const Stepped& s : stepped) {
    steps[s.index] += 1;
    // The rule holds coefficients that depend on the step number. Nearly all parameters have the same step
    // number, so the previous parameter's rule can usually be used again.
    if (steps[s.index] != previous) {
      previous = steps[s.index];
      rule = options.rule(previous);
    }
    work.push_back({rule, static_cast<uint32_t>(previous), call.number_of(s.index), type_of(s.param),
                    type_of(s.grad), s.param.mutable_data_ptr(), s.grad_data(), s.block, s.param.numel()});
  }
  const auto& kernels = Op::table();
  over_blocks(stepped,
              [&](size_t i, int64_t first, int64_t last) { kernels.step(work[i], arenas, first, last); });
  copy_back(stepped);
}

// The address that stands for the gradient of a parameter without elements. A null pointer would mean that
// the parameter has no gradient.
inline constexpr char kNoElements = 0;

// The CUDA implementation of an operator that applies an update rule to each element and does nothing else.
// The kernel reads step numbers and tensor options from device memory, so the host does not wait for the
// device.
template <class Op>
void step_cuda(const Call& call, const typename Op::Options& own) {
  using Rule = typename Op::Rule;
  const auto options = Op::options(call, own);
  std::vector<Stepped> stepped = checked(call);
  if (stepped.empty()) return;
  TORCH_CHECK(call.is_whole(), call.op, ": blocks: expected None on CUDA, received a part of a parameter");
  const c10::OptionalDeviceGuard guard(call.step.device());
  check_aligned(call);
  const auto arenas = arenas_of<Rule>(call);
  make_contiguous(stepped);
  std::vector<kernels::OptimizerEntry> entries(call.params.size(), {nullptr, nullptr, 0, 0, 0, 0, 0, 0});
  for (const Stepped& s : stepped) {
    // A parameter without elements has no data pointer. Its gradient pointer is never read, but must not be
    // null.
    entries[s.index] = {s.param.mutable_data_ptr(),
                        s.param.numel() > 0 ? s.grad.const_data_ptr() : &kNoElements,
                        static_cast<uint64_t>(s.param.numel()),
                        call.number_of(s.index),
                        static_cast<uint64_t>(type_of(s.param)),
                        static_cast<uint64_t>(type_of(s.grad)),
                        static_cast<uint32_t>(s.block),
                        0};
  }
  const Tensor rules = at::empty({call.step.numel(), sizeof(Rule)}, call.step.options().dtype(at::kByte));
  const auto& kernels = cuda::table<kernels::OptimizerCuda<Rule>>(Rule::kName);
  check_launch(call.op, kernels.step(entries.data(), entries.size(), options, arenas,
                                     call.step.mutable_data_ptr<float>(),
                                     static_cast<Rule*>(rules.mutable_data_ptr()), stream_of(call.step)));
  copy_back(stepped);
}

template <class Options>
using Run = void (*)(const Call&, const Options&);

template <class Options, Run<Options> run>
void boxed(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  Options options;
  run(Call(*stack, count, options), options);
  torch::jit::drop(*stack, count);
}

/// The implementation for the dispatch key Autograd: calls the operator without autograd. Raises if grad mode
/// is on and a parameter requires a gradient, since autograd cannot record an optimizer step.
void below_autograd(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// The implementation for meta tensors does nothing, because an optimizer step returns no tensor.
inline void on_meta(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  torch::jit::drop(*stack, op.schema().arguments().size());
}

/// Registers the implementations of an optimizer's operator for as long as the library is loaded.
template <class Options, Run<Options> cpu, Run<Options> cuda>
struct Registered {
  std::vector<torch::Library> keys;

  Registered() {
    const char* op = detail::Access::rule(Options()).op;
    add(op, c10::DispatchKey::CPU, torch::CppFunction::makeFromBoxedFunction<&boxed<Options, cpu>>());
    add(op, c10::DispatchKey::CUDA, torch::CppFunction::makeFromBoxedFunction<&boxed<Options, cuda>>());
    // With sparse gradients, the operator also runs the dense implementation, which reports that sparse
    // gradients are not supported.
    add(op, c10::DispatchKey::SparseCPU, torch::CppFunction::makeFromBoxedFunction<&boxed<Options, cpu>>());
    add(op, c10::DispatchKey::SparseCUDA, torch::CppFunction::makeFromBoxedFunction<&boxed<Options, cuda>>());
    add(op, c10::DispatchKey::Autograd, torch::CppFunction::makeFromBoxedFunction<&below_autograd>());
    add(op, c10::DispatchKey::Meta, torch::CppFunction::makeFromBoxedFunction<&on_meta>());
  }

 private:
  void add(const char* op, c10::DispatchKey key, torch::CppFunction&& f) {
    keys.emplace_back(torch::Library::IMPL, "shoestring", key, __FILE__, __LINE__).impl(op, std::move(f));
  }
};

template <class Op>
using RegisteredRule = Registered<typename Op::Options, step_cpu<Op>, step_cuda<Op>>;

}  // namespace shoestring::optim::ops
