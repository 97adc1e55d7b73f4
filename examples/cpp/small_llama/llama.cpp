#include "llama.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <shoestring/ops.h>
#include <torch/nn/init.h>

using at::Tensor;

BlockImpl::BlockImpl(int64_t width, int64_t heads) {
  input_layernorm = register_module("input_layernorm", shoestring::nn::RMSNorm(width));
  self_attn = register_module(
      "self_attn", shoestring::nn::Attention(
                       shoestring::nn::AttentionOptions(width, heads).num_kv_heads(heads / 2).causal(true)));
  post_attention_layernorm = register_module("post_attention_layernorm", shoestring::nn::RMSNorm(width));
  mlp = register_module("mlp", shoestring::nn::GatedMLP(width, 3 * width));
}

Tensor BlockImpl::forward(const Tensor& x, const shoestring::nn::AttentionInput& rotation) {
  const Tensor attended = self_attn(input_layernorm(x), rotation);
  const auto [normed, sum] = post_attention_layernorm->forward_with_residual(attended, x);
  return sum + mlp(normed);
}

SmallLlamaImpl::SmallLlamaImpl(int64_t vocab, int64_t width, int64_t layers, int64_t heads)
    : head_dim(width / heads) {
  embed_tokens = register_module("embed_tokens", torch::nn::Embedding(vocab, width));
  torch::nn::ModuleList list;
  for (int64_t i = 0; i < layers; ++i) {
    blocks.emplace_back(width, heads);
    list->push_back(blocks.back());
  }
  register_module("layers", list);
  norm = register_module("norm", shoestring::nn::RMSNorm(width));
  for (const Tensor& parameter : parameters()) {
    if (parameter.dim() == 2) torch::nn::init::normal_(parameter, 0, 0.02);
  }
  shoestring::nn::init::depth_scaled_(*this, {"*.o_proj.weight", "*.down_proj.weight"}, layers);
}

Tensor SmallLlamaImpl::forward(const Tensor& rows) {
  const int64_t tokens = rows.size(1) - 1;
  const auto type = at::device(rows.device()).dtype(at::kFloat);
  const Tensor exponent = at::arange(0, head_dim, 2, type) / head_dim;
  Tensor angle = at::outer(at::arange(tokens, type), at::pow(10000, -exponent));
  angle = at::cat({angle, angle}, -1);
  const auto rotation = shoestring::nn::AttentionInput().cos(angle.cos()).sin(angle.sin());
  Tensor x = embed_tokens(rows.narrow(1, 0, tokens));
  for (Block& block : blocks) x = block(x, rotation);
  return shoestring::linear_cross_entropy(norm(x), embed_tokens->weight, rows.narrow(1, 1, tokens));
}
