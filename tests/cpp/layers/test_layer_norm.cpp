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
