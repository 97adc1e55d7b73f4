#include "capabilities.h"
#include "catch.h"
#include "operators.h"
#include "relative_error.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <shoestring/ops.h>

using at::Tensor;
using shoestring::LinearCrossEntropyOptions;

TEST_CASE("linear_cross_entropy passes its arguments on and names the statistics", "[linear_cross_entropy]") {
  const Tensor hidden = at::randn({3, 5, 8}), weight = at::randn({41, 8}), bias = at::randn({41}),
               target = at::randint(41, {3, 5}), target2 = at::randint(41, {3, 5}), classes = at::rand({41}),
               tokens = at::rand({3, 5}), mix = at::rand({3, 5});
  LinearCrossEntropyOptions options;
  options.class_weights(classes).token_weights(tokens).target2(target2).mix(mix).ignore_index(7).shift(true);
  options.label_smoothing(0.2).z_loss(0.1).softcap(3).logit_scale(-0.5).reduction("sum").hard_fraction(0.5);
  const auto expected = call("linear_cross_entropy_with_stats", {{"hidden", hidden},
                                                                 {"weight", weight},
                                                                 {"target", target},
                                                                 {"bias", bias},
                                                                 {"class_weights", classes},
                                                                 {"token_weights", tokens},
                                                                 {"target2", target2},
                                                                 {"mix", mix},
                                                                 {"ignore_index", 7},
                                                                 {"shift", true},
                                                                 {"label_smoothing", 0.2},
                                                                 {"z_loss", 0.1},
                                                                 {"softcap", 3.0},
                                                                 {"logit_scale", -0.5},
                                                                 {"reduction", "sum"},
                                                                 {"hard_fraction", 0.5}});
  const auto [loss, token_loss, lse, entropy, argmax, correct] =
      shoestring::linear_cross_entropy_with_stats(hidden, weight, target, bias, options);
  const std::vector<Tensor> found{loss, token_loss, lse, entropy, argmax, correct};
  for (size_t i = 0; i < found.size(); ++i) CHECK(at::equal(found[i], expected[i]));
  CHECK(at::equal(shoestring::linear_cross_entropy(hidden, weight, target, bias, options), loss));
}

TEST_CASE("linear_cross_entropy computes in fp64", "[linear_cross_entropy]") {
  const Tensor target = at::randint(17, {5});
  const std::vector<Tensor> leaves{at::randn({5, 8}, at::kDouble).requires_grad_(),
                                   at::randn({17, 8}, at::kDouble).requires_grad_(),
                                   at::randn({17}, at::kDouble).requires_grad_()};
  const Tensor loss = shoestring::linear_cross_entropy(leaves[0], leaves[1], target, leaves[2]);
  const Tensor exact = at::cross_entropy_loss(at::linear(leaves[0], leaves[1], leaves[2]), target);
  CHECK(relative_error(loss, exact) < 1e-13);
  const auto ours = torch::autograd::grad({loss}, leaves), theirs = torch::autograd::grad({exact}, leaves);
  for (int i = 0; i < 3; ++i) CHECK(relative_error(ours[i], theirs[i]) < 1e-13);
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
