#include "catch.h"

#include <ATen/ATen.h>
#include <shoestring/data/data.h>
#include <shoestring/ops.h>
#include <torch/csrc/autograd/autograd.h>

#include "relative_error.h"

using at::Tensor;
using shoestring::data::cutmix;
using shoestring::data::Mixed;
using shoestring::data::MixOptions;
using shoestring::data::mixup;

// tests/python/data/test_mixing.py has the same inputs and results.
TEST_CASE("mixup and cutmix draw the numbers of the test in Python", "[mixing]") {
  const Tensor x = at::arange(4 * 2 * 5 * 3, at::kFloat).view({4, 2, 5, 3}) / 8, target = at::arange(4);
  const auto check = [&](const Mixed& mixed, const std::vector<float>& mix, double total) {
    CHECK(mixed.target.is_same(target));
    CHECK(mixed.target2.equal(at::tensor({1, 2, 3, 0}, at::kLong)));
    CHECK(at::allclose(mixed.mix.view(-1), at::tensor(mix), 1e-6));
    CHECK(mixed.inputs.sum().item<double>() == Approx(total).epsilon(1e-6));
  };
  const MixOptions each(7, 9);
  check(mixup(x, target, each), {0.9680737f}, 892.5);
  check(cutmix(x, target, each), {0.8f}, 892.5);
  const auto rows = MixOptions(7, 9).per_row(true);
  check(mixup(x, target, rows), {0.1429532f, 0.9926808f, 0.9512171f, 0.9357721f}, 973.55225);
  check(cutmix(x, target, rows), {0.6f, 11.f / 15, 11.f / 15, 0.6f}, 862.5);
}

TEST_CASE("mixup combines rows, cutmix replaces the share 1 - mix", "[mixing]") {
  at::manual_seed(1);
  const Tensor x = at::randn({5, 3, 9, 7}, at::kDouble), target = at::arange(5);
  for (const bool per_row : {false, true}) {
    const auto options = MixOptions(3, 1).per_row(per_row).alpha(0.8);
    const Mixed mixed = mixup(x, target, options), cut = cutmix(x, target, options);
    const auto share = [&](const Mixed& m) {
      return (per_row ? m.mix.view({5, 1, 1, 1}) : m.mix).to(at::kDouble);
    };
    const Tensor expected = share(mixed) * x + (1 - share(mixed)) * x.index_select(0, mixed.target2);
    CHECK(relative_error(mixed.inputs, expected) < 1e-14);
    CHECK(at::allclose(cut.inputs.eq(x).to(at::kFloat).mean({1, 2, 3}), cut.mix.expand({5}), 1e-6));
    CHECK(mixup(x, target, options).inputs.equal(mixed.inputs));
    CHECK_FALSE(mixup(x, target, MixOptions(3, 2).per_row(per_row)).inputs.equal(mixed.inputs));
  }
}

TEST_CASE("the losses take a mixed batch", "[mixing][cross_entropy]") {
  at::manual_seed(2);
  const Tensor x = at::randn({6, 10}, at::kDouble).requires_grad_(), labels = at::randint(10, {6}, at::kLong);
  const Mixed mixed = mixup(x, labels, MixOptions(0, 0));
  const Tensor loss = shoestring::cross_entropy(
      mixed.inputs, mixed.target, shoestring::CrossEntropyOptions().target2(mixed.target2).mix(mixed.mix));
  const Tensor mix = mixed.mix.to(at::kDouble);
  const Tensor expected = mix * at::cross_entropy_loss(mixed.inputs, mixed.target) +
                          (1 - mix) * at::cross_entropy_loss(mixed.inputs, mixed.target2);
  CHECK(relative_error(loss, expected) < 1e-14);
  CHECK(relative_error(torch::autograd::grad({loss}, {x}, {}, true)[0],
                       torch::autograd::grad({expected}, {x})[0]) < 1e-14);
}

TEST_CASE("mixup and cutmix name the argument that does not fit", "[mixing]") {
  const Tensor x = at::zeros({4, 3, 8, 8}), target = at::zeros({4}, at::kLong);
  CHECK_THROWS_WITH(mixup(x, target, MixOptions(0, -1)),
                    Catch::Contains("mixup: step: expected a number of at least 0, received -1"));
  CHECK_THROWS_WITH(mixup(x, target, MixOptions(0, 0).alpha(0)),
                    Catch::Contains("mixup: alpha: expected a positive number, received 0"));
  CHECK_THROWS_WITH(mixup(x, target.slice(0, 1), MixOptions(0, 0)),
                    Catch::Contains("mixup: target: expected shape (rows, ...) with 4 rows, received [3]"));
  CHECK_THROWS_WITH(cutmix(x.flatten(1), target, MixOptions(0, 0)),
                    Catch::Contains("cutmix: inputs: expected shape (rows, ..., height, width)"));
}
