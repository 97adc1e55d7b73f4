#pragma once

// What the CPU and the CUDA side of attention share, and what autograd needs of it.

#include <array>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "attention/attention_table.h"
#include "core/call.h"

namespace shoestring::attend {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kOp = "attention";

enum Input { kQ, kK, kV, kBias, kSinks, kInputs };
using Mask = std::array<bool, kInputs>;
using Gradients = std::array<Tensor, kInputs>;

/// Arguments that are neither differentiated nor big: autograd keeps them by name.
constexpr const char* kOptions[] = {"causal", "window", "softcap", "scale", "dropout_p", "deterministic"};

/// The arguments of a call, checked; sizes may be symbolic until problem().
struct Call {
  explicit Call(const BoxedArguments& arguments);

  bool packed() const { return cu_seqlens_q.has_value(); }
  at::SymDimVector out_sizes() const;
  at::SymDimVector lse_sizes() const;
  /// An empty tensor of out_sizes whose dimensions lie in memory as q's do.
  Tensor empty_out() const;

  /// For kernels. Refers to the tensors of this call, of which those that kernels do not read as they are
  /// were copied.
  kernels::AttentionProblem problem() const;

  Tensor q, k, v;
  OptionalTensor bias, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k, seed;
  bool causal;
  int64_t left, right;  // -1: unlimited
  double softcap, scale, dropout_p;
  bool deterministic;

 private:
  void check() const;
  mutable std::vector<Tensor> kept_;
};

/// The strides of a (batch, heads, tokens, features) or (tokens, heads, features) tensor, whose last one
/// is 1.
kernels::HeadStrides strides_of(const Tensor& t);
/// t, or a copy of it whose features lie side by side.
Tensor with_features_together(const Tensor& t);

struct Result {
  Tensor out;  // empty_out()
  Tensor lse;  // lse_sizes(), fp32 (fp64 for fp64)
};

/// Gradients of sum(grad_out out) + sum(grad_lse lse) that the mask asks for.
struct Upstream {
  Tensor grad_out;
  OptionalTensor grad_lse;
  Tensor out, lse;
  Mask mask;
};

Result forward_cpu(const Call& call);
Gradients backward_cpu(const Call& call, const Upstream& upstream);
Result forward_cuda(const Call& call);
Gradients backward_cuda(const Call& call, const Upstream& upstream);
// fp64, with operators of PyTorch, a block of queries at a time.
Result forward_double(const Call& call);
Gradients backward_double(const Call& call, const Upstream& upstream);

template <auto kFunction>
auto boxed() {
  return torch::CppFunction::makeFromBoxedFunction<kFunction>();
}

/// The sinks' gradient; delta is sum(grad_out out) - grad_lse of each query, in lse's shape.
Tensor sinks_gradient(const Call& call, const Tensor& lse, const Tensor& delta);

/// The gradient of a bias that all keys of a query share, (..., 1).
Tensor shared_bias_gradient(const Call& call, const Tensor& lse, const Tensor& delta,
                            const OptionalTensor& grad_lse);
inline bool has_shared_bias(const Call& call) { return call.bias && call.bias->size(-1) == 1; }

}  // namespace shoestring::attend
