#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <string>
#include <vector>

struct LlamaConfig {
  int64_t vocab_size, hidden, layers, heads, kv_heads, max_tokens;
  double rms_norm_eps = 1e-6, rope_theta = 10000;

  int64_t head_dim() const { return hidden / heads; }
  int64_t intermediate() const { return 3 * hidden; }
  /// Hugging Face's config.json for these weights.
  std::string json() const;
};

/// Cosines and sines of the rotary embedding (Su et al. 2021), (tokens, head_dim) each.
struct Rotary {
  at::Tensor cos, sin;
};

struct RMSNormImpl : torch::nn::Module {
  RMSNormImpl(int64_t size, double eps);
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight;
  double eps;
};
TORCH_MODULE(RMSNorm);

struct AttentionImpl : torch::nn::Module {
  explicit AttentionImpl(const LlamaConfig& config);
  at::Tensor forward(const at::Tensor& x, const Rotary& rotary);

  int64_t head_dim;
  bool grouped;
  torch::nn::Linear q_proj = nullptr, k_proj = nullptr, v_proj = nullptr, o_proj = nullptr;
};
TORCH_MODULE(Attention);

struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(const LlamaConfig& config);
  at::Tensor forward(const at::Tensor& x);

  torch::nn::Linear gate_proj = nullptr, up_proj = nullptr, down_proj = nullptr;
};
TORCH_MODULE(Mlp);

struct DecoderLayerImpl : torch::nn::Module {
  explicit DecoderLayerImpl(const LlamaConfig& config);
  at::Tensor forward(const at::Tensor& x, const Rotary& rotary);

  RMSNorm input_layernorm = nullptr, post_attention_layernorm = nullptr;
  Attention self_attn = nullptr;
  Mlp mlp = nullptr;
};
TORCH_MODULE(DecoderLayer);

struct DecoderImpl : torch::nn::Module {
  explicit DecoderImpl(const LlamaConfig& config);
  at::Tensor forward(const at::Tensor& tokens);

  LlamaConfig config;
  torch::nn::Embedding embed_tokens = nullptr;
  std::vector<DecoderLayer> layers;
  RMSNorm norm = nullptr;
};
TORCH_MODULE(Decoder);

/// A Llama-style decoder whose parameters have the names of Hugging Face's LlamaForCausalLM; the output matrix is the
/// embedding. Its numbers come from PyTorch's generator, so seed that first.
struct LlamaForCausalLMImpl : torch::nn::Module {
  explicit LlamaForCausalLMImpl(const LlamaConfig& config);
  /// tokens (rows, tokens) int64 -> hidden states (rows, tokens, hidden), from which `output_weight` makes logits.
  at::Tensor forward(const at::Tensor& tokens);
  const at::Tensor& output_weight() const { return model->embed_tokens->weight; }

  LlamaConfig config;
  Decoder model = nullptr;
};
TORCH_MODULE(LlamaForCausalLM);
