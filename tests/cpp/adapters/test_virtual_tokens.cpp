#include "catch.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <ATen/ATen.h>

#include <shoestring/nn.h>
#include <shoestring/ops.h>

using at::Tensor;
using Catch::Matchers::Contains;
namespace nn = shoestring::nn;

TEST_CASE("a prompt stands before the embeddings and is trained", "[lora]") {
  torch::manual_seed(4);
  nn::PromptTokens prompt(3, 8);
  const Tensor x = at::randn({2, 4, 8}, at::kBFloat16), y = prompt(x);
  CHECK(y.scalar_type() == at::kBFloat16);
  CHECK(at::equal(y.narrow(1, 3, 4), x));
  for (int row = 0; row < 2; ++row)
    CHECK(at::equal(y[row].narrow(0, 0, 3), prompt->embedding.to(at::kBFloat16)));
  const Tensor gradient = torch::autograd::grad({y.to(at::kFloat).sum()}, {prompt->embedding})[0];
  CHECK(at::equal(gradient, at::full({3, 8}, 2.0)));
  CHECK(at::equal(std::dynamic_pointer_cast<nn::PromptTokensImpl>(prompt->clone())->forward(x), y));
  const Tensor labels = nn::before(at::ones({2, 4}, at::kLong), 3, -100);
  CHECK(labels.sizes() == at::IntArrayRef({2, 7}));
  CHECK(labels.narrow(1, 0, 3).eq(-100).all().item<bool>());
  CHECK(prompt(x.narrow(0, 0, 0)).sizes() == at::IntArrayRef({0, 7, 8}));
  CHECK_THROWS_WITH(prompt(x[0]), Contains("embedded: expected shape (batch, n, 8), received [4, 8]"));
  CHECK_THROWS_WITH(nn::PromptTokens(0, 8), Contains("tokens: expected at least 1, received 0"));
  CHECK_THROWS_WITH(nn::before(x, 3, 0), Contains("t: expected shape (batch, n), received [2, 4, 8]"));
}

// A prefix of the keys and values of some tokens has the same effect as these tokens before the input.
TEST_CASE("a prefix is attended to as keys and values", "[lora]") {
  torch::manual_seed(4);
  const Tensor q = at::randn({2, 4, 7, 8}), k = at::randn({2, 2, 7, 8}), v = at::randn({2, 2, 7, 8});
  nn::PrefixTokens prefix(nn::PrefixTokensOptions(3, 2, 2, 8));
  {
    const torch::NoGradGuard no_grad;
    prefix->embedding.zero_();
    const Tensor own =
        at::stack({k[0].narrow(1, 0, 3), v[0].narrow(1, 0, 3)});  // (2, heads, tokens, head_dim)
    prefix->embedding.view({3, 2, 2, 2, 8}).select(1, 1).copy_(own.permute({2, 0, 1, 3}));
  }
  const auto layers = prefix(1);
  REQUIRE(layers.size() == 2);
  const auto causal = shoestring::AttentionOptions().causal(true);
  const auto rest = [](const Tensor& t) { return t.narrow(0, 0, 1).narrow(2, 3, 4); };
  const Tensor y = shoestring::attention(rest(q), at::cat({layers[1].keys, rest(k)}, 2),
                                         at::cat({layers[1].values, rest(v)}, 2), causal);
  CHECK(at::allclose(y, rest(shoestring::attention(q, k, v, causal)), 1e-5, 1e-6));
  const Tensor gradient = torch::autograd::grad({y.sum()}, {prefix->embedding})[0];
  CHECK(gradient.count_nonzero().item<int64_t>() > 0);
}

TEST_CASE("a projection computes the prefix", "[lora]") {
  torch::manual_seed(4);
  const auto options = nn::PrefixTokensOptions(3, 2, 2, 8).projection(true).hidden_size(5);
  nn::PrefixTokens prefix(options);
  CHECK(prefix->parameters().size() == 5);
  CHECK(prefix->values().sizes() == at::IntArrayRef({3, 64}));
  const Tensor expected =
      at::linear(at::tanh(at::linear(prefix->embedding, prefix->first->weight, prefix->first->bias)),
                 prefix->last->weight, prefix->last->bias);
  CHECK(at::equal(prefix->values(), expected));
  CHECK(prefix(4, at::kHalf)[1].values.sizes() == at::IntArrayRef({4, 2, 3, 8}));
  nn::PrefixTokens zero(nn::PrefixTokensOptions(3, 2, 2, 8).projection(true).zero(true));
  CHECK(zero->values().count_nonzero().item<int64_t>() == 0);
  CHECK(
      nn::PrefixTokens(nn::PrefixTokensOptions(3, 2, 2, 8).zero(true))->values().abs().sum().item<float>() ==
      0);
  CHECK_THROWS_WITH(nn::PrefixTokens(nn::PrefixTokensOptions(3, 0, 2, 8)),
                    Contains("nn::PrefixTokens: layers: expected at least 1, received 0"));
  CHECK_THROWS_WITH(prefix(-1), Contains("batch: expected at least 0, received -1"));
}
