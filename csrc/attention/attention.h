#pragma once

// The checked arguments of an attention operator, shared by its CPU, CUDA and autograd implementations.

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

/// Names of the arguments of the attention operators that are not tensors. Autograd saves the arguments under
/// these names.
constexpr const char* kOptions[] = {"causal", "window_size", "softcap",
                                    "scale",  "dropout_p",   "deterministic"};

/// The checked arguments of a call of an attention operator. Tensor sizes may be symbolic until problem() is
/// called.
struct Call {
  explicit Call(const BoxedArguments& arguments);

  bool packed() const { return cu_seqlens_q.has_value(); }
  at::SymDimVector out_sizes() const;
  at::SymDimVector lse_sizes() const;
  /// Returns an uninitialised tensor for the output. Its dimensions have the same order in memory as those of
  /// q.
  Tensor empty_out() const;

  /// Returns the arguments as the struct that kernels take. Its pointers point into the tensors of this Call,
  /// or into copies of tensors that kernels cannot read directly. This Call owns the copies.
  kernels::AttentionProblem problem() const;

  Tensor q, k, v;
  OptionalTensor bias, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k, seed;
  bool causal;
  // Number of tokens that a query sees to its left and to its right; -1 for no limit.
  int64_t left, right;
  double softcap, scale, dropout_p;
  bool deterministic;

 private:
  void check() const;
  mutable std::vector<Tensor> kept_;
};

/// Returns the strides of a (batch, heads, tokens, features) or (tokens, heads, features) tensor t, whose
/// features must be contiguous.
kernels::HeadStrides strides_of(const Tensor& t);
/// Returns t, or a contiguous copy of t if its features are not contiguous.
Tensor with_features_together(const Tensor& t);

struct Result {
  Tensor out;  // attention output, allocated by empty_out()
  Tensor lse;  // log-sum-exp of each query, shape lse_sizes(), fp64 if q is fp64, else fp32
};

/// Inputs of attention's backward besides the arguments of forward. Backward computes the gradients of
/// sum(grad_out * out) + sum(grad_lse * lse). `mask` selects the inputs of forward whose gradients are
/// wanted.
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
// Forward and backward of attention in fp64 on the CPU. They run PyTorch's operators on one block of queries
// at a time.
Result forward_double(const Call& call);
Gradients backward_double(const Call& call, const Upstream& upstream);

template <auto kFunction>
auto boxed() {
  return torch::CppFunction::makeFromBoxedFunction<kFunction>();
}

/// Returns the gradient of the sinks. delta, with lse's shape, is sum(grad_out * out) - grad_lse of each
/// query.
Tensor sinks_gradient(const Call& call, const Tensor& lse, const Tensor& delta);

/// Returns the gradient of a bias that is equal for all keys of a query, i.e. whose shape is (..., 1).
Tensor shared_bias_gradient(const Call& call, const Tensor& lse, const Tensor& delta,
                            const OptionalTensor& grad_lse);
inline bool has_shared_bias(const Call& call) { return call.bias && call.bias->size(-1) == 1; }

}  // namespace shoestring::attend
