#include <shoestring/blocks/attention.h>

#include <torch/csrc/autograd/generated/variable_factories.h>

#include "adapters/low_rank.h"

namespace shoestring::nn {

using at::Tensor;

AttentionImpl::AttentionImpl(const AttentionOptions& attention_options) : options(attention_options) {
  const int64_t heads = options.num_heads(), kv_heads = options.num_kv_heads().value_or(heads);
  TORCH_CHECK_VALUE(heads >= 1 && kv_heads >= 1 && heads % kv_heads == 0,
                    "nn::Attention: num_kv_heads: expected a divisor of num_heads, ", heads, ", received ",
                    kv_heads);
  TORCH_CHECK_VALUE(options.head_dim().has_value() || options.features() % heads == 0,
                    "nn::Attention: head_dim: expected a number, as ", options.features(),
                    " features do not divide by ", heads, " heads, received none");
  TORCH_CHECK_VALUE(options.dropout_p() >= 0 && options.dropout_p() < 1,
                    "nn::Attention: dropout_p: expected a number in [0, 1), received ", options.dropout_p());
  options.num_kv_heads(kv_heads);
  options.head_dim(options.head_dim().value_or(options.features() / heads));
  options.value_dim(options.value_dim().value_or(*options.head_dim()));
  options.source_features(options.source_features().value_or(options.features()));
  reset();
}

void AttentionImpl::reset() {
  const auto linear = [&](int64_t in, int64_t out, bool bias) {
    return AdaptableLinear(AdaptableLinearOptions(in, out).bias(bias).placeholder(options.placeholder()));
  };
  const int64_t features = options.features(), source = *options.source_features();
  const int64_t heads = options.num_heads(), kv_heads = *options.num_kv_heads();
  q_proj = register_module("q_proj", linear(features, heads * *options.head_dim(), options.bias()));
  k_proj = register_module("k_proj", linear(source, kv_heads * *options.head_dim(), options.bias()));
  v_proj = register_module("v_proj", linear(source, kv_heads * *options.value_dim(), options.bias()));
  o_proj = register_module("o_proj", linear(heads * *options.value_dim(), features, options.out_bias()));
  if (options.qk_norm()) {
    const auto norm = RMSNormOptions(options.norm_eps()).offset(options.norm_offset());
    q_norm = register_module("q_norm", RMSNorm(*options.head_dim(), norm));
    k_norm = register_module("k_norm", RMSNorm(*options.head_dim(), norm));
  }
  if (options.sinks()) sinks = register_parameter("sinks", torch::zeros({heads}));
}

void AttentionImpl::check(const Tensor& x, const AttentionInput& input) const {
  const bool packed = input.cu_seqlens_q().has_value(), has_cos = input.cos().has_value();
  const int64_t dims = packed ? 2 : 3, source_features = *options.source_features();
  const char* batch = packed ? "(" : "(batch, ";
  TORCH_CHECK_VALUE(x.dim() == dims && x.size(-1) == options.features(), "nn::Attention: x: expected ", batch,
                    "tokens, ", options.features(), packed ? ") with cu_seqlens_q" : ")", ", received ",
                    x.sizes());
  if (input.source().has_value()) {
    TORCH_CHECK_VALUE(input.source()->dim() == dims && input.source()->size(-1) == source_features,
                      "nn::Attention: source: expected ", batch, "keys, ", source_features, "), received ",
                      input.source()->sizes());
  } else {
    TORCH_CHECK_VALUE(source_features == options.features(), "nn::Attention: source: expected ", batch,
                      "keys, ", source_features, "), received none, and x of ", options.features(),
                      " features");
  }
  TORCH_CHECK_VALUE(has_cos == input.sin().has_value() && (has_cos || !input.position_ids().has_value()),
                    "nn::Attention: cos and sin: expected both tables, or neither and no position_ids; "
                    "received cos or sin alone, or position_ids without them");
  TORCH_CHECK_VALUE(!input.source().has_value() || !has_cos,
                    "nn::Attention: cos: expected no table with a source, since queries and keys have "
                    "different positions; received one");
}

Tensor AttentionImpl::forward(const Tensor& x, const AttentionInput& input) {
  check(x, input);
  const bool packed = input.cu_seqlens_q().has_value();
  std::vector<Tensor> all;  // [query, key, value]
  if (input.source().has_value()) {
    all = forward_together(*input.source(), {k_proj, v_proj});
    all.insert(all.begin(), q_proj(x));
  } else {
    all = forward_together(x, {q_proj, k_proj, v_proj});
  }
  const auto heads = [](const Tensor& t, int64_t dim) { return t.unflatten(-1, {-1, dim}); };
  Tensor q = heads(all[0], *options.head_dim()), k = heads(all[1], *options.head_dim());
  Tensor v = heads(all[2], *options.value_dim());
  RopeOptions rotation;
  rotation.rotary_dim(options.rotary_dim())
      .interleaved(options.interleaved())
      .position_ids(input.position_ids());
  if (options.qk_norm()) {
    if (!input.cos().has_value()) q = q_norm(q), k = k_norm(k);
    rotation.q_weight(q_norm->weight)
        .k_weight(k_norm->weight)
        .eps(options.norm_eps())
        .offset(options.norm_offset());
  }
  if (!packed) q = q.transpose(1, 2), k = k.transpose(1, 2), v = v.transpose(1, 2);
  if (input.cos().has_value()) std::tie(q, k) = rope(q, k, *input.cos(), *input.sin(), rotation);
  shoestring::AttentionOptions how;
  how.causal(options.causal())
      .window_size(options.window_size())
      .softcap(options.softcap())
      .scale(options.scale());
  how.bias(input.bias()).alibi_slopes(input.alibi_slopes()).sinks(optional(sinks));
  how.cu_seqlens_q(input.cu_seqlens_q()).cu_seqlens_k(input.cu_seqlens_k());
  if (is_training() && options.dropout_p() > 0) {
    how.dropout_p(options.dropout_p()).seed(input_with(options.dropout_p(), x).seed());
  }
  const Tensor out = attention(q, k, v, how);
  return o_proj((packed ? out : out.transpose(1, 2)).flatten(-2));
}

void AttentionImpl::pretty_print(std::ostream& stream) const {
  stream << "shoestring::nn::Attention(" << options.features() << ", num_heads=" << options.num_heads()
         << ", num_kv_heads=" << *options.num_kv_heads() << ", head_dim=" << *options.head_dim()
         << ", causal=" << (options.causal() ? "true" : "false") << ")";
}

}  // namespace shoestring::nn
