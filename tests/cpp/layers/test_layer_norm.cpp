#include "catch.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <shoestring/ops.h>

using at::Tensor;

TEST_CASE("layer_norm agrees with PyTorch's in fp64", "[layer_norm]") {
  std::vector<Tensor> leaves{torch::randn({7, 45}).requires_grad_(), torch::rand({45}).requires_grad_(),
                             torch::randn({45}).requires_grad_()},
      wide;
  for (const Tensor& t : leaves) wide.push_back(t.detach().to(at::kDouble).requires_grad_());
  const Tensor y = shoestring::layer_norm(leaves[0], leaves[1], leaves[2], 1e-5);
  const Tensor exact = at::layer_norm(wide[0], {45}, wide[1], wide[2], 1e-5),
               upstream = torch::randn({7, 45});
  CHECK(at::allclose(y.to(at::kDouble), exact, 1e-5, 1e-5));
  const auto ours = torch::autograd::grad({y}, leaves, {upstream});
  const auto expected = torch::autograd::grad({exact}, wide, {upstream.to(at::kDouble)});
  for (int i = 0; i < 3; ++i) CHECK(at::allclose(ours[i].to(at::kDouble), expected[i], 1e-4, 1e-5));
  CHECK_THROWS_WITH(shoestring::layer_norm(leaves[0], torch::rand({3}), std::nullopt, 1e-5),
                    Catch::Matchers::Contains("layer_norm: weight: expected (45)"));
}

TEST_CASE("add_layer_norm agrees with a sum and PyTorch's layer_norm in fp64", "[layer_norm]") {
  std::vector<Tensor> leaves{torch::randn({7, 45}).requires_grad_(), torch::randn({7, 45}).requires_grad_(),
                             torch::rand({45}).requires_grad_(), torch::randn({45}).requires_grad_()},
      wide;
  for (const Tensor& t : leaves) wide.push_back(t.detach().to(at::kDouble).requires_grad_());
  const auto [y, sum] = shoestring::add_layer_norm(leaves[0], leaves[1], leaves[2], leaves[3], 1e-5);
  const Tensor exact_sum = wide[0] + wide[1], exact = at::layer_norm(exact_sum, {45}, wide[2], wide[3], 1e-5),
               upstream = torch::randn({7, 45}), other = torch::randn({7, 45});
  CHECK(at::allclose(y.to(at::kDouble), exact, 1e-5, 1e-5));
  CHECK(at::equal(sum, leaves[0] + leaves[1]));
  const auto ours = torch::autograd::grad({y, sum}, leaves, {upstream, other});
  const auto expected =
      torch::autograd::grad({exact, exact_sum}, wide, {upstream.to(at::kDouble), other.to(at::kDouble)});
  for (int i = 0; i < 4; ++i) CHECK(at::allclose(ours[i].to(at::kDouble), expected[i], 1e-4, 1e-5));
  CHECK_THROWS_WITH(shoestring::add_layer_norm(leaves[0], torch::rand({3}), std::nullopt, std::nullopt, 1e-5),
                    Catch::Matchers::Contains("layer_norm: residual: expected x's shape"));
}
