#include "catch.h"

#include <sstream>

#include <torch/csrc/autograd/generated/variable_factories.h>

#include <shoestring/nn.h>

using at::Tensor;
namespace nn = shoestring::nn;

TEST_CASE("RMSNorm begins as a norm alone, normalises sums, and is copied", "[nn]") {
  nn::RMSNorm norm(24, shoestring::RMSNormOptions(1e-5).offset(1).upcast("gemma"));
  const Tensor x = torch::randn({3, 24}), residual = torch::randn({3, 24});
  CHECK(at::equal(norm->weight, torch::zeros({24})));
  CHECK(at::allclose(norm(x), x * at::rsqrt(x.square().mean(-1, true) + 1e-5), 1e-5, 1e-6));
  const auto [y, sum] = norm->forward_with_residual(x, residual);
  CHECK(at::equal(sum, x + residual));
  CHECK(at::equal(y, norm(sum)));
  y.sum().backward();
  CHECK(norm->weight.grad().defined());
  const auto copy = std::dynamic_pointer_cast<nn::RMSNormImpl>(norm->clone());
  CHECK(at::equal(copy->forward(x), norm(x)));
  std::ostringstream text;
  norm->pretty_print(text);
  CHECK(text.str() == "shoestring::nn::RMSNorm(24, eps=1e-05, offset=1, upcast=gemma)");
}

TEST_CASE("LayerNorm is PyTorch's, with a bias and without", "[nn]") {
  const Tensor x = torch::randn({3, 24});
  for (const bool bias : {true, false}) {
    nn::LayerNorm norm(nn::LayerNormOptions(24).bias(bias));
    CHECK(norm->parameters().size() == (bias ? 2 : 1));
    CHECK(at::allclose(norm(x), at::layer_norm(x, {24}, norm->weight, norm->bias, 1e-5), 1e-5, 1e-6));
    const auto [y, sum] = norm->forward_with_residual(x, x.flip(0));
    CHECK(at::equal(sum, x + x.flip(0)));
    CHECK(at::equal(y, norm(sum)));
  }
}
