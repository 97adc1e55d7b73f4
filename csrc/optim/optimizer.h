#pragma once

// Host side of the optimizers' operators, for any update rule (optim/optimizer_table.h). It reads arguments
// from the schema by name, checks them, makes tensors contiguous, and starts threads or kernels. Options that
// only one operator has are read in the file of that operator.

#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/FunctionRef.h>
#include <torch/library.h>

#include "core/call.h"
#include "core/cuda.h"
#include "optim/optimizer_table.h"

namespace shoestring::optim::ops {

using at::Tensor;
using kernels::kStateBlock;
using OptionalTensor = std::optional<Tensor>;

// One moment (such as exp_avg) of all parameters, in one arena. Its scales are the operator's argument
// <name>_scale. A long moment, which changes by less than one quantisation level per step, is never stored as
// codes and has no scales.
struct Moment {
  const char* name;
  bool is_signed;
  Tensor values;
  OptionalTensor scale;
  bool is_long = false;
};

// The arguments of one call of an optimizer's operator.
class Call : public BoxedArguments {
 public:
  Call(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

  const char* op;  // the operator's name, without the namespace
  std::vector<Tensor> params;
  std::vector<OptionalTensor> grads;
  std::vector<int64_t> numbers;
  Tensor step;
  OptionalTensor lr_tensor, grad_scale, clip_coef, found_inf, weight_remainder, accumulated;
  // first_block: index of the block in the first parameter at which the arenas begin. blocks: number of
  // blocks in each arena.
  int64_t first_block, blocks;

  /// Returns whether the arenas hold all blocks of all parameters.
  bool is_whole() const { return first_block == 0 && !(*this)["blocks"].isInt(); }

  uint32_t number_of(int64_t param) const {
    return static_cast<uint32_t>(numbers.empty() ? param : numbers[param]);
  }
  double at_least_zero(const char* name) const;
  double fraction(const char* name) const;  // returns the argument `name`; raises unless it is in [0, 1)

  /// Reads lr, weight_decay (if the operator has it), maximize, lr_tensor, grad_scale, clip_coef and
  /// found_inf.
  kernels::StepOptions options() const;
};

// A parameter that has a gradient.
struct Stepped {
  // index: index of the parameter in the operator call. block: block of the arena at which the parameter's
  // state begins; negative if the arena begins after the parameter's first block.
  int64_t index, block;
  int64_t first, last;  // range of the parameter's blocks to step
  Tensor param, grad;
  Tensor strided;  // the original parameter, if `param` is a contiguous copy
};

kernels::ElementType type_of(const Tensor& t);
int64_t blocks_of(const Tensor& param);

/// Checks all arguments of the operator call before anything changes. Returns the parameters that have a
/// gradient.
std::vector<Stepped> checked(const Call& call, const std::vector<Moment>& moments);
void make_contiguous(std::vector<Stepped>& work);
void copy_back(const std::vector<Stepped>& work);

/// Sets the accumulated gradients of the parameters in `work` to zero. A skipped optimizer step does only
/// this.
void drop_accumulated(const Call& call, const std::vector<Stepped>& work);

/// Returns the storage format that all moments share. (Long moments change too little per step for codes.
/// They are stored as bf16 if the other moments are codes.)
kernels::StateType state_of(const Call& call, const std::vector<Moment>& moments);

/// Splits the blocks of all parameters in `work` into ranges. Calls body(index in `work`, first block, last
/// block + 1) for each range, in parallel.
void over_blocks(const std::vector<Stepped>& work, c10::function_ref<void(size_t, int64_t, int64_t)> body);

/// Raises unless the arenas are aligned to 16 bytes, because the CUDA kernels read them in vectors.
void check_aligned(const Call& call, const std::vector<Moment>& moments);

template <class Op>
std::vector<Moment> moments_of(const Call& call) {
  std::vector<Moment> moments;
  for (int k = 0; k < Op::Rule::kMoments; ++k) {
    const char* name = Op::kNames[k];
    const bool is_long = kernels::LongMoments<typename Op::Rule>::has(k);
    const auto scale = is_long ? OptionalTensor() : call.optional((std::string(name) + "_scale").c_str());
    moments.push_back({name, Op::Rule::kSigned[k], call.tensor(name), scale, is_long});
  }
  return moments;
}

template <class Rule>
auto arenas_of(const Call& call, const std::vector<Moment>& moments) {
  kernels::OptimizerArenas<Rule::kMoments> a{};
  a.type = state_of(call, moments);
  for (int k = 0; k < Rule::kMoments; ++k) {
    a.moment[k] = moments[k].values.mutable_data_ptr();
    a.scale[k] = moments[k].scale ? moments[k].scale->mutable_data_ptr<float>() : nullptr;
  }
  a.rounding = kernels::Rounding::kNearest;
  if (call["stochastic_rounding"].toBool()) a.rounding = kernels::Rounding::kStochastic;
  if (call.weight_remainder) {
    a.rounding = kernels::Rounding::kRemainder;
    a.remainder = call.weight_remainder->mutable_data_ptr<int16_t>();
  }
  if (call.accumulated) {
    a.accumulated = call.accumulated->mutable_data_ptr();
    a.accumulated_type = type_of(*call.accumulated);
  }
  a.seed = call["seed"].toInt();
  return a;
}

/// The CPU implementation of an operator that applies an update rule to each element and does nothing else.
/// Op provides Rule, kNames (of the moments), options(call), and table(), the CPU kernels.
template <class Op>
void step_cpu(const Call& call) {
  using Rule = typename Op::Rule;
  const auto moments = moments_of<Op>(call);
  const auto options = Op::options(call);
  std::vector<Stepped> stepped = checked(call, moments);
  if (stepped.empty()) return;
  const auto arenas = arenas_of<Rule>(call, moments);
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
                    type_of(s.grad), s.param.mutable_data_ptr(), s.grad.const_data_ptr(), s.block,
                    s.param.numel()});
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
void step_cuda(const Call& call) {
  using Rule = typename Op::Rule;
  const auto moments = moments_of<Op>(call);
  const auto options = Op::options(call);
  std::vector<Stepped> stepped = checked(call, moments);
  if (stepped.empty()) return;
  TORCH_CHECK(call.is_whole(), call.op, ": blocks: expected None on CUDA, received a part of a parameter");
  const c10::OptionalDeviceGuard guard(call.step.device());
  check_aligned(call, moments);
  const auto arenas = arenas_of<Rule>(call, moments);
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

using Run = void (*)(const Call&);

template <Run run>
void boxed(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run(Call(op, *stack));
  torch::jit::drop(*stack, op.schema().arguments().size());
}

/// The implementation for the dispatch key Autograd: calls the operator without autograd. Raises if grad mode
/// is on and a parameter requires a gradient, since autograd cannot record an optimizer step.
void below_autograd(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// The implementation for meta tensors does nothing, because an optimizer step returns no tensor.
inline void on_meta(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  torch::jit::drop(*stack, op.schema().arguments().size());
}

/// Registers an operator's implementations for as long as the library is loaded.
template <Run cpu, Run cuda>
struct Registered {
  std::vector<torch::Library> keys;

  explicit Registered(const char* op) {
    add(op, c10::DispatchKey::CPU, torch::CppFunction::makeFromBoxedFunction<&boxed<cpu>>());
    add(op, c10::DispatchKey::CUDA, torch::CppFunction::makeFromBoxedFunction<&boxed<cuda>>());
    // With sparse gradients, the operator also runs the dense implementation, which reports that sparse
    // gradients are not supported.
    add(op, c10::DispatchKey::SparseCPU, torch::CppFunction::makeFromBoxedFunction<&boxed<cpu>>());
    add(op, c10::DispatchKey::SparseCUDA, torch::CppFunction::makeFromBoxedFunction<&boxed<cuda>>());
    add(op, c10::DispatchKey::Autograd, torch::CppFunction::makeFromBoxedFunction<&below_autograd>());
    add(op, c10::DispatchKey::Meta, torch::CppFunction::makeFromBoxedFunction<&on_meta>());
  }

 private:
  void add(const char* op, c10::DispatchKey key, torch::CppFunction&& f) {
    keys.emplace_back(torch::Library::IMPL, "shoestring", key, __FILE__, __LINE__).impl(op, std::move(f));
  }
};

template <class Op>
using RegisteredRule = Registered<step_cpu<Op>, step_cuda<Op>>;

}  // namespace shoestring::optim::ops
