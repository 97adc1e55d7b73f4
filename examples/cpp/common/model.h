#pragma once

#include <shoestring/checkpoint_sequence.h>
#include <shoestring/nn.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/pimpl.h>

#include <string>
#include <vector>

struct LlamaConfig {
  int64_t vocab_size, hidden, intermediate, layers, heads, kv_heads, head_dim, max_tokens;
  double rms_norm_eps = 1e-6, rope_theta = 10000;
  bool tied = true;  // the output matrix is the embedding
  /// The weights take no memory, and have no values, until shoestring::load_model brings them.
  bool placeholders = false;

  /// Hugging Face's config.json for these weights.
  std::string json() const;
};

/// Cosines and sines of the rotary embedding (Su et al. 2021), (tokens, head_dim) each.
struct Rotary {
  at::Tensor cos, sin;
};

struct RMSNormImpl : torch::nn::Module {
  explicit RMSNormImpl(const LlamaConfig& config);
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
  shoestring::nn::Linear q_proj = nullptr, k_proj = nullptr, v_proj = nullptr, o_proj = nullptr;
};
TORCH_MODULE(Attention);

struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(const LlamaConfig& config);
  at::Tensor forward(const at::Tensor& x);

  shoestring::nn::Linear gate_proj = nullptr, up_proj = nullptr, down_proj = nullptr;
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
  /// What forward does one after the other, for rows of so many tokens: the embedding, each layer, the last
  /// norm.
  std::vector<shoestring::BlockFunction> functions(int64_t tokens);

  LlamaConfig config;
  torch::nn::Embedding embed_tokens = nullptr;
  std::vector<DecoderLayer> layers;
  bool recompute_layers = false;  // backward keeps a layer's input alone
  RMSNorm norm = nullptr;
};
TORCH_MODULE(Decoder);

/// The matrix that makes logits of hidden states, where it is not the embedding.
struct HeadImpl : torch::nn::Module {
  explicit HeadImpl(const LlamaConfig& config);

  at::Tensor weight;
};
TORCH_MODULE(Head);

/// A Llama-style decoder whose parameters have the names of Hugging Face's LlamaForCausalLM. Its numbers come
/// from PyTorch's generator, so seed that first.
struct LlamaForCausalLMImpl : torch::nn::Module {
  explicit LlamaForCausalLMImpl(const LlamaConfig& config);
  /// tokens (rows, tokens) int64 -> hidden states (rows, tokens, hidden), from which `output_weight` makes
  /// logits.
  at::Tensor forward(const at::Tensor& tokens);
  const at::Tensor& output_weight() const {
    return config.tied ? model->embed_tokens->weight : lm_head->weight;
  }

  LlamaConfig config;
  Decoder model = nullptr;
  Head lm_head = nullptr;  // none where tied
};
TORCH_MODULE(LlamaForCausalLM);
