#include <ATen/Functions.h>

#include "attention/attention.h"
#include "attention/attention_library.h"
#include "core/cuda.h"

namespace shoestring::attend {
namespace {

constexpr int64_t kMostCudaFeatures = 256, kMostCudaTokens = int64_t{1} << 29;

const kernels::AttentionCuda::Functions& functions_of(const Tensor& q) {
  const auto& k = cuda::table<kernels::AttentionCuda>(kOp);
  const auto dtype = q.scalar_type();
  return dtype == at::kFloat ? k.of_float : dtype == at::kBFloat16 ? k.of_bf16 : k.of_fp16;
}

void check_sizes(const kernels::AttentionProblem& p) {
  TORCH_CHECK(p.head_dim <= kMostCudaFeatures && p.value_dim <= kMostCudaFeatures, kOp,
              ": q and v: expected at most ", kMostCudaFeatures, " features on CUDA, received ", p.head_dim,
              " and ", p.value_dim);
  TORCH_CHECK(p.queries < kMostCudaTokens && p.keys < kMostCudaTokens, kOp,
              ": q and k: expected fewer than 2^29 tokens on CUDA, "
              "received ",
              p.queries, " and ", p.keys);
  TORCH_CHECK(p.cu_seqlens_q == nullptr || p.batch > 0 || (p.batch == 0 && p.queries == 0 && p.keys == 0),
              kOp, ": cu_seqlens_q: expected the (sequences + 1) offsets of ", p.queries,
              " tokens, received ", p.batch + 1);
}

// q, k and v for the CUDA kernels. A tensor whose features are not contiguous is copied.
struct Operands {
  explicit Operands(const Call& call)
      : q(with_features_together(call.q)), k(with_features_together(call.k)),
        v(with_features_together(call.v)) {}

  // lse_rest may be undefined.
  kernels::AttentionTensors tensors(const Tensor& out, const Tensor& lse, const Tensor& lse_rest) const {
    return {q.const_data_ptr(),    k.const_data_ptr(),
            v.const_data_ptr(),    strides_of(q),
            strides_of(k),         strides_of(v),
            out.data_ptr(),        strides_of(out),
            lse.data_ptr<float>(), lse_rest.defined() ? lse_rest.data_ptr<float>() : nullptr};
  }
  Tensor q, k, v;
};

}  // namespace

Result forward_cuda(const Call& call, bool with_rest) {
  const Library library = with_rest ? Library::kNone : library_for(call);
  if (library != Library::kNone) return forward_library(library, call);
  const auto problem = call.problem();
  check_sizes(problem);
  Result r{call.empty_out(), at::empty_symint(call.lse_sizes(), call.q.options().dtype(at::kFloat)), {}};
  if (with_rest) r.lse_rest = at::empty_like(r.lse);
  if (r.lse.numel() == 0) return r;
  const Operands operands(call);
  check_launch(kOp, functions_of(call.q).forward(problem, operands.tensors(r.out, r.lse, r.lse_rest),
                                                 stream_of(call.q)));
  return r;
}

Gradients backward_cuda(const Call& call, const Upstream& upstream) {
  const Library library = upstream.grad_lse ? Library::kNone : library_for(call);
  if (library != Library::kNone) return backward_library(library, call, upstream);
  const auto problem = call.problem();
  check_sizes(problem);
  const auto& functions = functions_of(call.q);
  void* stream = stream_of(call.q);
  const Operands operands(call);
  const Tensor out = with_features_together(upstream.out), lse = upstream.lse.contiguous();
  const Tensor grad_out = with_features_together(upstream.grad_out);
  const Tensor lse_rest = upstream.lse_rest ? upstream.lse_rest->contiguous() : Tensor();
  const auto tensors = operands.tensors(out, lse, lse_rest);

  const Tensor delta = at::empty_like(lse);
  const Tensor grad_lse = upstream.grad_lse ? upstream.grad_lse->contiguous() : Tensor();
  if (delta.numel() > 0) {
    check_launch(kOp, functions.delta(problem, tensors, grad_out.const_data_ptr(), strides_of(grad_out),
                                      grad_lse.defined() ? grad_lse.const_data_ptr<float>() : nullptr,
                                      delta.mutable_data_ptr<float>(), stream));
  }
  Gradients gradients, written;
  kernels::AttentionGradients g{};
  g.grad_out = grad_out.const_data_ptr(), g.grad_out_at = strides_of(grad_out),
  g.delta = delta.const_data_ptr<float>();
  const auto prepare = [&](Input which, const Tensor& input, void*& pointer, kernels::HeadStrides& at) {
    if (!upstream.mask[which]) return;
    gradients[which] = at::empty_like(input);
    written[which] =
        gradients[which].stride(-1) == 1 ? gradients[which] : at::empty(input.sizes(), input.options());
    pointer = written[which].mutable_data_ptr(), at = strides_of(written[which]);
  };
  prepare(kQ, call.q, g.q, g.q_at), prepare(kK, call.k, g.k, g.k_at), prepare(kV, call.v, g.v, g.v_at);
  kernels::BiasShape shape{1, 1, 1, 1};
  if (upstream.mask[kBias] && has_shared_bias(call)) {
    gradients[kBias] = shared_bias_gradient(call, upstream, delta);
  } else if (upstream.mask[kBias]) {
    const Tensor& bias = *call.bias;
    gradients[kBias] = at::empty_like(bias);
    written[kBias] = at::zeros(bias.sizes(), bias.options().dtype(at::kFloat));
    shape = {call.packed() ? 1 : bias.size(0), bias.size(-3), bias.size(-2), bias.size(-1)};
    if (bias.numel() > 0) g.bias = written[kBias].mutable_data_ptr<float>();
  }
  check_launch(kOp, functions.backward(problem, tensors, g, shape, stream));
  if (upstream.mask[kSinks]) gradients[kSinks] = sinks_gradient(call, upstream, delta);
  for (int i = 0; i < kInputs; ++i) {
    if (written[i].defined() && !written[i].is_same(gradients[i])) gradients[i].copy_(written[i]);
  }
  return gradients;
}

}  // namespace shoestring::attend
