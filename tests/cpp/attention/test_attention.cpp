#include "catch.h"

#include <cmath>
#include <limits>
#include <vector>

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <shoestring/ops.h>

#include "operators.h"

using at::Tensor;
using shoestring::AttentionOptions;

TEST_CASE("attention passes its options on", "[attention]") {
  const Tensor q = torch::randn({2, 4, 37, 24}), k = torch::randn({2, 2, 50, 24}),
               v = torch::randn({2, 2, 50, 16}), bias = torch::randn({1, 4, 37, 50}),
               sinks = torch::randn({4}), slopes = torch::rand({4});
  auto options = AttentionOptions().causal(true).window_size({20, -1}).bias(bias).sinks(sinks);
  options.softcap(3).scale(0.5).alibi_slopes(slopes);
  const auto expected = call("attention_with_lse", {{"q", q},
                                                    {"k", k},
                                                    {"v", v},
                                                    {"causal", true},
                                                    {"window_size", std::vector<int64_t>{20, -1}},
                                                    {"bias", bias},
                                                    {"sinks", sinks},
                                                    {"softcap", 3.0},
                                                    {"scale", 0.5},
                                                    {"alibi_slopes", slopes}});
  const auto [out, lse] = shoestring::attention_with_lse(q, k, v, options);
  CHECK(at::equal(out, expected[0]));
  CHECK(at::equal(lse, expected[1]));
  CHECK(at::equal(shoestring::attention(q, k, v, options), out));
}

TEST_CASE("attention of packed sequences is that of each, and lse has a gradient", "[attention]") {
  const Tensor q = torch::randn({23, 2, 32}).requires_grad_(), k = torch::randn({23, 2, 32}),
               v = torch::randn({23, 2, 32});
  const Tensor offsets = torch::tensor({0, 7, 23}, at::kInt);
  const auto [out, lse] =
      shoestring::attention_with_lse(q, k, v, AttentionOptions().causal(true).cu_seqlens_q(offsets));
  CHECK(lse.sizes() == at::IntArrayRef{2, 23});
  const auto alone = [](const Tensor& t) { return t.narrow(0, 7, 16).transpose(0, 1).unsqueeze(0); };
  const auto second =
      shoestring::attention_with_lse(alone(q), alone(k), alone(v), AttentionOptions().causal(true));
  CHECK(at::equal(alone(out), second.out));
  CHECK(at::equal(lse.narrow(1, 7, 16), second.lse[0]));
  CHECK(torch::autograd::grad({lse.sum()}, {q})[0].abs().sum().item<float>() > 0);
}

TEST_CASE("a row that a finite bias masks whole has the gradients of softmax", "[attention]") {
  for (const double large : {-1e9, static_cast<double>(std::numeric_limits<float>::lowest())}) {
    Tensor bias = torch::randn({1, 2, 20, 33});
    bias.narrow(2, 0, 7).fill_(large);
    const std::vector<Tensor> inputs{torch::randn({1, 2, 20, 16}).requires_grad_(),
                                     torch::randn({1, 2, 33, 16}).requires_grad_(),
                                     torch::randn({1, 2, 33, 16}).requires_grad_(), bias.requires_grad_()};
    const Tensor &q = inputs[0], &k = inputs[1], &v = inputs[2];
    const Tensor scores = at::matmul(q, k.transpose(-1, -2)) / 4 + bias;
    const Tensor expected = at::matmul(at::softmax(scores, -1), v), upstream = torch::randn({1, 2, 20, 16});
    const Tensor out = shoestring::attention(q, k, v, AttentionOptions().bias(bias));
    const auto ours = torch::autograd::grad({out}, inputs, {upstream});
    const auto theirs = torch::autograd::grad({expected}, inputs, {upstream});
    for (size_t i = 0; i < inputs.size(); ++i) {
      CAPTURE(large, i);
      CHECK(((ours[i] - theirs[i]).norm() / theirs[i].norm()).item<double>() < 2e-6);
    }
  }
}

