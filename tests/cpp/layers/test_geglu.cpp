#include "catch.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <shoestring/ops.h>

using at::Tensor;

TEST_CASE("geglu agrees with gelu and a product in fp64", "[geglu]") {
  const Tensor gate = torch::randn({7, 45}).mul_(3).requires_grad_(),
               up = torch::randn({7, 45}).requires_grad_();
  const Tensor wide_gate = gate.detach().to(at::kDouble).requires_grad_(),
               wide_up = up.detach().to(at::kDouble).requires_grad_();
  const Tensor upstream = torch::randn({7, 45});
  for (const char* approximate : {"tanh", "none"}) {
    const Tensor y = shoestring::geglu(gate, up, approximate),
                 exact = at::gelu(wide_gate, approximate) * wide_up;
    CHECK(at::allclose(y.to(at::kDouble), exact, 1e-6, 1e-6));
    const auto ours = torch::autograd::grad({y}, {gate, up}, {upstream});
    const auto expected = torch::autograd::grad({exact}, {wide_gate, wide_up}, {upstream.to(at::kDouble)});
    for (int i = 0; i < 2; ++i) CHECK(at::allclose(ours[i].to(at::kDouble), expected[i], 1e-5, 1e-5));
  }
  CHECK_THROWS_WITH(shoestring::geglu(gate, up, "erf"),
                    Catch::Matchers::Contains("geglu: approximate: expected 'tanh' or 'none'"));
}
