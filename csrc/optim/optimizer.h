#pragma once

// The host's side of an optimizer's operator, for any rule (optim/optimizer_table.h): its arguments, read
// from the schema by name; what must fit; contiguity, arenas, threads and launches. An operator's own file
// has its options.

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

// A moment of all parameters; its scale's name has _scale behind. A long one (optim/optimizer_table.h) has
// none.
struct Moment {
  const char* name;
  bool is_signed;
  Tensor values;
  OptionalTensor scale;
  bool is_long = false;
};

// The arguments of a call.
class Call : public BoxedArguments {
 public:
  Call(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

  const char* op;  // without the namespace
  std::vector<Tensor> params;
  std::vector<OptionalTensor> grads;
  std::vector<int64_t> numbers;
  Tensor step;
  OptionalTensor lr_tensor, grad_scale, clip_coef, found_inf, weight_remainder, accumulated;
  int64_t first_block, blocks;  // of the first parameter; of the arenas

  /// Whether the arenas hold the blocks of whole parameters.
  bool is_whole() const { return first_block == 0 && !(*this)["blocks"].isInt(); }

  uint32_t number_of(int64_t param) const {
    return static_cast<uint32_t>(numbers.empty() ? param : numbers[param]);
  }
  double at_least_zero(const char* name) const;
  double fraction(const char* name) const;  // in [0, 1)

  /// lr, weight_decay (in an operator that has it), maximize, and the numbers in tensors.
  kernels::StepOptions options() const;
};

// A parameter with a gradient, both contiguous.
struct Stepped {
  int64_t index, block;  // among the parameters; of the arena, at which its state begins (or would, below 0)
  int64_t first, last;   // of its own blocks, those to step
  Tensor param, grad;
  Tensor strided;  // the parameter itself, where `param` is a copy
};

kernels::ElementType type_of(const Tensor& t);
int64_t blocks_of(const Tensor& param);

/// The parameters to step. Everything is checked before anything changes.
std::vector<Stepped> checked(const Call& call, const std::vector<Moment>& moments);
void make_contiguous(std::vector<Stepped>& work);
void copy_back(const std::vector<Stepped>& work);

/// What a skipped step does.
void drop_accumulated(const Call& call, const std::vector<Stepped>& work);

/// How the moments, of which all but long ones are alike, are kept.
kernels::StateType state_of(const Call& call, const std::vector<Moment>& moments);

/// body(parameter among `work`, its first block, one past the last), over the blocks of all of them, in
/// threads.
void over_blocks(const std::vector<Stepped>& work, c10::function_ref<void(size_t, int64_t, int64_t)> body);

/// For a kernel, which reads arenas in vectors.
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

/// An operator that is a rule's kernels and nothing else. Op has the Rule, kNames of its moments,
/// options(call), and table(), the CPU kernels.
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
    if (steps[s.index] != previous) {  // nearly always the same for all
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

// The gradient's address of a parameter without elements: null would mean that it has no gradient.
inline constexpr char kNoElements = 0;

// Whatever lies on the device is read there: nothing waits for it.
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

/// An optimizer step is no part of a graph: an error where one would have to be.
void below_autograd(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// Nothing is returned and nothing allocated: under tracing only what cannot depend on values is checked.
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
    // Sparse gradients come here as well, to be refused in words.
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
