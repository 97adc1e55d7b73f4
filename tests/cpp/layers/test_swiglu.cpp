#include "catch.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <shoestring/ops.h>

using at::Tensor;

TEST_CASE("swiglu agrees with silu and a product in fp64", "[swiglu]") {
  const Tensor gate = torch::randn({7, 45}).mul_(3).requires_grad_(),
               up = torch::randn({7, 45}).requires_grad_();
  const Tensor wide_gate = gate.detach().to(at::kDouble).requires_grad_(),
               wide_up = up.detach().to(at::kDouble).requires_grad_();
  const Tensor y = shoestring::swiglu(gate, up), exact = at::silu(wide_gate) * wide_up,
               upstream = torch::randn({7, 45});
  CHECK(at::allclose(y.to(at::kDouble), exact, 1e-6, 1e-7));
  const auto ours = torch::autograd::grad({y}, {gate, up}, {upstream});
  const auto expected = torch::autograd::grad({exact}, {wide_gate, wide_up}, {upstream.to(at::kDouble)});
  for (int i = 0; i < 2; ++i) CHECK(at::allclose(ours[i].to(at::kDouble), expected[i], 1e-5, 1e-6));
  CHECK_THROWS_WITH(shoestring::swiglu(gate, up.narrow(0, 0, 3)),
                    Catch::Matchers::Contains("swiglu: gate: expected the shape"));
}
