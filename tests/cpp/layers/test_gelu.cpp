#include "catch.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <shoestring/ops.h>

using at::Tensor;

TEST_CASE("gelu agrees with gelu of PyTorch in fp64", "[gelu]") {
  const Tensor x = torch::randn({7, 45}).mul_(3).requires_grad_();
  const Tensor wide = x.detach().to(at::kDouble).requires_grad_();
  const Tensor upstream = torch::randn({7, 45});
  for (const char* approximate : {"tanh", "none"}) {
    const Tensor y = shoestring::gelu(x, approximate), exact = at::gelu(wide, approximate);
    CHECK(at::allclose(y.to(at::kDouble), exact, 1e-6, 1e-6));
    const Tensor ours = torch::autograd::grad({y}, {x}, {upstream})[0];
    const Tensor expected = torch::autograd::grad({exact}, {wide}, {upstream.to(at::kDouble)})[0];
    CHECK(at::allclose(ours.to(at::kDouble), expected, 1e-5, 1e-5));
  }
  CHECK_THROWS_WITH(shoestring::gelu(x, "erf"),
                    Catch::Matchers::Contains("gelu: approximate: expected 'tanh' or 'none'"));
}
