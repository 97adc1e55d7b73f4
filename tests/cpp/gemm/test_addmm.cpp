#include "catch.h"

#include <ATen/ATen.h>

#include <shoestring/ops.h>

#include "capabilities.h"

using at::Tensor;

TEST_CASE("addmm_ adds products of bf16 matrices in fp32", "[addmm]") {
  at::manual_seed(3);
  const Tensor a = at::randn({50, 300}, at::kBFloat16), b = at::randn({70, 300}, at::kBFloat16);
  for_each_capability([&](const char* capability) {
    CAPTURE(capability);
    const Tensor main_grad = at::ones({50, 70});
    shoestring::addmm_(main_grad, a, b.t(), /*beta=*/2, /*alpha=*/0.5);
    const Tensor exact = a.to(at::kDouble).mm(b.to(at::kDouble).t()).mul(0.5).add(2);
    CHECK((main_grad - exact).norm().item<double>() <= 1e-6 * exact.norm().item<double>());
  });
  CHECK_THROWS_WITH(shoestring::addmm_(at::ones({2, 2}), a, b), Catch::Contains("mat1 and mat2"));
}
