#pragma once

// The host's side of an optimizer's operator, for any rule (kernels/optimizer.h): what must fit, contiguity, arenas,
// threads and launches. An operator's own file has its schema's arguments and its options.

#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/List.h>

#include "kernels/optimizer.h"
#include "ops/cuda.h"

namespace shoestring::optimizer {

using at::Tensor;
using kernels::kStateBlock;
using OptionalTensor = std::optional<Tensor>;
using OptionalTensors = c10::List<OptionalTensor>;

// A moment of all parameters; its scale's name has _scale behind.
struct Arena {
  const char* name;
  const Tensor& values;
  const OptionalTensor& scale;
};

// The arguments that all operators have, under the names of their schemas.
struct Arguments {
  const char* op;
  at::TensorList params;
  const OptionalTensors& grads;
  const Tensor& step;
  c10::ArrayRef<Arena> moments;
  const OptionalTensor& lr_tensor;
  const OptionalTensor& grad_scale;
  const OptionalTensor& clip_coef;
  const OptionalTensor& found_inf;

  bool quantized() const { return moments[0].scale.has_value(); }
};

// A parameter with a gradient, both contiguous.
struct Stepped {
  int64_t index, block;  // among the parameters; of the arena, at which its state begins
  Tensor param, grad;
  Tensor strided;  // the parameter itself, where `param` is a copy

  kernels::WeightType type() const;
};

int64_t blocks_of(const Tensor& param);

void check_at_least_zero(const char* op, const char* name, double number);
void check_fraction(const char* op, const char* name, double number);  // [0, 1)
void check_options(const Arguments& a, const kernels::StepOptions& options);

/// The parameters to step. Everything is checked before anything changes.
std::vector<Stepped> checked(const Arguments& a);
void make_contiguous(std::vector<Stepped>& work);
void copy_back(const std::vector<Stepped>& work);

/// An optimizer step is no part of a graph: an error where one would have to be.
void check_not_recorded(const Arguments& a);

/// body(parameter among `work`, its first block, one past the last), over the blocks of all of them, in threads.
void over_blocks(const std::vector<Stepped>& work, c10::function_ref<void(size_t, int64_t, int64_t)> body);

/// For a kernel, which reads moments in vectors.
void check_aligned(const Arguments& a);

template <class Options>
Options with_numbers(Options options, const Arguments& a) {
  const auto number = [](const OptionalTensor& t) { return t.has_value() ? t->const_data_ptr<float>() : nullptr; };
  options.lr_tensor = number(a.lr_tensor);
  options.grad_scale = number(a.grad_scale);
  options.clip_coef = number(a.clip_coef);
  options.found_inf = number(a.found_inf);
  return options;
}

template <class Rule>
kernels::OptimizerState<Rule> state_of(const Arguments& a) {
  kernels::OptimizerState<Rule> state;
  for (int k = 0; k < Rule::kMoments; ++k) {
    state.moment[k] = a.moments[k].values.mutable_data_ptr();
    state.scale[k] = a.quantized() ? a.moments[k].scale->template mutable_data_ptr<float>() : nullptr;
  }
  return state;
}

template <class Rule>
void step_cpu(const Arguments& a, const typename Rule::Options& plain, const kernels::OptimizerTable<Rule>& kernels) {
  std::vector<Stepped> stepped = checked(a);
  const auto options = with_numbers(plain, a);
  if (stepped.empty() || options.skips()) return;
  make_contiguous(stepped);
  std::vector<kernels::OptimizerTensor<Rule>> work;
  work.reserve(stepped.size());
  Rule rule{};
  const auto state = state_of<Rule>(a);
  const int64_t size = a.quantized() ? 1 : sizeof(float);
  float* steps = a.step.mutable_data_ptr<float>();
  float previous = -1;
  for (const Stepped& s : stepped) {
    steps[s.index] += 1;
    if (steps[s.index] != previous) {  // nearly always the same for all
      previous = steps[s.index];
      rule = options.rule(previous);
    }
    auto& t = work.emplace_back();
    t.rule = rule;
    t.type = s.type();
    t.param = s.param.mutable_data_ptr();
    t.grad = s.grad.const_data_ptr();
    for (int k = 0; k < Rule::kMoments; ++k) {
      t.moment[k] = static_cast<char*>(state.moment[k]) + s.block * kStateBlock * size;
      t.scale[k] = a.quantized() ? state.scale[k] + s.block : nullptr;
    }
    t.count = s.param.numel();
  }
  over_blocks(stepped, [&](size_t i, int64_t first, int64_t last) { kernels.step(work[i], first, last); });
  copy_back(stepped);
}

// Whatever lies on the device is read there: nothing waits for it.
template <class Rule>
void step_cuda(const Arguments& a, const typename Rule::Options& plain) {
  std::vector<Stepped> stepped = checked(a);
  if (stepped.empty()) return;
  const c10::OptionalDeviceGuard guard(a.step.device());
  check_aligned(a);
  make_contiguous(stepped);
  std::vector<kernels::OptimizerEntry> entries(a.params.size(), {nullptr, nullptr, 0, kernels::kNoGradient, 0, 0});
  for (const Stepped& s : stepped) {
    entries[s.index] = {s.param.mutable_data_ptr(), s.grad.const_data_ptr(), static_cast<uint64_t>(s.param.numel()),
                        static_cast<uint64_t>(s.type()), static_cast<uint32_t>(s.block), 0};
  }
  const Tensor rules = at::empty({a.step.numel(), sizeof(Rule)}, a.step.options().dtype(at::kByte));
  const auto& kernels = cuda::table<kernels::OptimizerCuda<Rule>>(Rule::kName);
  check_launch(a.op, kernels.step(entries.data(), entries.size(), with_numbers(plain, a), state_of<Rule>(a),
                                  a.step.mutable_data_ptr<float>(), static_cast<Rule*>(rules.mutable_data_ptr()),
                                  stream_of(a.step)));
  copy_back(stepped);
}

}  // namespace shoestring::optimizer
