#include "catch.h"
#include "emulated.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <shoestring/adapters/embedding.h>
#include <shoestring/layers/embedding.h>

using at::Tensor;
using shoestring::EmbeddingOptions;

TEST_CASE("embedding passes its options on, and refuses ids without a row", "[embedding]") {
  const Tensor ids = torch::tensor({1, 0, 1}, at::kLong), weight = torch::randn({2, 3}).requires_grad_();
  const Tensor y =
      shoestring::embedding(ids, weight, EmbeddingOptions().padding_idx(0).scale_grad_by_freq(true));
  const Tensor gradient = torch::autograd::grad({y.sum()}, {weight})[0];
  CHECK(at::equal(gradient, torch::tensor({0.f, 1.f}).unsqueeze(1).expand({2, 3})));
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
