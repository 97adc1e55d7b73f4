#include "catch.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <shoestring/experts/ops.h>

#include "capabilities.h"
#include "emulated.h"

using at::Tensor;
using shoestring::grouped_linear;
using shoestring::GroupedLinearOptions;

namespace {

// Slot 0 and slot 6 have no expert, and expert 1 has no slot.
struct Inputs {
  Tensor x = torch::randn({5, 33}), weight = torch::randn({3, 17, 33}), bias = torch::randn({3, 17});
  Tensor offsets = torch::tensor({1, 4, 4, 6}), rows = torch::tensor({2, 4, 0, 4, 1, 4, 3});
};

Tensor expected_of(const Inputs& in) {
  const Tensor given = in.x.index_select(0, in.rows);
  std::vector<Tensor> parts{torch::zeros({1, 17})};
  for (const int64_t e : {0, 2}) {
    const auto first = in.offsets[e].item<int64_t>(), last = in.offsets[e + 1].item<int64_t>();
    parts.push_back(given.narrow(0, first, last - first).matmul(in.weight[e].t()) + in.bias[e]);
  }
  parts.push_back(torch::zeros({1, 17}));
  return at::cat(parts);
}

}  // namespace

TEST_CASE("grouped_linear passes its options", "[grouped_linear]") {
  const Inputs in;
  const Tensor expected = expected_of(in);
  for_each_capability([&](const char* capability) {
    CAPTURE(capability);
    const auto options = GroupedLinearOptions().rows(in.rows).bias(in.bias);
    const Tensor y = grouped_linear(in.x, in.weight, in.offsets, options);
    CHECK(at::allclose(y, expected, 1e-4, 1e-5));
    const Tensor rows = in.x.index_select(0, in.rows);
    CHECK(at::equal(y, grouped_linear(rows, in.weight, in.offsets, GroupedLinearOptions().bias(in.bias))));
    const Tensor narrow = grouped_linear(in.x, in.weight, in.offsets,
                                         GroupedLinearOptions().rows(in.rows).dtype(at::kBFloat16));
    CHECK(narrow.scalar_type() == at::kBFloat16);
    const Tensor without_bias = grouped_linear(rows, in.weight, in.offsets);
    CHECK(at::allclose(narrow.to(at::kFloat), without_bias, 0.05, 0.2));
    CHECK_FALSE(at::equal(without_bias, y));
  });
}

TEST_CASE("grouped_linear has gradients of x, the weight and the bias", "[grouped_linear]") {
  Inputs in;
  const std::vector<Tensor> leaves{in.x.requires_grad_(), in.weight.requires_grad_(),
                                   in.bias.requires_grad_()};
  const Tensor upstream = torch::randn({7, 17});
  const auto gradients = [&](const Tensor& y) { return torch::autograd::grad({y}, leaves, {upstream}); };
  const auto options = GroupedLinearOptions().rows(in.rows).bias(in.bias);
  const auto ours = gradients(grouped_linear(in.x, in.weight, in.offsets, options));
  const auto expected = gradients(expected_of(in));
  for (size_t i = 0; i < leaves.size(); ++i) CHECK(at::allclose(ours[i], expected[i], 1e-4, 1e-5));
  CHECK(ours[1][1].eq(0).all().item<bool>());
}

TEST_CASE("grouped_linear refuses arguments that do not fit", "[grouped_linear]") {
  const Inputs in;
  CHECK_THROWS_WITH(grouped_linear(in.x, in.weight.to(at::kDouble), torch::tensor({0, 1, 1, 5})),
                    Catch::Contains("grouped_linear: weight: expected Float, received Double; pass dtype"));
  if (is_emulated()) return;  // on a GPU, the host reads no indices
  CHECK_THROWS_WITH(grouped_linear(in.x, in.weight, torch::tensor({0, 2, 1, 5})),
                    Catch::Contains("grouped_linear: offsets: expected ascending numbers from 0 to 5"));
  const auto outside = GroupedLinearOptions().rows(torch::tensor({0, 5}));
  CHECK_THROWS_WITH(grouped_linear(in.x, in.weight, torch::tensor({0, 1, 1, 2}), outside),
                    Catch::Contains("grouped_linear: rows: expected numbers from 0 to 4, received 5"));
}
