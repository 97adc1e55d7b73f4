#include "capabilities.h"
#include "catch.h"
#include "relative_error.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <shoestring/ops.h>

using at::Tensor;
using shoestring::LinearCrossEntropyOptions;
using shoestring::LinearCrossEntropyStats;

namespace {

// Computes the loss and its statistics as a reference, with all logits in memory.
LinearCrossEntropyStats reference(const Tensor& hidden, const Tensor& weight, Tensor target,
                                  const Tensor& bias, const LinearCrossEntropyOptions& options) {
  Tensor logits = options.logit_scale() * at::linear(hidden, weight, bias);
  if (options.softcap() != 0) logits = options.softcap() * at::tanh(logits / options.softcap());
  if (options.shift()) {
    target =
        at::cat({target.slice(-1, 1), at::full_like(target.slice(-1, 0, 1), options.ignore_index())}, -1);
  }
  const Tensor counted = target.ne(options.ignore_index()), zero = at::zeros({}, logits.options());
  LinearCrossEntropyStats out;
  out.lse = at::where(counted, logits.logsumexp(-1), zero);
  const Tensor entropies =
      at::cross_entropy_loss(logits.flatten(0, -2), target.flatten(), options.class_weights(),
                             at::Reduction::None, options.ignore_index(), options.label_smoothing())
          .view_as(target);
  const Tensor z_terms = options.z_loss() * out.lse.square();
  out.token_loss = entropies + z_terms;
  const Tensor log_p = logits.log_softmax(-1);
  out.entropy = at::where(counted, -(log_p.exp() * log_p).sum(-1), zero);
  out.argmax = at::where(counted, logits.argmax(-1), at::full({}, -1, at::kLong));
  out.correct = out.argmax.eq(target).logical_and(counted).sum();
  Tensor each = counted.to(at::kDouble);
  if (options.token_weights()) each = each * *options.token_weights();
  out.loss = out.token_loss * each;
  if (options.reduction() != "none") out.loss = out.loss.sum();
  if (options.reduction() == "mean") {
    const Tensor of_z = (z_terms * each).sum() / each.sum();
    out.loss = (entropies * each).sum();
    if (options.class_weights()) {
      const Tensor classes = target.masked_fill(counted.logical_not(), 0);
      each = each * options.class_weights()->index_select(0, classes.flatten()).view_as(target);
    }
    out.loss = out.loss / each.sum() + of_z;
  }
  return out;
}

// Random inputs for one set of options, as leaves of the tested dtype and of fp64, and the exact results in
// fp64.
struct Case {
  Case(at::IntArrayRef tokens, int64_t features, int64_t vocab, const LinearCrossEntropyOptions& options,
       at::ScalarType dtype)
      : options(options) {
    at::manual_seed(7);
    std::vector<int64_t> shape = tokens.vec();
    target = at::randint(vocab, shape);
    target.view(-1)[1] = options.ignore_index();
    shape.push_back(features);
    leaves = {at::randn(shape), at::randn({vocab, features}), at::randn({vocab})};
    for (Tensor& t : leaves) {
      t = t.to(dtype).requires_grad_();
      exact_leaves.push_back(t.detach().to(at::kDouble).requires_grad_());
    }
    exact = reference(exact_leaves[0], exact_leaves[1], target, exact_leaves[2], options);
  }

  // Compares an output and its gradients with the exact output and gradients in fp64.
  void check(const Tensor& output, const Tensor& expected, double tolerance,
             double gradient_tolerance) const {
    REQUIRE(output.sizes() == expected.sizes());
    CHECK(relative_error(output, expected) < tolerance);
    const Tensor upstream = at::randn_like(output);
    const auto gradients = torch::autograd::grad({output}, leaves, {upstream}, /*retain_graph=*/true);
    const auto truth =
        torch::autograd::grad({expected}, exact_leaves, {upstream.to(at::kDouble)}, /*retain_graph=*/true);
    for (int i = 0; i < 3; ++i) CHECK(relative_error(gradients[i], truth[i]) < gradient_tolerance);
  }

  LinearCrossEntropyOptions options;
  Tensor target;
  std::vector<Tensor> leaves, exact_leaves;  // each list holds hidden, weight and bias, in this order
  LinearCrossEntropyStats exact;
};

void compare(int64_t tokens, int64_t features, int64_t vocab, const LinearCrossEntropyOptions& options,
             at::ScalarType dtype, double tolerance) {
  CAPTURE(tokens, features, vocab, options.reduction(), shoestring::cpu_capability());
  const Case c({tokens}, features, vocab, options, dtype);
  const Tensor loss =
      shoestring::linear_cross_entropy(c.leaves[0], c.leaves[1], c.target, c.leaves[2], options);
  c.check(loss, c.exact.loss, dtype == at::kDouble ? 1e-13 : 1e-6, tolerance);
}

}  // namespace

TEST_CASE("linear_cross_entropy agrees with fp64 on every capability", "[linear_cross_entropy]") {
  for_each_capability([&](const char* /*capability*/) {
    for (const char* reduction : {"mean", "sum", "none"}) {
      LinearCrossEntropyOptions options;
      options.reduction(reduction).workspace_mb(1);
      // 1003 is not a multiple of a vector register's width. The logits of 300 tokens need more than one
      // chunk of 1 MiB.
      compare(300, 24, 1003, options, at::kFloat, 2e-6);
      compare(300, 24, 1003, options, at::kBFloat16, 4e-3);
      compare(5, 8, 17, options, at::kDouble, 1e-13);
      compare(300, 24, 1003, LinearCrossEntropyOptions(options).label_smoothing(0.1), at::kFloat, 2e-6);
      compare(300, 24, 1003, LinearCrossEntropyOptions(options).softcap(5), at::kFloat, 2e-6);
    }
  });
}

