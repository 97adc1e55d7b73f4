#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <shoestring/ops.h>
#include <torch/csrc/autograd/autograd.h>

#include "capabilities.h"
#include "catch.h"
#include "relative_error.h"

using at::Tensor;
using shoestring::CrossEntropyOptions;

namespace {

Tensor gradient(const Tensor& output, const Tensor& leaf, const Tensor& upstream) {
  return torch::autograd::grad({output}, {leaf}, {upstream.to(output.scalar_type())})[0];
}

// Computes the loss in fp64 with ATen's cross_entropy_loss, with softcap and logit_scale applied to the
// logits before.
Tensor reference(const Tensor& leaf, const Tensor& target, const CrossEntropyOptions& o) {
  Tensor z = leaf * o.logit_scale();
  if (o.softcap() != 0) z = o.softcap() * at::tanh(z / o.softcap());
  const auto reduction = o.reduction() == "none"  ? at::Reduction::None
                         : o.reduction() == "sum" ? at::Reduction::Sum
                                                  : at::Reduction::Mean;
  const Tensor loss = at::cross_entropy_loss(z.flatten(0, -2), target.flatten(), o.class_weights(), reduction,
                                             o.ignore_index(), o.label_smoothing());
  return loss.dim() == 0 ? loss : loss.view_as(target);
}

}  // namespace

TEST_CASE("cross_entropy agrees with fp64, with its gradient in place of the logits or not",
          "[cross_entropy]") {
  // 1003 is not a multiple of a vector register's width, so rows start at unaligned addresses.
  const int64_t vocab = 1003;
  CrossEntropyOptions capped, weighted;
  capped.softcap(3).logit_scale(-0.5).label_smoothing(0.1);
  weighted.class_weights(at::rand({vocab}, at::kDouble) + 0.1);
  for_each_capability([&](const char* capability) {
    for (const bool inplace : {false, true}) {
      for (const auto& given : {CrossEntropyOptions(), capped, weighted}) {
        for (const char* reduction : {"mean", "sum", "none"}) {
          for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
            CAPTURE(capability, inplace, given.softcap(), reduction, dtype);
            const auto options = CrossEntropyOptions(given).reduction(reduction).inplace(inplace);
            at::manual_seed(7);
            Tensor leaf = (3 * at::randn({3, 6, vocab})).to(dtype).requires_grad_();
            const Tensor target = at::randint(vocab, {3, 5});
            target[0][1] = -100;
            // This slice of the logits is not contiguous: its first two dimensions cannot be merged into one.
            const auto tokens = [](const Tensor& x) { return x.slice(1, 0, 5); };
            const Tensor loss = shoestring::cross_entropy(tokens(leaf.clone()), target, options);
            const Tensor exact_leaf = leaf.detach().to(at::kDouble).requires_grad_();
            const Tensor exact = reference(tokens(exact_leaf), target, options);
            CHECK(relative_error(loss, exact) < (dtype == at::kDouble ? 1e-14 : 1e-6));
            const Tensor upstream = at::rand(exact.sizes(), at::kDouble) + 0.5;
            const double rounding = dtype == at::kDouble  ? 1e-14
                                    : dtype == at::kFloat ? 1e-6
                                    : dtype == at::kHalf  ? 1e-3
                                                          : 8e-3;
            CHECK(relative_error(gradient(loss, leaf, upstream), gradient(exact, exact_leaf, upstream)) <
                  rounding);
          }
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

TEST_CASE("cross_entropy and linear_cross_entropy mix two targets", "[cross_entropy][linear_cross_entropy]") {
  at::manual_seed(4);
  const Tensor leaf = at::randn({6, 40}, at::kDouble).requires_grad_(), weight = at::eye(40, at::kDouble);
  const Tensor target = at::randint(40, {6}, at::kLong), target2 = at::randint(40, {6}, at::kLong);
  const Tensor parts = at::rand({6});
  const auto of = [&](const Tensor& mix) {
    const Tensor loss = mix * at::cross_entropy_loss(leaf, target, {}, at::Reduction::None) +
                        (1 - mix) * at::cross_entropy_loss(leaf, target2, {}, at::Reduction::None);
    return loss.mean();
  };
  for_each_capability([&](const char* capability) {
    CAPTURE(capability);
    const auto check = [&](const Tensor& loss, const Tensor& expected) {
      CHECK(relative_error(loss, expected) < 1e-14);
      CHECK(relative_error(torch::autograd::grad({loss}, {leaf})[0],
                           torch::autograd::grad({expected}, {leaf})[0]) < 1e-13);
    };
    check(shoestring::cross_entropy(leaf, target, CrossEntropyOptions().target2(target2).mix(0.3)),
          of(at::scalar_tensor(0.3, at::kDouble)));
    check(shoestring::cross_entropy(leaf, target, CrossEntropyOptions().target2(target2).mix(parts)),
          of(parts));
    check(
        shoestring::linear_cross_entropy(leaf, weight, target, std::nullopt,
                                         shoestring::LinearCrossEntropyOptions().target2(target2).mix(parts)),
        of(parts));
  });
  CHECK_THROWS_WITH(shoestring::cross_entropy(leaf, target, CrossEntropyOptions().target2(target2)),
                    Catch::Contains("mix: expected the part of target, in [0, 1], with target2"));
  CHECK_THROWS_WITH(shoestring::cross_entropy(leaf, target, CrossEntropyOptions().target2(target2).mix(-0.5)),
                    Catch::Contains("mix: expected numbers in [0, 1], received -0.5 at position 0"));
}