TEST_CASE("attention gives the same bits when it is asked to", "[attention]") {
  const Tensor q = torch::randn({1, 2, 40, 32}).to(at::kBFloat16);
  const auto run = [&] {
    return shoestring::attention(q, q, q, AttentionOptions().causal(true).deterministic(true));
  };
  const Tensor first = run();
  CHECK(at::equal(first, run()));
  CHECK(at::allclose(first.to(at::kFloat),
                     shoestring::attention(q, q, q, AttentionOptions().causal(true)).to(at::kFloat), 2e-2,
                     1e-2));
}

TEST_CASE("attention takes the shapes of scaled_dot_product_attention", "[attention]") {
  const at::TensorOptions fp64(at::kDouble);
  const Tensor q = torch::randn({2, 3, 4, 5, 8}, fp64).requires_grad_(),
               k = torch::randn({4, 7, 8}, fp64).requires_grad_(),
               v = torch::randn({1, 3, 4, 7, 6}, fp64).requires_grad_(),
               mask = torch::randn({5, 7}, fp64).requires_grad_();
  const auto [out, lse] = shoestring::attention_with_lse(q, k, v, AttentionOptions().bias(mask));
  CHECK(lse.sizes() == at::IntArrayRef{2, 3, 4, 5});
  const Tensor expected =
      at::matmul(at::softmax(at::matmul(q, k.transpose(-1, -2)) / std::sqrt(8.0) + mask, -1), v);
  CHECK(at::allclose(out, expected, 1e-12, 1e-12));
  const Tensor upstream = torch::randn({2, 3, 4, 5, 6}, fp64);
  const auto ours = torch::autograd::grad({out}, {q, k, v, mask}, {upstream});
  const auto theirs = torch::autograd::grad({expected}, {q, k, v, mask}, {upstream});
  for (size_t i = 0; i < ours.size(); ++i) {
    CAPTURE(i);
    CHECK(at::allclose(ours[i], theirs[i], 1e-10, 1e-11));
  }
  const Tensor one = torch::randn({5, 8});
  CHECK(at::equal(shoestring::attention(one, one, one),
                  shoestring::attention(one.view({1, 1, 5, 8}), one.view({1, 5, 8}), one)[0][0]));
  CHECK_THROWS_WITH(shoestring::attention(q, k.narrow(0, 0, 3), v),
                    Catch::Matchers::Contains("attention: v: expected sizes in front of the tokens"));
}

TEST_CASE("packed sequences have ALiBi slopes of their own", "[attention]") {
  const Tensor q = torch::randn({23, 2, 32}), slopes = torch::rand({2, 2});
  const Tensor offsets = torch::tensor({0, 7, 23}, at::kInt);
  const Tensor out =
      shoestring::attention(q, q, q, AttentionOptions().alibi_slopes(slopes).cu_seqlens_q(offsets));
  const Tensor second = q.narrow(0, 7, 16).transpose(0, 1);  // (heads, tokens, features)
  CHECK(at::equal(out.narrow(0, 7, 16).transpose(0, 1),
                  shoestring::attention(second, second, second, AttentionOptions().alibi_slopes(slopes[1]))));
}

TEST_CASE("attention refuses what does not fit, in words", "[attention]") {
  const Tensor q = torch::randn({1, 4, 5, 8}), k = torch::randn({1, 3, 5, 8});
  CHECK_THROWS_WITH(shoestring::attention(q, k, k),
                    Catch::Matchers::Contains("attention: k: expected a number of heads"));
  CHECK_THROWS_WITH(shoestring::attention(q, q, q, AttentionOptions().dropout_p(0.5)),
                    Catch::Matchers::Contains("attention: seed: expected a seed with dropout"));
}

TEST_CASE("pack_sequences fills bins with the longest first", "[attention]") {
  const Tensor bins = shoestring::pack_sequences(torch::tensor({3, 7, 5, 2, 3}, at::kLong), 10);
  CHECK(at::equal(bins, torch::tensor({0, 0, 1, 1, 1}, at::kLong)));
  CHECK_THROWS_WITH(
      shoestring::pack_sequences(torch::tensor({11}, at::kLong), 10),
      Catch::Matchers::Contains("pack_sequences: lengths: expected 1 to 10 tokens, received 11"));
}
