#include "catch.h"

#include <torch/csrc/autograd/generated/variable_factories.h>

#include <shoestring/ops.h>

using at::Tensor;
using shoestring::RopeOptions;

TEST_CASE("rope takes rows of a table by position, packed tokens and a part of each head", "[rope]") {
  const Tensor angles = torch::rand({9, 4}), q = torch::randn({5, 3, 16}), k = torch::randn({5, 1, 16});
  const Tensor positions = torch::tensor({3, 0, 8, 8, 1}, at::kLong);
  const auto [turned, keys] =
      shoestring::rope(q, k, angles.cos(), angles.sin(), RopeOptions().rotary_dim(8).position_ids(positions));
  const Tensor rows = angles.index_select(0, positions).unsqueeze(1), cos = rows.cos(), sin = rows.sin();
  const Tensor first = q.narrow(-1, 0, 4), second = q.narrow(-1, 4, 4);
  const Tensor expected = at::cat({first * cos - second * sin, second * cos + first * sin}, -1);
  CHECK(at::allclose(turned.narrow(-1, 0, 8), expected, 1e-5, 1e-6));
  CHECK(at::equal(turned.narrow(-1, 8, 8), q.narrow(-1, 8, 8)));
  CHECK_THROWS_WITH(shoestring::rope(q, k, angles.cos(), angles.sin()),
                    Catch::Matchers::Contains("rope: cos: expected (tokens, width) with width 16 or 8"));
}
