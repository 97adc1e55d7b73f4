#pragma once

#include <shoestring/nn.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/pimpl.h>

#include <vector>

/// A block of Llama: attention and a gated MLP, each with a norm before and a residual around it.
struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t width, int64_t heads);
  at::Tensor forward(const at::Tensor& x, const shoestring::nn::AttentionInput& rotation);

  shoestring::nn::RMSNorm input_layernorm = nullptr, post_attention_layernorm = nullptr;
  shoestring::nn::Attention self_attn = nullptr;
  shoestring::nn::GatedMLP mlp = nullptr;
};
TORCH_MODULE(Block);

/// A Llama whose output matrix is the embedding. Its parameters have the names, the order and, after the same
/// seed, the initial values of the model in examples/python/small_llama.py.
struct SmallLlamaImpl : torch::nn::Module {
  SmallLlamaImpl(int64_t vocab, int64_t width, int64_t layers, int64_t heads);
  /// Returns the mean loss of rows (batch, tokens + 1) int64: each token is predicted from those before it.
  at::Tensor forward(const at::Tensor& rows);

  int64_t head_dim;
  torch::nn::Embedding embed_tokens = nullptr;
  std::vector<Block> blocks;
  shoestring::nn::RMSNorm norm = nullptr;
};
TORCH_MODULE(SmallLlama);
