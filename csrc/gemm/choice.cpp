// Chooses between this package's products and PyTorch's for dense layers.

#include "gemm/choice.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <limits>
#include <map>
#include <mutex>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <shoestring/gemm/ops.h>

#include "core/call.h"
#include "gemm/linear.h"

namespace shoestring::gemm {
namespace {

using at::Tensor;
using Clock = std::chrono::steady_clock;

// A group is measured with as many tokens as give kFlop floating-point operations, within bounds. Products of
// fewer tokens would measure how fast weights are read.
constexpr double kFlop = 8e8;
constexpr int64_t kFewestTokens = 256, kMostTokens = 2048;
// The two ways take turns until this time has passed, and have at least two turns, the first of which also
// prepares kernels.
constexpr double kSeconds = 0.02;
constexpr int kLeastTurns = 2, kMostTurns = 6;
// A group is ours without more turns if ours is so many times faster than PyTorch is with few tokens.
constexpr int64_t kFew = 8;
constexpr double kFarSlower = 16;
// Batches of fewer tokens, as in generation, are left to PyTorch.
constexpr int64_t kLeastTokens = 32;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

bool is_amd() {
#if defined(__x86_64__)
  return __builtin_cpu_is("amd") != 0;
#else
  return false;
#endif
}

// Returns the time of forward and backward of a group by this package over the time by PyTorch, each the
// least of several turns.
double measured_ratio(const LayerGroup& group) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const c10::impl::ExcludeDispatchKeyGuard no_modes(c10::python_ks);
  const auto compute = group.compute, dtype = group.dtype;
  const auto tokens = static_cast<int64_t>(std::clamp(kFlop / (2.0 * static_cast<double>(group.weights())),
                                                      double{kFewestTokens}, double{kMostTokens}));
  // Times do not depend on the numbers. Ones need no generator of random numbers.
  const auto ones = [](int64_t rows, int64_t columns, at::ScalarType type) {
    return at::ones({rows, columns}, at::device(at::kCPU).dtype(type));
  };
  const Tensor x = ones(tokens, group.in_features, dtype);
  std::vector<Tensor> weights, grads;
  OptionalTensors upstream;
  c10::List<bool> mask({true});
  for (const int64_t out : group.out_features) {
    weights.push_back(ones(out, group.in_features, dtype));
    grads.push_back(ones(tokens, out, compute));
    upstream.push_back(grads.back());
    mask.push_back(true);
  }
  static auto forward = find<LinearGroupSignature>("shoestring::linear_group");
  static auto backward = find<LinearGroupBackwardSignature>("shoestring::_linear_group_backward");
  const auto run_own = [&] {
    const Tensor rounded = x.to(compute);
    forward.call(rounded, weights, OptionalTensors(), compute, 0);
    backward.call(upstream, rounded, weights, compute, dtype, 0, mask);
  };
  const auto run_library = [&] {
    const Tensor rounded = x.to(compute);
    std::vector<Tensor> rounded_weights;
    for (const Tensor& weight : weights) {
      rounded_weights.push_back(weight.to(compute));
      at::linear(rounded, rounded_weights.back());
    }
    Tensor grad_x;
    for (size_t i = 0; i < weights.size(); ++i) {
      const Tensor part = at::mm(grads[i], rounded_weights[i]);
      grad_x = i == 0 ? part : grad_x.add_(part);
      at::mm(grads[i].t(), rounded).to(dtype);
    }
    grad_x.to(dtype);
  };
  // Returns the least time of up to three turns. One turn of a small product may take a hundred times as long
  // as the next, if the system lets another program run meanwhile.
  const auto time_of = [](const auto& function) {
    function();  // prepares kernels
    double least = std::numeric_limits<double>::infinity();
    const auto start = Clock::now();
    for (int turn = 0; turn < 3 && (turn < 1 || seconds_since(start) < kSeconds); ++turn) {
      const auto before = Clock::now();
      function();
      least = std::min(least, seconds_since(before));
    }
    return least;
  };
  // On CPUs without AVX-512, PyTorch computes the gradient of x in bf16 without a library, and one turn may
  // take minutes. Where there is a library, a product of few tokens reads the weights at a rate far above the
  // limit.
  if (compute == at::kBFloat16) {
    const Tensor weight = weights[0].to(compute), few = ones(kFew, weight.size(0), compute);
    const double flop = 2.0 * kFew * static_cast<double>(weight.numel());
    const double rate = flop / time_of([&] { at::mm(few, weight); });
    const double own_rate = 6.0 * static_cast<double>(tokens * group.weights()) / time_of(run_own);
    if (rate * kFarSlower < own_rate) return 0;
  }
  std::array<double, 2> least{std::numeric_limits<double>::infinity(),
                              std::numeric_limits<double>::infinity()};
  const auto start = Clock::now();
  for (int turn = 0; turn < kMostTurns && (turn < kLeastTurns || seconds_since(start) < kSeconds); ++turn) {
    for (const bool is_own_turn : {true, false}) {
      const auto before = Clock::now();
      is_own_turn ? run_own() : run_library();
      least[is_own_turn ? 0 : 1] = std::min(least[is_own_turn ? 0 : 1], seconds_since(before));
    }
  }
  return least[0] / least[1];
}

std::optional<at::ScalarType> dtype_of_products(const Tensor& x, at::TensorList weights) {
  const bool castable = x.is_floating_point() && x.scalar_type() != at::kDouble;
  if (castable && at::autocast::is_autocast_enabled(at::kCPU))
    return at::autocast::get_autocast_dtype(at::kCPU);
  for (const Tensor& weight : weights)
    if (weight.scalar_type() != x.scalar_type()) return std::nullopt;
  return x.scalar_type();
}

// Returns whether a class in Python, such as that of fake tensors, computes with the tensor. A measurement
// would time something else.
bool is_of_python(const Tensor& tensor) { return tensor.key_set().has(c10::DispatchKey::Python); }

// Returns whether this package computes the layers.
bool is_own(const Tensor& x, at::TensorList weights) {
  if (is_of_python(x) || std::any_of(weights.begin(), weights.end(), is_of_python)) return false;
  if (weights.empty() || !x.is_cpu() || x.dim() == 0 || x.numel() < kLeastTokens * x.size(-1)) return false;
  for (const Tensor& weight : weights) {
    if (!weight.is_cpu() || weight.dim() != 2 || weight.size(1) != x.size(-1) ||
        weight.scalar_type() != weights[0].scalar_type())
      return false;
  }
  const auto compute = dtype_of_products(x, weights);
  if (!compute.has_value()) return false;
  LayerGroup group{*compute, weights[0].scalar_type(), x.size(-1), {}};
  for (const Tensor& weight : weights) group.out_features.push_back(weight.size(0));
  return choose(group).own;
}

std::tuple<bool, double> linear_choice(at::ScalarType compute, at::ScalarType dtype, int64_t in_features,
                                       at::IntArrayRef out_features) {
  const Choice choice = choose({compute, dtype, in_features, out_features.vec()});
  return {choice.own, choice.seconds};
}

std::vector<Tensor> dense_group(const Tensor& x, at::TensorList weights, const OptionalTensors& biases) {
  return dense_linear_group(x, weights, biases.vec());
}

TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) { m.impl("_linear_choice", linear_choice); }
TORCH_LIBRARY_IMPL(shoestring, CompositeImplicitAutograd, m) { m.impl("_dense_linear_group", dense_group); }

}  // namespace

