#include "catch.h"
#include "emulated.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <shoestring/adapters/embedding.h>
#include <shoestring/layers/embedding.h>

using at::Tensor;
using shoestring::EmbeddingOptions;

TEST_CASE("embedding agrees with ATen in values and gradients", "[embedding]") {
  const Tensor ids = torch::randint(20, {3, 40}, at::kLong), upstream = torch::randn({3, 40, 17});
  const Tensor weight = torch::randn({20, 17}).requires_grad_();
  const Tensor wide = weight.detach().to(at::kDouble).requires_grad_();
  for (const bool by_frequency : {false, true}) {
    const Tensor y = shoestring::embedding(
        ids, weight, EmbeddingOptions().padding_idx(4).scale_grad_by_freq(by_frequency));
    const Tensor exact = at::embedding(wide, ids, 4, by_frequency);
    CHECK(at::equal(y.to(at::kDouble), exact));
    const auto ours = torch::autograd::grad({y}, {weight}, {upstream});
    const auto expected = torch::autograd::grad({exact}, {wide}, {upstream.to(at::kDouble)});
    CHECK(at::allclose(ours[0].to(at::kDouble), expected[0], 1e-5, 1e-6));
    CHECK(ours[0][4].eq(0).all().item<bool>());
  }
  if (is_emulated()) return;  // on a GPU, PyTorch's operators check the ids
  CHECK_THROWS_WITH(shoestring::embedding(ids + 1, weight),
                    Catch::Matchers::Contains("embedding: ids: expected rows of the weight"));
}

TEST_CASE("AdaptableEmbedding computes its gradient by the operator", "[embedding]") {
  shoestring::nn::AdaptableEmbedding layer(shoestring::nn::AdaptableEmbeddingOptions(9, 6).padding_idx(2));
  const Tensor ids = torch::tensor({1, 2, 1, 8}, at::kLong);
  layer->forward(ids).sum().backward();
  const Tensor counts = torch::tensor({0, 2, 0, 0, 0, 0, 0, 0, 1}, at::kFloat);
  CHECK(at::equal(layer->weight.grad(), counts.unsqueeze(1).expand({9, 6})));
}
