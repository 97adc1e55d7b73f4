#include "catch.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <shoestring/ops.h>

using at::Tensor;

TEST_CASE("seeded_dropout drops by its seed, and its backward drops the same", "[seeded_dropout]") {
  const Tensor x = torch::randn({40, 33}).requires_grad_(), seed = torch::tensor({int64_t{5}});
  const Tensor y = shoestring::seeded_dropout(x, seed, 0.25);
  const Tensor kept = y.ne(0);
  CHECK(at::allclose(y, x * kept / 0.75, 1e-5));
  const double share = kept.to(at::kDouble).mean().item<double>();
  CHECK(share > 0.69);  // 0.75 minus or plus five standard deviations of the mean of 1320 draws
  CHECK(share < 0.81);
  const Tensor gradient = torch::autograd::grad({y.sum()}, {x})[0];
  CHECK(at::equal(gradient.ne(0), kept));
  CHECK(at::equal(shoestring::seeded_dropout(x, seed, 0.25), y));
  CHECK_FALSE(at::equal(shoestring::seeded_dropout(x, seed + 1, 0.25), y));
}
