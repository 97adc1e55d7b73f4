#include "model.h"

// The Llama-style decoder of the examples.

#include <ATen/autocast_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/stack.h>
#include <c10/util/StringUtil.h>
#include <shoestring/checkpoint/checkpoint.h>
#include <shoestring/integrations/model_files.h>
#include <shoestring/ops.h>
#include <torch/csrc/autograd/generated/variable_factories.h>
#include <torch/nn/init.h>

#include <utility>

using at::Tensor;

namespace {

constexpr double kInitStd = 0.02;
constexpr double kBalance = 0.01, kZ = 0.001;  // coefficients of the losses of routers, as in OLMoE

shoestring::nn::AdaptableLinear linear(const LlamaConfig& config, int64_t in, int64_t out) {
  shoestring::nn::AdaptableLinear layer(
      shoestring::nn::AdaptableLinearOptions(in, out).bias(false).placeholder(config.placeholders));
  if (config.placeholders) return layer;
  torch::nn::init::normal_(layer->weight, 0, kInitStd);
  layer->to(config.device, config.dtype);
  return layer;
}

shoestring::nn::MoE mixture(const LlamaConfig& config) {
  shoestring::nn::MoE moe(
      shoestring::nn::MoEOptions(config.hidden, config.intermediate, config.experts, config.top_k)
          .renormalize(true));
  for (const Tensor& p : moe->parameters()) torch::nn::init::normal_(p, 0, kInitStd);
  moe->to(config.device, config.dtype);
  return moe;
}

// Returns an initial matrix (vocab, hidden), for the embedding and for the output head.
Tensor vocabulary(const LlamaConfig& config) {
  const std::vector<int64_t> shape{config.vocab_size, config.hidden};
  if (config.placeholders) return shoestring::placeholder(shape);
  return torch::nn::init::normal_(torch::empty(shape), 0, kInitStd).to(config.device, config.dtype);
}

Rotary rotary(const LlamaConfig& config, int64_t tokens, at::Device device) {
  const auto type = at::device(device).dtype(at::kFloat);
  const Tensor exponent = at::arange(0, config.head_dim, 2, type) / config.head_dim;
  const Tensor angle = at::outer(at::arange(tokens, type), at::pow(config.rope_theta, exponent).reciprocal());
  const Tensor both = at::cat({angle, angle}, -1);
  return {both.cos(), both.sin()};
}

// Returns the dtype of matrix products of x.
at::ScalarType product_dtype(const Tensor& x) {
  const auto device = x.device().type();
  return at::autocast::is_autocast_enabled(device) ? at::autocast::get_autocast_dtype(device)
                                                   : x.scalar_type();
}

}  // namespace

RMSNormImpl::RMSNormImpl(const LlamaConfig& config)
    : weight(register_parameter(
          "weight", config.placeholders
                        ? shoestring::placeholder({config.hidden})
                        : torch::ones({config.hidden}, at::device(config.device).dtype(config.dtype)))),
      eps(config.rms_norm_eps) {}

// Only products read the result, so it is rounded to their dtype.
shoestring::RMSNormOptions RMSNormImpl::options_for(const Tensor& x) const {
  shoestring::RMSNormOptions options(eps);
  const auto dtype = product_dtype(x);
  if (x.scalar_type() == at::kFloat && dtype != at::kFloat) options.out_dtype(dtype);
  return options;
}

Tensor RMSNormImpl::forward(const Tensor& x) { return shoestring::rms_norm(x, weight, options_for(x)); }

std::tuple<Tensor, Tensor> RMSNormImpl::forward_with_residual(const Tensor& x, const Tensor& residual) {
  return shoestring::add_rms_norm(x, residual, weight, options_for(residual));
}

AttentionImpl::AttentionImpl(const LlamaConfig& config) : head_dim(config.head_dim) {
  const int64_t wide = config.heads * head_dim, narrow = config.kv_heads * head_dim;
  q_proj = register_module("q_proj", linear(config, config.hidden, wide));
  k_proj = register_module("k_proj", linear(config, config.hidden, narrow));
  v_proj = register_module("v_proj", linear(config, config.hidden, narrow));
  o_proj = register_module("o_proj", linear(config, wide, config.hidden));
}

Tensor AttentionImpl::forward(const Tensor& x, const Rotary& rotary) {
  const int64_t rows = x.size(0), tokens = x.size(1);
  const auto projected = shoestring::nn::forward_together(x, {q_proj, k_proj, v_proj});
  // Reshapes (rows, tokens, heads * head_dim) to (rows, heads, tokens, head_dim).
  const auto heads = [&](const Tensor& t) { return t.view({rows, tokens, -1, head_dim}).transpose(1, 2); };
  const auto [q, k] = shoestring::rope(heads(projected[0]), heads(projected[1]), rotary.cos, rotary.sin);
  const Tensor out =
      shoestring::attention(q, k, heads(projected[2]), shoestring::AttentionOptions().causal(true));
  return o_proj(out.transpose(1, 2).reshape({rows, tokens, -1}));
}

MlpImpl::MlpImpl(const LlamaConfig& config) {
  gate_proj = register_module("gate_proj", linear(config, config.hidden, config.intermediate));
  up_proj = register_module("up_proj", linear(config, config.hidden, config.intermediate));
  down_proj = register_module("down_proj", linear(config, config.intermediate, config.hidden));
}

Tensor MlpImpl::forward(const Tensor& x) {
  return shoestring::nn::swiglu_mlp(x, gate_proj, up_proj, down_proj);
}

