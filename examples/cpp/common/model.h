#pragma once

// A Llama-style decoder with the parameter names of Hugging Face.

#include <shoestring/checkpoint/checkpoint_sequence.h>
#include <shoestring/files/safetensors.h>
#include <shoestring/nn.h>
#include <shoestring/ops.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <string>
#include <tuple>
#include <vector>

struct LlamaConfig {
  int64_t vocab_size, hidden, intermediate, layers, heads, kv_heads, head_dim, max_tokens;
  double rms_norm_eps = 1e-6, rope_theta = 10000;
  /// If not 0, the MLP of each layer is a mixture of this many experts, of which each token has `top_k`. Each
  /// expert has `intermediate` hidden features. The model is a Mixtral, and needs values: no placeholders.
  int64_t experts = 0, top_k = 0;
  bool tied = true;  // whether the output matrix is the embedding matrix
  /// Whether weights start as placeholders, without memory and values. shoestring::load_model then allocates
  /// and fills the weights.
  bool placeholders = false;
  /// Device and dtype of weights that are no placeholders. Initial values are drawn on the host, one tensor
  /// at a time, and copied to the device. So they do not depend on the device.
  at::Device device = at::kCPU;
  at::ScalarType dtype = at::kFloat;
  /// Called with each block as soon as it has its initial values: the layers, the norm, and the embedding.
  std::function<void(torch::nn::Module& block)> on_block{};

  /// Returns the text of a config.json in Hugging Face's format that describes this model.
  std::string json() const;
};

/// Cosines and sines of the rotary embedding (Su et al. 2021), each of shape (tokens, head_dim).
struct Rotary {
  at::Tensor cos, sin;
};

struct RMSNormImpl : torch::nn::Module {
  explicit RMSNormImpl(const LlamaConfig& config);
  at::Tensor forward(const at::Tensor& x);
  /// Returns the norm of x + residual, and x + residual.
  std::tuple<at::Tensor, at::Tensor> forward_with_residual(const at::Tensor& x, const at::Tensor& residual);
  shoestring::RMSNormOptions options_for(const at::Tensor& x) const;

  at::Tensor weight;
  double eps;
};
TORCH_MODULE(RMSNorm);

struct AttentionImpl : torch::nn::Module {
  explicit AttentionImpl(const LlamaConfig& config);
  at::Tensor forward(const at::Tensor& x, const Rotary& rotary);

  int64_t head_dim;
  shoestring::nn::AdaptableLinear q_proj = nullptr, k_proj = nullptr, v_proj = nullptr, o_proj = nullptr;
};
TORCH_MODULE(Attention);

struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(const LlamaConfig& config);
  at::Tensor forward(const at::Tensor& x);

  shoestring::nn::AdaptableLinear gate_proj = nullptr, up_proj = nullptr, down_proj = nullptr;
};
TORCH_MODULE(Mlp);

struct DecoderLayerImpl : torch::nn::Module {
  explicit DecoderLayerImpl(const LlamaConfig& config);
  at::Tensor forward(const at::Tensor& x, const Rotary& rotary);

  RMSNorm input_layernorm = nullptr, post_attention_layernorm = nullptr;
  Attention self_attn = nullptr;
  Mlp mlp = nullptr;                  // empty with experts
  shoestring::nn::MoE moe = nullptr;  // empty without
  /// The losses of the router in the last forward pass with gradients, times their coefficients.
  at::Tensor router_loss;
};
TORCH_MODULE(DecoderLayer);

struct DecoderImpl : torch::nn::Module {
  explicit DecoderImpl(const LlamaConfig& config);
  at::Tensor forward(const at::Tensor& tokens);
  /// Returns the steps of the decoder's forward as functions, for rows of `tokens` tokens: the embedding,
  /// each layer, and the last norm.
  std::vector<shoestring::BlockFunction> functions(int64_t tokens);
  /// Returns the mean over the layers of `router_loss`, and forgets these. Undefined without experts.
  at::Tensor take_router_loss();

  LlamaConfig config;
  torch::nn::Embedding embed_tokens = nullptr;
  std::vector<DecoderLayer> layers;
  RMSNorm norm = nullptr;
};
TORCH_MODULE(Decoder);

/// The output head: the matrix that computes logits from hidden states, if this matrix is not the embedding.
struct HeadImpl : torch::nn::Module {
  explicit HeadImpl(const LlamaConfig& config);

  at::Tensor weight;
};
TORCH_MODULE(Head);

/// A Llama-style decoder whose parameters have the names of Hugging Face's LlamaForCausalLM. Initial weights
/// are drawn from PyTorch's random number generator, so seed the generator first.
struct LlamaForCausalLMImpl : torch::nn::Module {
  explicit LlamaForCausalLMImpl(const LlamaConfig& config);
  /// Maps tokens (rows, tokens) int64 to hidden states (rows, tokens, hidden). Multiply the hidden states by
  /// `output_weight` to get logits.
  at::Tensor forward(const at::Tensor& tokens);
  const at::Tensor& output_weight() const {
    return config.tied ? model->embed_tokens->weight : lm_head->weight;
  }
  /// Returns the parameters with the names that they have in files of Hugging Face.
  shoestring::TensorDict tensors() const;

  LlamaConfig config;
  Decoder model = nullptr;
  Head lm_head = nullptr;  // the output head; empty if the embedding is the output matrix
};
TORCH_MODULE(LlamaForCausalLM);