TEST_CASE("linear_cross_entropy has every option, and statistics with gradients of their own",
          "[linear_cross_entropy]") {
  // The CPU sums over blocks of classes, and a thread block on a GPU computes tiles of classes. 4103 classes
  // are more than one block and several tiles.
  constexpr int64_t kVocab = 4103;
  Tensor class_weights = at::rand({kVocab}, at::kDouble), token_weights = at::rand({3, 5}, at::kDouble) + 0.1;
  class_weights.slice(0, 0, kVocab, 3).zero_();
  LinearCrossEntropyOptions weighted, other, plain;
  weighted.class_weights(class_weights).token_weights(token_weights).label_smoothing(0.2).z_loss(0.1);
  other.logit_scale(-0.5).softcap(3).z_loss(1e-3).token_weights(token_weights).shift(true).reduction("none");
  for_each_capability([&](const char* capability) {
    for (const auto& options : {plain, weighted, other}) {
      for (const auto dtype : {at::kFloat, at::kDouble}) {
        CAPTURE(capability, options.z_loss(), options.reduction(), dtype);
        const Case c({3, 5}, 8, kVocab, options, dtype);
        const auto ours = shoestring::linear_cross_entropy_with_stats(c.leaves[0], c.leaves[1], c.target,
                                                                      c.leaves[2], options);
        const double tolerance = dtype == at::kDouble ? 1e-12 : 3e-6;
        c.check(ours.loss, c.exact.loss, tolerance, tolerance);
        c.check(ours.token_loss, c.exact.token_loss, tolerance, tolerance);
        c.check(ours.lse, c.exact.lse, tolerance, tolerance);
        c.check(ours.entropy, c.exact.entropy, tolerance, tolerance);
        CHECK(ours.argmax.equal(c.exact.argmax));
        CHECK(ours.correct.equal(c.exact.correct));
      }
    }
  });
}

TEST_CASE("linear_cross_entropy has quantised heads with LoRA", "[linear_cross_entropy]") {
  at::manual_seed(5);
  const Tensor hidden = at::randn({70, 32}).requires_grad_(), weight = at::randn({203, 32});
  const Tensor target = at::randint(203, {70});
  const Tensor low = at::randn({70, 4}).requires_grad_(), up = at::randn({203, 4}).requires_grad_();
  for (const char* quant_type : {"nf4", "int8"}) {
    CAPTURE(quant_type);
    const bool int8 = std::string(quant_type) == "int8";
    const auto [packed, absmax] =
        int8 ? shoestring::quantize_int8(weight) : shoestring::quantize_4bit(weight);
    const Tensor dense = int8 ? shoestring::dequantize_int8(packed, absmax, at::kFloat)
                              : shoestring::dequantize_4bit(packed, absmax, weight.sizes(), at::kFloat);
    LinearCrossEntropyOptions options;
    options.lora_hidden(low).lora_B(up).absmax(absmax).quant_type(quant_type).block_size(int8 ? 32 : 64);
    const Tensor loss = shoestring::linear_cross_entropy(hidden, packed, target, std::nullopt, options);
    std::vector<Tensor> leaves;
    for (const Tensor& t : {hidden, low, up}) leaves.push_back(t.detach().to(at::kDouble).requires_grad_());
    const Tensor logits = at::linear(leaves[0], dense.to(at::kDouble)) + at::linear(leaves[1], leaves[2]);
    const Tensor exact = at::cross_entropy_loss(logits, target);
    CHECK(relative_error(loss.detach(), exact.detach()) < 1e-6);
    const auto ours = torch::autograd::grad({loss}, {hidden, low, up}),
               theirs = torch::autograd::grad({exact}, leaves);
    for (int i = 0; i < 3; ++i) CHECK(relative_error(ours[i], theirs[i]) < 2e-6);
  }
}

TEST_CASE("linear_cross_entropy rounds an fp32 weight to the dtype of hidden", "[linear_cross_entropy]") {
  for_each_capability([](const char* capability) {
    CAPTURE(capability);
    at::manual_seed(9);
    const Tensor hidden = at::randn({97, 40}).to(at::kBFloat16).requires_grad_(),
                 weight = at::randn({300, 40}).requires_grad_(), target = at::randint(300, {97});
    const Tensor loss = shoestring::linear_cross_entropy(hidden, weight, target);
    const auto ours = torch::autograd::grad({loss}, {hidden, weight});
    CHECK(ours[0].scalar_type() == at::kBFloat16);
    CHECK(ours[1].scalar_type() == at::kFloat);
    const Tensor x = hidden.detach().to(at::kDouble).requires_grad_(),
                 w = weight.detach().to(at::kBFloat16).to(at::kDouble).requires_grad_();
    const Tensor exact = at::cross_entropy_loss(at::linear(x, w), target);
    const auto theirs = torch::autograd::grad({exact}, {x, w});
    CHECK(relative_error(loss.detach(), exact.detach()) < 2e-6);
    CHECK(relative_error(ours[0], theirs[0]) < 4e-3);
    CHECK(relative_error(ours[1], theirs[1]) < 4e-3);
  });
}

TEST_CASE("linear_cross_entropy refuses what does not fit", "[linear_cross_entropy]") {
  Tensor hidden = at::randn({4, 8}), weight = at::randn({10, 8}), target = at::zeros({4}, at::kLong);
  CHECK_THROWS_WITH(shoestring::linear_cross_entropy(hidden, at::randn({10, 9}), target),
                    Catch::Contains("weight: expected shape (vocab, 8)"));
  target[2] = 10;
  CHECK_THROWS_WITH(shoestring::linear_cross_entropy(hidden, weight, target),
                    Catch::Contains("target: expected classes in [0, "));
}
