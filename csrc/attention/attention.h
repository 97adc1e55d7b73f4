#pragma once

// The checked arguments of an attention operator, shared by its CPU, CUDA and autograd implementations.

#include <array>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <shoestring/attention/ops.h>

#include "attention/attention_table.h"
#include "core/arguments.h"

namespace shoestring::attend {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kOp = "attention";

enum Input { kQ, kK, kV, kBias, kSinks, kInputs };
using Mask = std::array<bool, kInputs>;
using Gradients = std::array<Tensor, kInputs>;

/// The arguments of the operators attention and attention_with_lse.
struct Arguments {
  Tensor q, k, v;
  AttentionOptions options;

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit("q", self.q);
    visit("k", self.k);
    visit("v", self.v);
    auto& o = self.options;
    visit("bias", o.bias());
    visit("sinks", o.sinks());
    visit.keywords();
    visit("causal", o.causal());
    visit("window_size", o.window_size());
    visit("softcap", o.softcap());
    visit("scale", o.scale());
    visit("alibi_slopes", o.alibi_slopes());
    visit("cu_seqlens_q", o.cu_seqlens_q());
    visit("cu_seqlens_k", o.cu_seqlens_k());
    visit("dropout_p", o.dropout_p());
    visit("seed", o.seed());
    visit("deterministic", o.deterministic());
  }
  /// Returns the inputs in the order of the enum Input.
  std::array<OptionalTensor, kInputs> inputs() const { return {q, k, v, options.bias(), options.sinks()}; }
};

/// The checked arguments of a call of an attention operator. Tensor sizes may be symbolic until problem() is
/// called.
struct Call {
  explicit Call(const Arguments& arguments);

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
  // The part of the log-sum-exp that rounding to `lse` has lost. Undefined unless the caller asks for it.
  Tensor lse_rest;

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit("out", self.out);
    visit("lse", self.lse);
  }
};

/// The results of _attention_forward.
struct ResultWithRest : Result {
  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    Result::fields(self, visit);
    visit("lse_rest", self.lse_rest);
  }
};

/// Inputs of attention's backward besides the arguments of forward. Backward computes the gradients of
/// sum(grad_out * out) + sum(grad_lse * lse). `mask` selects the inputs of forward whose gradients are
/// wanted.
struct Upstream {
  Tensor grad_out;
  OptionalTensor grad_lse;
  Tensor out, lse;
  OptionalTensor lse_rest;
  Mask mask{};
};

/// The arguments of _attention_backward.
struct BackwardArguments : Upstream {
  Arguments forward;

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit("grad_out", self.grad_out);
    visit.required("grad_lse", self.grad_lse);
    visit("out", self.out);
    visit("lse", self.lse);
    visit.required("lse_rest", self.lse_rest);
    visit.required("output_mask", self.mask);
    Arguments::fields(self.forward, visit);
  }
};

/// Reads Arguments or BackwardArguments from the stack.
template <class T>
T read_arguments(const torch::jit::Stack& stack) {
  static const size_t from_end = count_of<T>() - index_of<T>("window_size");
  const int64_t numbers = stack[stack.size() - from_end].toIntList().size();
  TORCH_CHECK(numbers == 2, kOp,
              ": window_size: expected two numbers, of tokens to the left and to the right, received ",
              numbers);
  return read_fields<T>(stack);
}

/// The results of _attention_backward. A gradient that is not requested is an empty tensor.
struct BackwardResults {
  Gradients gradients;

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit("grad_q", self.gradients[kQ]);
    visit("grad_k", self.gradients[kK]);
    visit("grad_v", self.gradients[kV]);
    visit("grad_bias", self.gradients[kBias]);
    visit("grad_sinks", self.gradients[kSinks]);
  }
};

// `with_rest` says whether to return lse_rest.
Result forward_cpu(const Call& call, bool with_rest);
Gradients backward_cpu(const Call& call, const Upstream& upstream);
Result forward_cuda(const Call& call, bool with_rest);
Gradients backward_cuda(const Call& call, const Upstream& upstream);
// Forward and backward of attention in fp64 on the CPU. They run PyTorch's operators on one block of queries
// at a time.
Result forward_double(const Call& call, bool with_rest);
Gradients backward_double(const Call& call, const Upstream& upstream);

/// Returns whether backward needs lse_rest: the bias is added to the scores, so they may be large.
inline bool needs_rest(const OptionalTensor& bias) { return bias && bias->scalar_type() != at::kBool; }

/// Returns the gradient of the sinks. delta, with lse's shape, is sum(grad_out * out) - grad_lse of each
/// query.
Tensor sinks_gradient(const Call& call, const Upstream& upstream, const Tensor& delta);

/// Returns the gradient of a bias that is equal for all keys of a query, i.e. whose shape is (..., 1).
Tensor shared_bias_gradient(const Call& call, const Upstream& upstream, const Tensor& delta);
inline bool has_shared_bias(const Call& call) { return call.bias && call.bias->size(-1) == 1; }

}  // namespace shoestring::attend
