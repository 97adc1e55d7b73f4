#include "catch.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <shoestring/experts/ops.h>
#include <shoestring/quantization/ops.h>

#include "capabilities.h"
#include "emulated.h"

using at::Tensor;
using shoestring::ExpertLora;
using shoestring::moe_experts;
using shoestring::MoeExpertsOptions;

namespace {

// Computes two experts of each token, one after the other.
Tensor by_hand(const Tensor& x, const Tensor& index, const Tensor& weight, const Tensor& gate_up,
               const Tensor& down, bool oai) {
  std::vector<Tensor> rows;
  for (int64_t t = 0; t < x.size(0); ++t) {
    Tensor sum = at::zeros({x.size(1)}, x.options());
    for (int64_t k = 0; k < 2; ++k) {
      const auto e = index[t][k].item<int64_t>();
      if (e < 0) continue;
      const Tensor h = at::mv(oai ? gate_up[e].t() : gate_up[e], x[t]);
      const int64_t half = h.size(0) / 2;
      const Tensor g = oai ? h.slice(0, 0, {}, 2) : h.narrow(0, 0, half),
                   u = oai ? h.slice(0, 1, {}, 2) : h.narrow(0, half, half);
      const Tensor a = oai ? g * at::sigmoid(1.702 * g) * (u + 1) : at::silu(g) * u;
      sum = sum + weight[t][k] * at::mv(oai ? down[e].t() : down[e], a);
    }
    rows.push_back(sum);
  }
  return at::stack(rows);
}

}  // namespace

TEST_CASE("moe_experts has the values and gradients of single experts", "[moe_experts]") {
  const bool oai = GENERATE(false, true);
  const auto leaf = [](at::IntArrayRef sizes) {
    return torch::randn(sizes).mul_(0.3).set_requires_grad(true);
  };
  const Tensor x = leaf({5, 9}), weight = leaf({5, 2});
  const Tensor gate_up = oai ? leaf({4, 9, 14}) : leaf({4, 14, 9}),
               down = oai ? leaf({4, 7, 9}) : leaf({4, 9, 7});
  const Tensor index = torch::tensor({0, 3, 1, 0, -1, -1, 3, 1, 0, -1}).view({5, 2});
  auto options = MoeExpertsOptions();
  if (oai) options.activation("swigluoai").interleaved(true).transposed(true).limit(100);
  for_each_capability([&](const char* capability) {
    CAPTURE(capability);
    const Tensor ours = moe_experts(x, index, weight, gate_up, down, options),
                 expected = by_hand(x, index, weight, gate_up, down, oai);
    CHECK(at::allclose(ours, expected, 1e-4, 1e-5));
    const std::vector<Tensor> leaves{x, weight, gate_up, down};
    const auto a = torch::autograd::grad({ours.square().sum()}, leaves),
               b = torch::autograd::grad({expected.square().sum()}, leaves);
    for (size_t i = 0; i < leaves.size(); ++i) CHECK(at::allclose(a[i], b[i], 1e-4, 1e-5));
  });
}

TEST_CASE("moe_experts passes biases and a dtype", "[moe_experts]") {
  const Tensor x = torch::randn({3, 4}), index = torch::tensor({0, 1, 0}).view({3, 1}),
               weight = torch::ones({3, 1});
  const Tensor gate_up = torch::zeros({2, 6, 4}), down = torch::zeros({2, 4, 3});
  const Tensor bias = torch::randn({2, 4});
  const auto options =
      MoeExpertsOptions().gate_up_bias(torch::randn({2, 6})).down_bias(bias).dtype(at::kBFloat16);
  const Tensor y = moe_experts(x, index, weight, gate_up, down, options);
  CHECK(y.scalar_type() == at::kBFloat16);
  CHECK(at::allclose(y.to(at::kFloat), bias.index_select(0, index.flatten()), 1e-2, 1e-2));
}

TEST_CASE("moe_experts computes LoRA like updated weights", "[moe_experts]") {
  const auto leaf = [](at::IntArrayRef sizes) {
    return torch::randn(sizes).mul_(0.3).set_requires_grad(true);
  };
  const Tensor x = leaf({5, 9}), weight = leaf({5, 2}), gate_up = leaf({4, 14, 9}), down = leaf({4, 9, 7});
  const Tensor gate_up_a = leaf({4, 3, 9}), gate_up_b = leaf({4, 14, 3}), down_a = leaf({4, 2, 7}),
               down_b = leaf({4, 9, 2});
  const Tensor index = torch::tensor({0, 3, 1, 0, -1, -1, 3, 1, 0, -1}).view({5, 2});
  const auto lora =
      ExpertLora().gate_up_a(gate_up_a).gate_up_b(gate_up_b).down_a(down_a).down_b(down_b).scaling(0.5);
  for_each_capability([&](const char* capability) {
    CAPTURE(capability);
    const Tensor ours = moe_experts(x, index, weight, gate_up, down, MoeExpertsOptions().lora(lora)),
                 expected = by_hand(x, index, weight, gate_up + 0.5 * at::bmm(gate_up_b, gate_up_a),
                                    down + 0.5 * at::bmm(down_b, down_a), /*oai=*/false);
    CHECK(at::allclose(ours, expected, 1e-4, 1e-5));
    const std::vector<Tensor> leaves{x, weight, gate_up, down, gate_up_a, gate_up_b, down_a, down_b};
    const auto a = torch::autograd::grad({ours.square().sum()}, leaves),
               b = torch::autograd::grad({expected.square().sum()}, leaves);
    for (size_t i = 0; i < leaves.size(); ++i) CHECK(at::allclose(a[i], b[i], 1e-4, 1e-5));
  });
}

