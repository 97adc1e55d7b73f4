#pragma once

// The checked arguments of an attention call, shared by the CPU, the CUDA and the autograd code.

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

/// Arguments that are not tensors. Autograd saves them by name.
constexpr const char* kOptions[] = {"causal", "window", "softcap", "scale", "dropout_p", "deterministic"};

/// The checked arguments of a call. Sizes may be symbolic until problem() is called.
struct Call {
  explicit Call(const BoxedArguments& arguments);

  bool packed() const { return cu_seqlens_q.has_value(); }
  at::SymDimVector out_sizes() const;
  at::SymDimVector lse_sizes() const;
  /// Returns an empty tensor of out_sizes(). Its dimensions have the same order in memory as q's.
  Tensor empty_out() const;

  /// Returns the call in the form that kernels take. The result points into this call's tensors, or into
  /// copies of tensors that kernels cannot read directly. The call owns these copies.
  kernels::AttentionProblem problem() const;

  Tensor q, k, v;
  OptionalTensor bias, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k, seed;
  bool causal;
  int64_t left, right;  // tokens that a query sees to each side; -1: no limit
  double softcap, scale, dropout_p;
  bool deterministic;

 private:
  void check() const;
  mutable std::vector<Tensor> kept_;
};

/// Returns the strides of a (batch, heads, tokens, features) or (tokens, heads, features) tensor. The stride
/// of the features is 1.
kernels::HeadStrides strides_of(const Tensor& t);
/// Returns t, or a copy of t if its features are not contiguous.
Tensor with_features_together(const Tensor& t);

struct Result {
  Tensor out;  // output, allocated by empty_out()
  Tensor lse;  // log-sum-exp of each query, lse_sizes(), fp32 (fp64 for fp64)
};

/// Inputs of backward, which computes the gradients of sum(grad_out * out) + sum(grad_lse * lse) that `mask`
/// selects.
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
// Compute attention in fp64 on the CPU, with PyTorch's operators on one block of queries at a time.
Result forward_double(const Call& call);
Gradients backward_double(const Call& call, const Upstream& upstream);

template <auto kFunction>
auto boxed() {
  return torch::CppFunction::makeFromBoxedFunction<kFunction>();
}

/// Returns the gradient of the sinks. delta is sum(grad_out * out) - grad_lse of each query, in lse's shape.
Tensor sinks_gradient(const Call& call, const Tensor& lse, const Tensor& delta);

/// Returns the gradient of a bias that all keys of a query share, (..., 1).
Tensor shared_bias_gradient(const Call& call, const Tensor& lse, const Tensor& delta,
                            const OptionalTensor& grad_lse);
inline bool has_shared_bias(const Call& call) { return call.bias && call.bias->size(-1) == 1; }

}  // namespace shoestring::attend
