#include "catch.h"

#include <sstream>

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/generated/variable_factories.h>
#include <torch/nn/modules/container/sequential.h>

#include <shoestring/adapters/lora.h>
#include <shoestring/nn.h>

using at::Tensor;
using Catch::Contains;
namespace nn = shoestring::nn;

namespace {

nn::AttentionOptions small() { return nn::AttentionOptions(48, 4).num_kv_heads(2).causal(true); }

nn::AttentionInput rotated(int64_t tokens, int64_t rotary_dim) {
  const Tensor angles = torch::rand({tokens, rotary_dim / 2});
  return nn::AttentionInput().cos(angles.cos()).sin(angles.sin());
}

// Computes the output of nn::Attention with PyTorch's operators.
Tensor plain(const nn::Attention& module, const Tensor& x, const nn::AttentionInput& input) {
  const auto& o = module->options;
  const auto heads = [&](nn::AdaptableLinear layer) {
    return at::linear(x, layer->weight, layer->bias).unflatten(-1, {-1, *o.head_dim()}).transpose(1, 2);
  };
  const auto normed = [&](const Tensor& t, nn::RMSNorm norm) {
    return o.qk_norm()
               ? t * at::rsqrt(t.square().mean(-1, true) + o.norm_eps()) * (norm->weight + o.norm_offset())
               : t;
  };
  const auto turned = [&](const Tensor& t) {
    if (!input.cos().has_value()) return t;
    const auto halves = t.chunk(2, -1);
    const Tensor &cos = *input.cos(), &sin = *input.sin();
    return at::cat({halves[0] * cos - halves[1] * sin, halves[1] * cos + halves[0] * sin}, -1);
  };
  const Tensor q = turned(normed(heads(module->q_proj), module->q_norm));
  const Tensor k = turned(normed(heads(module->k_proj), module->k_norm));
  const Tensor out =
      at::scaled_dot_product_attention(q, k, heads(module->v_proj), {}, 0.0, o.causal(), std::nullopt, true);
  return at::linear(out.transpose(1, 2).flatten(-2), module->o_proj->weight, module->o_proj->bias);
}

}  // namespace

TEST_CASE("Attention is a plain composition's, and its gradients are", "[nn]") {
  for (const bool normed : {false, true}) {
    nn::Attention module(small().bias(normed).out_bias(true).qk_norm(normed).norm_offset(normed ? 1 : 0));
    if (normed) module->q_norm->weight.data().normal_(), module->k_norm->weight.data().normal_();
    const Tensor x = torch::randn({2, 7, 48}), upstream = torch::randn({2, 7, 48});
    for (const auto& input : {nn::AttentionInput(), rotated(7, 12)}) {
      std::vector<Tensor> found[2], leaves = module->parameters();
      for (int side = 0; side < 2; ++side) {
        const Tensor y = side == 0 ? module(x, input) : plain(module, x, input);
        found[side] = torch::autograd::grad({y}, leaves, {upstream});
        found[side].push_back(y);
      }
      for (size_t i = 0; i < found[0].size(); ++i) CHECK(at::allclose(found[0][i], found[1][i], 1e-4, 1e-4));
    }
  }
}

TEST_CASE("Attention has transformers' names, is copied, and stands in a Sequential", "[nn]") {
  nn::Attention module(small().qk_norm(true).sinks(true));
  const Tensor x = torch::randn({2, 5, 48});
  std::string names;
  for (const auto& p : module->named_parameters()) names += p.key() + " ";
  CHECK(names ==
        "sinks q_proj.weight k_proj.weight v_proj.weight o_proj.weight q_norm.weight k_norm.weight ");
  module->sinks.data().normal_();
  const auto copy = std::dynamic_pointer_cast<nn::AttentionImpl>(module->clone());
  CHECK(at::equal(copy->forward(x), module(x)));
  copy->q_proj->weight.data().zero_();
  CHECK(!at::equal(copy->forward(x), module(x)));
  torch::nn::Sequential layers(module, nn::GatedMLP(48, 64));
  CHECK(layers->forward(x).sizes() == x.sizes());
  std::ostringstream text;
  module->pretty_print(text);
  CHECK(text.str() == "shoestring::nn::Attention(48, num_heads=4, num_kv_heads=2, head_dim=12, causal=true)");
}

TEST_CASE("Attention of packed sequences, and to another source", "[nn]") {
  nn::Attention module(small());
  const Tensor x = torch::randn({9, 48}), starts = at::tensor({0, 4, 9}, at::kInt);
  const Tensor y = module(x, nn::AttentionInput().cu_seqlens_q(starts));
  CHECK(at::allclose(y.slice(0, 4), module(x.slice(0, 4).unsqueeze(0))[0], 1e-5, 1e-6));
  nn::Attention cross(nn::AttentionOptions(48, 4).source_features(20).value_dim(6));
  const Tensor source = torch::randn({2, 3, 20}), queries = torch::randn({2, 5, 48});
  const auto input = nn::AttentionInput().source(source);
  CHECK(cross(queries, input).sizes() == at::IntArrayRef({2, 5, 48}));
  // Without a causal mask, cross-attention does not depend on the order of the tokens that it attends to.
  CHECK(at::allclose(cross(queries, input), cross(queries, nn::AttentionInput().source(source.flip(1))), 1e-5,
                     1e-6));
}