Choice choose(const LayerGroup& group) {
  static std::mutex mutex;
  static auto& measured = *new std::map<std::tuple<cpu::Capability, int, bool, LayerGroup>, double>;
  double seconds = 0;
  const auto capability = cpu::capability();
  const bool own = chooses_own(capability, is_amd(), group, [&] {
    const std::lock_guard lock(mutex);
    const auto key =
        std::make_tuple(capability, at::get_num_threads(), at::globalContext().userEnabledMkldnn(), group);
    const auto found = measured.find(key);
    if (found != measured.end()) return found->second;
    const auto start = Clock::now();
    const double ratio = measured_ratio(group);
    seconds = seconds_since(start);
    return measured.emplace(key, ratio).first->second;
  });
  return {own, seconds};
}

}  // namespace shoestring::gemm

namespace shoestring {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

std::vector<Tensor> dense_linear_group(const Tensor& x, at::TensorList weights,
                                       const std::vector<OptionalTensor>& biases) {
  if (gemm::is_own(x, weights)) return shoestring::linear_group(x, weights, biases);
  std::vector<Tensor> outputs;
  for (size_t i = 0; i < weights.size(); ++i)
    outputs.push_back(at::linear(x, weights[i], biases.empty() ? OptionalTensor() : biases[i]));
  return outputs;
}

Tensor dense_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  return gemm::is_own(x, {weight}) ? shoestring::linear(x, weight, bias) : at::linear(x, weight, bias);
}

}  // namespace shoestring
