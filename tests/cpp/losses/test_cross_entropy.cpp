#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <shoestring/ops.h>
#include <torch/csrc/autograd/autograd.h>

#include "capabilities.h"
#include "catch.h"
#include "relative_error.h"

using at::Tensor;
using shoestring::CrossEntropyOptions;

TEST_CASE("cross_entropy in place computes the gradient that a new tensor gets", "[cross_entropy]") {
  // 1003 is not a multiple of a vector register's width, so rows start at unaligned addresses.
  const int64_t vocab = 1003;
  at::manual_seed(7);
  CrossEntropyOptions capped, weighted;
  capped.softcap(3).logit_scale(-0.5).label_smoothing(0.1);
  weighted.class_weights(at::rand({vocab}, at::kDouble) + 0.1);
  const Tensor target = at::randint(vocab, {3, 5});
  target[0][1] = -100;
  for_each_capability([&](const char* capability) {
    for (const auto& given : {CrossEntropyOptions(), capped, weighted}) {
      for (const char* reduction : {"mean", "sum", "none"}) {
        for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
          CAPTURE(capability, given.softcap(), reduction, dtype);
          const Tensor leaf = (3 * at::randn({3, 6, vocab})).to(dtype).requires_grad_();
          const auto run = [&](bool inplace) {
            // This slice of the logits is not contiguous: its first two dimensions cannot be merged into one.
            return shoestring::cross_entropy(
                leaf.clone().slice(1, 0, 5), target,
                CrossEntropyOptions(given).reduction(reduction).inplace(inplace));
          };
          const Tensor loss = run(false), replaced = run(true), upstream = at::rand_like(loss) + 0.5;
          CHECK(at::equal(replaced, loss));
          const auto gradient = [&](const Tensor& y) {
            return torch::autograd::grad({y}, {leaf}, {upstream})[0];
          };
          // In place, backward rounds the gradient a second time when it multiplies by the upstream gradient.
          const double rounding = dtype == at::kDouble  ? 1e-15
                                  : dtype == at::kFloat ? 1.2e-7
                                  : dtype == at::kHalf  ? 1e-3
                                                        : 8e-3;
          CHECK(relative_error(gradient(replaced), gradient(loss)) <= rounding);
        }
      }
    }
  });
}

TEST_CASE("cross_entropy in place takes the logits' memory, and nobody gets a gradient for logits",
          "[cross_entropy]") {
  const Tensor target = at::randint(9, {6});
  Tensor leaf = at::randn({6, 9}).requires_grad_();
  const auto in_place = CrossEntropyOptions().inplace(true);
  SECTION("the gradient is where the logits were") {
    const Tensor logits = leaf.clone();
    const Tensor loss = shoestring::cross_entropy(logits, target, in_place);
    const Tensor left = logits.detach().clone();
    CHECK(torch::autograd::grad({loss}, {leaf})[0].equal(left));
  }
  SECTION("a node that saved the logits refuses its backward pass") {
    const Tensor logits = leaf.clone(), other = logits.square().sum();
    shoestring::cross_entropy(logits, target, in_place);
    CHECK_THROWS_WITH(torch::autograd::grad({other}, {leaf}),
                      Catch::Contains("modified by an inplace operation"));
  }
  SECTION("so does one that comes later") {
    const Tensor logits = leaf.clone();
    shoestring::cross_entropy(logits, target, in_place);
    CHECK_THROWS_WITH(torch::autograd::grad({logits.sum()}, {leaf}),
                      Catch::Contains("has replaced them by their gradient"));
  }
  SECTION("leaves stay, and so does everything without gradients") {
    const Tensor before = leaf.detach().clone(), logits = leaf.clone();
    shoestring::cross_entropy(leaf, target, in_place);
    at::NoGradGuard no_grad;
    const auto stats = shoestring::cross_entropy_with_stats(logits, target, in_place);
    CHECK(leaf.equal(before));
    CHECK(logits.equal(before));
    CHECK(stats.argmax.equal(before.argmax(-1)));
    CHECK(relative_error(stats.lse, before.to(at::kDouble).logsumexp(-1)) < 1e-6);
  }
}

TEST_CASE("cross_entropy takes classes in any dimension", "[cross_entropy]") {
  at::manual_seed(3);
  const Tensor leaf = at::randn({2, 9, 3, 4}, at::kDouble).requires_grad_();
  Tensor target = at::randint(9, {2, 3, 4}, at::kLong);
  target[0][1][2] = -100;
  const Tensor expected = at::cross_entropy_loss(leaf, target, {}, at::Reduction::Mean, -100);
  const Tensor gradient = torch::autograd::grad({expected}, {leaf})[0];
  for (const bool inplace : {false, true}) {
    const Tensor logits = leaf.clone(), before = logits.detach().clone();
    const auto stats = shoestring::cross_entropy_with_stats(
        logits, target, shoestring::CrossEntropyOptions().dim(1).inplace(inplace));
    CHECK(at::allclose(stats.loss, expected, 1e-12, 1e-12));
    CHECK(at::allclose(torch::autograd::grad({stats.loss}, {leaf})[0], gradient, 1e-12, 1e-12));
    CHECK(logits.equal(before));  // the gradient is in a copy
    CHECK(stats.argmax.masked_select(target.ne(-100)).equal(leaf.argmax(1).masked_select(target.ne(-100))));
    CHECK(stats.correct.equal(leaf.argmax(1).eq(target).sum()));
  }
  CHECK_THROWS_WITH(shoestring::cross_entropy(leaf, target, shoestring::CrossEntropyOptions().dim(4)),
                    Catch::Contains("dim: expected a dimension of the logits, -4 to 3, received 4"));
}

TEST_CASE("cross_entropy takes a part of two targets as a number or for each token", "[cross_entropy]") {
  at::manual_seed(4);
  const Tensor logits = at::randn({6, 40}, at::kDouble), target = at::randint(40, {6}, at::kLong),
               target2 = at::randint(40, {6}, at::kLong);
  const auto mixed = [&](const auto& mix) {
    return shoestring::cross_entropy(logits, target, CrossEntropyOptions().target2(target2).mix(mix));
  };
  const auto of = [&](const Tensor& classes) { return at::cross_entropy_loss(logits, classes); };
  CHECK(relative_error(mixed(0.3), 0.3 * of(target) + 0.7 * of(target2)) < 1e-14);
  CHECK(at::equal(mixed(at::full({6}, 0.3, at::kDouble)), mixed(0.3)));
  CHECK_THROWS_WITH(shoestring::cross_entropy(logits, target, CrossEntropyOptions().target2(target2)),
                    Catch::Contains("mix: expected the part of target, in [0, 1], with target2"));
  CHECK_THROWS_WITH(mixed(-0.5),
                    Catch::Contains("mix: expected numbers in [0, 1], received -0.5 at position 0"));
}