TEST_CASE("Attention drops in training alone, by the generator's seed", "[nn]") {
  nn::Attention module(small().dropout_p(0.5));
  const Tensor x = torch::randn({2, 6, 48});
  module->eval();
  CHECK(at::equal(module(x), module(x)));
  module->train();
  at::manual_seed(3);
  const Tensor first = module(x);
  CHECK(!at::equal(first, module(x)));
  at::manual_seed(3);
  CHECK(at::equal(first, module(x)));
}

TEST_CASE("Attention and GatedMLP take on adapters and quantised weights", "[nn]") {
  struct Model : torch::nn::Module {
    nn::Attention attn{small()};
    nn::GatedMLP mlp{nn::GatedMLPOptions(48, 64)};
    Model() { register_module("attn", attn), register_module("mlp", mlp); }
    Tensor forward(const Tensor& x) { return mlp(attn(x)); }
  } model;
  const Tensor x = torch::randn({2, 6, 48}), before = model.forward(x);
  shoestring::lora::apply(
      model, shoestring::lora::ApplyOptions().adapter(nn::LoraOptions().rank(4)).quantize("int8"));
  CHECK(at::allclose(model.forward(x), before, 0.05, 0.02));
  model.forward(x).square().sum().backward();
  CHECK(
      model.attn->k_proj->adapters["default"]->named_parameters()["lora_B"].grad().abs().sum().item<float>() >
      0);
  CHECK(model.mlp->gate_proj->is_quantized());
}

TEST_CASE("GatedMLP has three activations and a bias", "[nn]") {
  const Tensor x = torch::randn({3, 5, 20});
  for (const std::string activation : {"silu", "gelu", "gelu_tanh"}) {
    nn::GatedMLP module(nn::GatedMLPOptions(20, 28).activation(activation).bias(activation == "gelu"));
    const auto linear = [](const Tensor& t, nn::AdaptableLinear l) {
      return at::linear(t, l->weight, l->bias);
    };
    const Tensor gate = linear(x, module->gate_proj);
    const Tensor active =
        activation == "silu" ? at::silu(gate) : at::gelu(gate, activation == "gelu" ? "none" : "tanh");
    CHECK(
        at::allclose(module(x), linear(active * linear(x, module->up_proj), module->down_proj), 1e-4, 1e-5));
    const auto copy = std::dynamic_pointer_cast<nn::GatedMLPImpl>(module->clone());
    CHECK(at::equal(copy->forward(x), module(x)));
  }
  std::ostringstream text;
  nn::GatedMLP(20, 28)->pretty_print(text);
  CHECK(text.str() == "shoestring::nn::GatedMLP(20, 28, activation=silu)");
}

TEST_CASE("Attention and GatedMLP refuse what does not fit", "[nn]") {
  CHECK_THROWS_WITH(nn::Attention(nn::AttentionOptions(48, 4).num_kv_heads(3)),
                    Contains("num_kv_heads: expected a divisor of num_heads, 4, received 3"));
  CHECK_THROWS_WITH(nn::Attention(48, 5),
                    Contains("head_dim: expected a number, as 48 features do not divide by 5 heads"));
  CHECK_THROWS_WITH(nn::Attention(small().dropout_p(1)),
                    Contains("dropout_p: expected a number in [0, 1), received 1"));
  CHECK_THROWS_WITH(nn::GatedMLP(nn::GatedMLPOptions(8, 8).activation("relu")),
                    Contains("activation: expected 'silu'"));
  nn::Attention module(small()), cross(nn::AttentionOptions(48, 4).source_features(20));
  const Tensor x = torch::randn({2, 5, 48}), table = torch::rand({5, 6});
  CHECK_THROWS_WITH(module(x.slice(-1, 1)), Contains("x: expected (batch, tokens, 48), received [2, 5, 47]"));
  CHECK_THROWS_WITH(module(x, nn::AttentionInput().cu_seqlens_q(at::tensor({0, 5}, at::kInt))),
                    Contains("x: expected (tokens, 48) with cu_seqlens_q, received [2, 5, 48]"));
  CHECK_THROWS_WITH(cross(x),
                    Contains("source: expected (batch, keys, 20), received none, and x of 48 features"));
  CHECK_THROWS_WITH(cross(x, nn::AttentionInput().source(x)),
                    Contains("source: expected (batch, keys, 20), received [2, 5, 48]"));
  CHECK_THROWS_WITH(module(x, nn::AttentionInput().cos(table)), Contains("cos and sin: expected both"));
  CHECK_THROWS_WITH(module(x, rotated(5, 12).source(x)), Contains("cos: expected no table with a source"));
  CHECK_THROWS_WITH(nn::GatedMLP(20, 28)->forward(x), Contains("x: expected (..., 20), received [2, 5, 48]"));
}