DecoderLayerImpl::DecoderLayerImpl(const LlamaConfig& config) {
  self_attn = register_module("self_attn", Attention(config));
  if (config.experts > 0) {
    moe = register_module("mlp", mixture(config));
  } else {
    mlp = register_module("mlp", Mlp(config));
  }
  input_layernorm = register_module("input_layernorm", RMSNorm(config));
  post_attention_layernorm = register_module("post_attention_layernorm", RMSNorm(config));
}

Tensor DecoderLayerImpl::forward(const Tensor& x, const Rotary& rotary) {
  const auto [normed, attended] =
      post_attention_layernorm->forward_with_residual(self_attn(input_layernorm(x), rotary), x);
  if (moe.is_empty()) return attended + mlp(normed);
  const auto [y, route] = moe(normed);
  if (at::GradMode::is_enabled() && !shoestring::is_recomputing())
    router_loss = kBalance * route.balance + kZ * route.z;
  return attended + y;
}

DecoderImpl::DecoderImpl(const LlamaConfig& config) : config(config) {
  const auto options =
      torch::nn::EmbeddingOptions(config.vocab_size, config.hidden)._weight(vocabulary(config));
  embed_tokens = register_module("embed_tokens", torch::nn::Embedding(options));
  torch::nn::ModuleList list;
  for (int64_t i = 0; i < config.layers; ++i) {
    layers.emplace_back(config);
    list->push_back(layers.back());
    if (config.on_block) config.on_block(*layers.back());
  }
  register_module("layers", list);
  norm = register_module("norm", RMSNorm(config));
  if (!config.on_block) return;
  config.on_block(*norm);
  config.on_block(*embed_tokens);
}

std::vector<shoestring::BlockFunction> DecoderImpl::functions(int64_t tokens) {
  const Rotary angles = rotary(config, tokens, embed_tokens->weight.device());
  std::vector<shoestring::BlockFunction> all;
  all.emplace_back([embed = embed_tokens](const Tensor& tokens) mutable { return embed(tokens); });
  for (auto& layer : layers)
    all.emplace_back([layer, angles](const Tensor& x) mutable { return layer(x, angles); });
  all.emplace_back([norm = norm](const Tensor& x) mutable { return norm(x); });
  return all;
}

Tensor DecoderImpl::forward(const Tensor& tokens) {
  Tensor x = tokens;
  for (const auto& function : functions(tokens.size(1))) x = function(x);
  return x;
}

Tensor DecoderImpl::take_router_loss() {
  std::vector<Tensor> all;
  for (auto& layer : layers) {
    if (layer->router_loss.defined()) all.push_back(std::exchange(layer->router_loss, {}));
  }
  return all.empty() ? Tensor() : at::stack(all).mean();
}

HeadImpl::HeadImpl(const LlamaConfig& config) : weight(register_parameter("weight", vocabulary(config))) {}

LlamaForCausalLMImpl::LlamaForCausalLMImpl(const LlamaConfig& config)
    : config(config), model(register_module("model", Decoder(config))) {
  if (!config.tied) lm_head = register_module("lm_head", Head(config));
}

Tensor LlamaForCausalLMImpl::forward(const Tensor& tokens) { return model(tokens); }

shoestring::TensorDict LlamaForCausalLMImpl::tensors() const {
  shoestring::TensorDict all;
  for (const auto& p : named_parameters()) {
    const std::string& name = p.key();
    const size_t at = config.experts > 0 ? name.find(".mlp.") : std::string::npos;
    if (at == std::string::npos) {
      all.insert(name, p.value());
      continue;
    }
    // Files of Mixtral have a matrix for each expert, and the gate apart.
    const std::string block = name.substr(0, at) + ".block_sparse_moe.";
    if (name.ends_with("router.weight")) all.insert(block + "gate.weight", p.value());
    for (int64_t e = 0; !name.ends_with("router.weight") && e < config.experts; ++e) {
      const std::string expert = block + "experts." + std::to_string(e);
      const Tensor weight = p.value().detach()[e];
      if (name.ends_with("down_proj")) {
        all.insert(expert + ".w2.weight", weight);
      } else {
        all.insert(expert + ".w1.weight", weight.narrow(0, 0, config.intermediate));
        all.insert(expert + ".w3.weight", weight.narrow(0, config.intermediate, config.intermediate));
      }
    }
  }
  return all;
}

std::string LlamaConfig::json() const {
  const std::string mixture =
      experts == 0
          ? ""
          : c10::str(",\n  \"num_local_experts\": ", experts, ",\n  \"num_experts_per_tok\": ", top_k,
                     ",\n  \"router_aux_loss_coef\": ", kBalance, ",\n  \"sliding_window\": null");
  return c10::str("{\n  \"architectures\": [\"", experts > 0 ? "Mixtral" : "Llama",
                  "ForCausalLM\"],\n  \"model_type\": \"", experts > 0 ? "mixtral" : "llama",
                  "\",\n  \"vocab_size\": ", vocab_size, ",\n  \"hidden_size\": ", hidden,
                  ",\n  \"intermediate_size\": ", intermediate, ",\n  \"num_hidden_layers\": ", layers,
                  ",\n  \"num_attention_heads\": ", heads, ",\n  \"num_key_value_heads\": ", kv_heads,
                  ",\n  \"head_dim\": ", head_dim, ",\n  \"max_position_embeddings\": ", max_tokens,
                  ",\n  \"rms_norm_eps\": ", rms_norm_eps, ",\n  \"rope_theta\": ", rope_theta,
                  ",\n  \"hidden_act\": \"silu\",\n  \"tie_word_embeddings\": ", tied ? "true" : "false",
                  ",\n  \"bos_token_id\": null,\n  "
                  "\"eos_token_id\": null,\n  \"dtype\": \"",
                  dtype == at::kFloat ? "float32" : "bfloat16", "\"", mixture, "\n}\n");
}
