#include "catch.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <shoestring/ops.h>

using at::Tensor;
using shoestring::RopeOptions;

namespace {

// Rotates x (..., tokens, head_dim) by angles (tokens, head_dim / 2). Element i of a head is paired with
// element i + head_dim / 2, or if `interleaved`, element 2 i with the next.
Tensor plain(const Tensor& x, const Tensor& angles, bool interleaved = false) {
  const auto pairs = interleaved ? x.unflatten(-1, {-1, 2}).unbind(-1) : x.chunk(2, -1);
  const Tensor cos = angles.cos(), sin = angles.sin();
  const Tensor first = pairs[0] * cos - pairs[1] * sin, second = pairs[1] * cos + pairs[0] * sin;
  return interleaved ? at::stack({first, second}, -1).flatten(-2) : at::cat({first, second}, -1);
}

Tensor normed(const Tensor& x, const Tensor& weight) {
  return x * at::rsqrt(x.square().mean(-1, true) + 1e-6) * weight;
}

}  // namespace

TEST_CASE("rope agrees with plain tensors in fp64, also interleaved and after a norm", "[rope]") {
  const Tensor angles = torch::rand({5, 8}).mul_(3);
  std::vector<Tensor> leaves{torch::randn({2, 5, 3, 16}).transpose(1, 2).requires_grad_(),
                             torch::randn({2, 5, 1, 16}).transpose(1, 2).requires_grad_(),
                             torch::rand({16}).requires_grad_(), torch::rand({16}).requires_grad_()},
      wide;
  for (const Tensor& t : leaves) wide.push_back(t.detach().to(at::kDouble).requires_grad_());
  const Tensor exact_angles = angles.to(at::kDouble);
  for (const int variant : {0, 1, 2, 3}) {
    const bool norms = variant & 1, interleaved = variant & 2;
    CAPTURE(norms, interleaved);
    auto options = RopeOptions().interleaved(interleaved);
    if (norms) options.q_weight(leaves[2]).k_weight(leaves[3]);
    const auto [q, k] = shoestring::rope(leaves[0], leaves[1], angles.cos(), angles.sin(), options);
    const auto exact = [&](int i) {
      return plain(norms ? normed(wide[i], wide[2 + i]) : wide[i], exact_angles, interleaved);
    };
    CHECK(at::allclose(q.to(at::kDouble), exact(0), 1e-5, 1e-5));
    CHECK(at::allclose(k.to(at::kDouble), exact(1), 1e-5, 1e-5));
    CHECK(q.transpose(1, 2).is_contiguous());
    const int count = norms ? 4 : 2;
    const std::vector<Tensor> some(leaves.begin(), leaves.begin() + count),
        wide_some(wide.begin(), wide.begin() + count);
    const auto ours = torch::autograd::grad({q.square().sum() + k.sum()}, some);
    const auto expected = torch::autograd::grad({exact(0).square().sum() + exact(1).sum()}, wide_some);
    for (int i = 0; i < count; ++i) CHECK(at::allclose(ours[i].to(at::kDouble), expected[i], 1e-4, 1e-4));
  }
}

TEST_CASE("rope takes rows of a table by position, packed tokens and a part of each head", "[rope]") {
  const Tensor angles = torch::rand({9, 4}), q = torch::randn({5, 3, 16}), k = torch::randn({5, 1, 16});
  const Tensor positions = torch::tensor({3, 0, 8, 8, 1}, at::kLong);
  const auto [turned, keys] =
      shoestring::rope(q, k, angles.cos(), angles.sin(), RopeOptions().rotary_dim(8).position_ids(positions));
  const Tensor rows = angles.index_select(0, positions).unsqueeze(1);
  CHECK(at::allclose(turned.narrow(-1, 0, 8), plain(q.narrow(-1, 0, 8), rows), 1e-5, 1e-6));
  CHECK(at::equal(turned.narrow(-1, 8, 8), q.narrow(-1, 8, 8)));
  CHECK_THROWS_WITH(shoestring::rope(q, k, angles.cos(), angles.sin()),
                    Catch::Matchers::Contains("rope: cos: expected (tokens, width) with width 16 or 8"));
}