TEST_CASE("moe_experts drops elements of what LoRA reads", "[moe_experts]") {
  const Tensor x = torch::randn({6, 9}), weight = torch::ones({6, 1}), gate_up = torch::randn({2, 14, 9});
  const Tensor down = torch::randn({2, 9, 7}), index = torch::tensor({0, 1, 1, 0, 0, 1}).view({6, 1});
  const Tensor a = torch::randn({2, 3, 9}), b = torch::randn({2, 14, 3}), seed = torch::tensor({int64_t{5}});
  const auto with = [&](const Tensor& rows, const ExpertLora& lora) {
    return moe_experts(rows, index, weight, gate_up, down, MoeExpertsOptions().lora(lora));
  };
  const auto lora = ExpertLora().gate_up_a(a).gate_up_b(b).dropout(0.5).seed(seed);
  // The dense product reads whole rows, and LoRA those of seeded_dropout. A weight of 0 leaves LoRA alone.
  const Tensor rows = shoestring::seeded_dropout(x, seed, 0.5);
  const auto alone = [&](const Tensor& of, const ExpertLora& given) {
    const Tensor zeros = at::zeros_like(gate_up);
    return moe_experts(of, index, weight, zeros, down, MoeExpertsOptions().lora(given));
  };
  CHECK(at::allclose(alone(x, lora), alone(rows, ExpertLora().gate_up_a(a).gate_up_b(b)), 1e-4, 1e-5));
  CHECK_FALSE(at::allclose(with(x, lora), with(rows, ExpertLora().gate_up_a(a).gate_up_b(b)), 1e-4, 1e-5));
  CHECK_THROWS_WITH(with(x, ExpertLora().gate_up_a(a).gate_up_b(b).dropout(0.5)), Catch::Contains("seed"));
  CHECK_THROWS_WITH(with(x, ExpertLora().dropout(0.5).seed(seed)),
                    Catch::Contains("moe_experts: dropout: expected 0 without LoRA"));
}

TEST_CASE("moe_experts reads quantised stacks", "[moe_experts]") {
  const bool bytes = GENERATE(false, true);
  const Tensor x = torch::randn({6, 32}).set_requires_grad(true),
               weight = torch::rand({6, 2}).set_requires_grad(true), lora_a = torch::randn({3, 2, 32}) * 0.2,
               lora_b = torch::randn({3, 64, 2}).set_requires_grad(true);
  const Tensor index = torch::tensor({0, 2, 2, 0, -1, -1, 0, 2, 0, -1, 2, 0}).view({6, 2});
  const Tensor gate_up = torch::randn({3, 64, 32}) * 0.2, down = torch::randn({3, 32, 32}) * 0.2;
  const auto format = shoestring::QuantizeOptions().quant_type(bytes ? "int8" : "nf4");
  const auto codes = [&](const Tensor& t) {
    return bytes ? shoestring::quantize_int8(t) : shoestring::quantize_4bit(t, format);
  };
  const auto dense = [&](const Tensor& packed, const Tensor& absmax, at::IntArrayRef shape) {
    return bytes ? shoestring::dequantize_int8(packed, absmax, at::kFloat)
                 : shoestring::dequantize_4bit(packed, absmax, shape, at::kFloat, {}, format);
  };
  const auto [first, first_scale] = codes(gate_up);
  const auto [second, second_scale] = codes(down);
  const auto lora = ExpertLora().gate_up_a(lora_a).gate_up_b(lora_b);
  const auto options = MoeExpertsOptions()
                           .gate_up_absmax(first_scale)
                           .down_absmax(second_scale)
                           .quantize(format)
                           .hidden_features(32)
                           .lora(lora);
  const Tensor ours = moe_experts(x, index, weight, first, second, options),
               expected = by_hand(x, index, weight,
                                  dense(first, first_scale, gate_up.sizes()) + at::bmm(lora_b, lora_a),
                                  dense(second, second_scale, down.sizes()), /*oai=*/false);
  CHECK(at::allclose(ours, expected, 1e-4, 1e-5));
  const std::vector<Tensor> leaves{x, weight, lora_b};
  const auto a = torch::autograd::grad({ours.square().sum()}, leaves),
             b = torch::autograd::grad({expected.square().sum()}, leaves);
  for (size_t i = 0; i < leaves.size(); ++i) CHECK(at::allclose(a[i], b[i], 1e-4, 1e-4));
  CHECK_THROWS_WITH(
      moe_experts(x, index, weight, first, second, MoeExpertsOptions(options).hidden_features(std::nullopt)),
      Catch::Contains("moe_experts: hidden_features: expected a number above 0 with a quantised gate_up"));
}

TEST_CASE("moe_experts refuses arguments that do not fit", "[moe_experts]") {
  const Tensor x = torch::randn({3, 4}), index = torch::zeros({3, 2}, at::kLong),
               weight = torch::ones({3, 2});
  const Tensor gate_up = torch::randn({2, 6, 4}), down = torch::randn({2, 4, 3});
  CHECK_THROWS_WITH(moe_experts(x, index, weight, gate_up, down, MoeExpertsOptions().activation("relu")),
                    Catch::Contains("moe_experts: activation: expected 'silu', 'gelu', 'gelu_tanh' or"));
  CHECK_THROWS_WITH(moe_experts(x, index, weight, gate_up, gate_up),
                    Catch::Contains("moe_experts: down: expected shape [2, 4, 3], received [2, 6, 4]"));
  if (is_emulated()) return;  // on a GPU, the host reads no indices
  CHECK_THROWS_WITH(moe_experts(x, index + 2, weight, gate_up, down),
                    Catch::Contains("expected values from 0 to 1, or -1 for no expert, received 2"));
}
