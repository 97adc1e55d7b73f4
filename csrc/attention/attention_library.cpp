#include "attention/attention_library.h"

#include <tuple>

#include <ATen/Functions.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/TensorOptions.h>

namespace shoestring::attend {
namespace {

// Whether CUDA calls use shoestring's kernels even if PyTorch has an operator for them. False, because the
// kernels have not been timed on a GPU with benchmarks/attention/bench_attention.py yet. A call that PyTorch
// supports is thus as fast as scaled_dot_product_attention.
constexpr bool kPreferOwn = false;
constexpr int64_t kMostLibraryFeatures = 256;

// Returns whether the call is softmax(scale q k^T) v without further options except a causal mask. Causal
// calls need equally many queries and keys, because PyTorch aligns the mask differently otherwise.
bool is_plain(const Call& c) {
  const bool options = c.packed() || c.bias || c.sinks || c.alibi_slopes || c.seed || c.softcap != 0 ||
                       c.left >= 0 || (c.right >= 0 && !c.causal);
  const auto dtype = c.q.scalar_type();
  const int64_t features = c.q.size(-1);
  return !options && (dtype == at::kBFloat16 || dtype == at::kHalf) && c.q.numel() > 0 && c.k.numel() > 0 &&
         c.scale > 0 && features % 8 == 0 && features <= kMostLibraryFeatures && c.v.size(-1) == features &&
         (!c.causal || c.q.size(2) == c.k.size(2));
}

// Returns whether PyTorch implements the operator `name` on q's device. PyTorch has no such operators on the
// CPU, so under the CUDA emulator shoestring's kernels run unless a test registers a replacement.
bool exists(const char* name, const Tensor& q) {
  const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
  return op && op->hasKernelForDispatchKey(c10::computeDispatchKey(std::nullopt, std::nullopt, q.device()));
}

// Returns t, or a copy of t with the strides of `like`. torch.compile relies on these strides. cuDNN does as
// well, because it looks up its execution plans by q, k and v alone.
Tensor laid_out_as(const Tensor& t, const Tensor& like) {
  for (int64_t i = 0; i < t.dim(); ++i) {
    if (t.size(i) > 1 && t.stride(i) != like.stride(i)) return at::empty_like(like).copy_(t);
  }
  return t;
}

}  // namespace

Library library_for(const Call& c) {
  if (kPreferOwn || c.deterministic || !is_plain(c)) return Library::kNone;
  const auto choice = static_cast<at::SDPBackend>(
      at::_fused_sdp_choice(with_features_together(c.q), with_features_together(c.k),
                            with_features_together(c.v), std::nullopt, 0.0, c.causal, c.scale,
                            /*enable_gqa=*/c.q.size(1) != c.k.size(1)));
  if (choice == at::SDPBackend::cudnn_attention && exists("aten::_scaled_dot_product_cudnn_attention", c.q)) {
    return Library::kCudnn;
  }
  if (choice == at::SDPBackend::flash_attention && exists("aten::_scaled_dot_product_flash_attention", c.q)) {
    return Library::kFlash;
  }
  return Library::kNone;
}

Result forward_library(Library library, const Call& c) {
  const Tensor q = with_features_together(c.q), k = with_features_together(c.k),
               v = with_features_together(c.v);
  Tensor out, lse;
  if (library == Library::kCudnn) {
    const auto results = at::_scaled_dot_product_cudnn_attention(
        q, k, v, std::nullopt, /*compute_log_sumexp=*/true, 0.0, c.causal, false, c.scale);
    out = std::get<0>(results), lse = std::get<1>(results);  // cuDNN returns lse as (batch, heads, tokens, 1)
  } else {
    const auto results = at::_scaled_dot_product_flash_attention(q, k, v, 0.0, c.causal, false, c.scale);
    out = std::get<0>(results), lse = std::get<1>(results);
  }
  return {laid_out_as(out, c.empty_out()), lse.contiguous().view_symint(c.lse_sizes()), {}};
}

Gradients backward_library(Library library, const Call& c, const Upstream& u) {
  const Tensor q = with_features_together(c.q), k = with_features_together(c.k),
               v = with_features_together(c.v);
  const Tensor out = laid_out_as(u.out, c.empty_out()), grad_out = laid_out_as(u.grad_out, out),
               lse = u.lse.contiguous();
  const int64_t queries = q.size(2), keys = k.size(2);
  const Tensor none;
  std::tuple<Tensor, Tensor, Tensor> gradients;
  if (library == Library::kCudnn) {
    // placeholder for the random seed and offset of dropout; the call has no dropout
    const Tensor unused = at::empty({}, q.options().dtype(at::kLong));
    gradients = at::_scaled_dot_product_cudnn_attention_backward(grad_out, q, k, v, out, lse.unsqueeze(-1),
                                                                 unused, unused, none, none, none, queries,
                                                                 keys, 0.0, c.causal, c.scale);
  } else {
    const Tensor unused = at::empty({2}, q.options().dtype(at::kUInt64));
    gradients = at::_scaled_dot_product_flash_attention_backward(
        grad_out, q, k, v, out, lse, none, none, queries, keys, 0.0, c.causal, unused, unused, c.scale);
  }
  Gradients requested;
  if (u.mask[kQ]) requested[kQ] = laid_out_as(std::get<0>(gradients), at::empty_like(c.q));
  if (u.mask[kK]) requested[kK] = laid_out_as(std::get<1>(gradients), at::empty_like(c.k));
  if (u.mask[kV]) requested[kV] = laid_out_as(std::get<2>(gradients), at::empty_like(c.v));
  return requested;
}

}  // namespace shoestring::attend
