// Tests nn::MixtureOfDepths: values and gradients against a loop over tokens in fp64, the causal choice of
// the predictor, packed sequences, checkpoints and errors.
#include "catch.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <sstream>

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/generated/variable_factories.h>
#include <torch/nn/modules/container/sequential.h>

#include <shoestring/checkpoint/autograd.h>
#include <shoestring/checkpoint/checkpoint.h>
#include <shoestring/nn.h>

using at::Tensor;
using Catch::Contains;
namespace nn = shoestring::nn;

namespace {

// The autograd engine must be installed before the first backward pass of any test, so before main().
[[maybe_unused]] const bool engine_for_depths = (shoestring::install_autograd_engine(), true);

// A layer of a decoder: attention with a residual connection.
struct DepthLayerImpl : torch::nn::Cloneable<DepthLayerImpl> {
  DepthLayerImpl() { reset(); }
  void reset() override {
    attention = register_module("attention", nn::Attention(nn::AttentionOptions(8, 2).causal(true)));
  }
  Tensor forward(const Tensor& x, const nn::AttentionInput& input) { return x + attention(x, input); }
  nn::Attention attention{nullptr};
};
TORCH_MODULE(DepthLayer);

// Adds to each token the sum of the tokens up to it. Sums of small integers are exact.
struct PrefixSumImpl : torch::nn::Cloneable<PrefixSumImpl> {
  void reset() override {}
  Tensor forward(const Tensor& x) {
    if (x.size(-1) > 0) seen.push_back(x.select(-1, 0).detach().clone());
    return x + x.cumsum(-2);
  }
  std::vector<Tensor> seen;  // the first feature of each input
};
TORCH_MODULE(PrefixSum);

// Makes a block of another number of features.
struct DropsFeatureImpl : torch::nn::Cloneable<DropsFeatureImpl> {
  void reset() override {}
  Tensor forward(const Tensor& x) { return x.slice(-1, 1); }
};
TORCH_MODULE(DropsFeature);

nn::MixtureOfDepthsOptions small(double capacity) { return nn::MixtureOfDepthsOptions(8).capacity(capacity); }

// Returns the chosen positions of a sequence, from its weights one by one.
std::vector<int64_t> heaviest(const Tensor& weights, int64_t count) {
  std::vector<int64_t> order(weights.numel());
  std::iota(order.begin(), order.end(), 0);
  const auto* w = weights.const_data_ptr<double>();
  std::ranges::stable_sort(order, [&](int64_t a, int64_t b) { return w[a] > w[b]; });
  order.resize(count);
  std::ranges::sort(order);
  return order;
}

// Computes a sequence (tokens, features) in fp64. `positions` are those of its tokens.
Tensor sequence_by_hand(const nn::MixtureOfDepths& mod, DepthLayer& layer, const Tensor& x, const Tensor& cos,
                        const Tensor& sin, const Tensor& positions) {
  const int64_t tokens = x.size(0);
  const auto count = std::min<int64_t>(
      tokens, std::max<int64_t>(1, std::llround(mod->options.capacity() * static_cast<double>(tokens))));
  const Tensor weights = at::mv(x, mod->router);
  const auto chosen = heaviest(weights.detach(), count);
  const Tensor index = torch::tensor(chosen), rows = x.index_select(0, index),
               at_index = positions.index_select(0, index);
  const auto input =
      nn::AttentionInput().cos(cos.index_select(0, at_index)).sin(sin.index_select(0, at_index));
  const Tensor out = layer(rows.unsqueeze(0), input)[0];
  std::vector<Tensor> result;
  for (int64_t t = 0; t < tokens; ++t) {
    const auto found = std::ranges::find(chosen, t);
    if (found == chosen.end()) {
      result.push_back(x[t]);
      continue;
    }
    const int64_t i = found - chosen.begin();
    const Tensor r = mod->options.score() == "sigmoid" ? weights[t].sigmoid() : weights[t];
    result.push_back(x[t] + r * (out[i] - x[t]));
  }
  return at::stack(result);
}

void check_close(const Tensor& y, const Tensor& expected, std::vector<Tensor> leaves) {
  REQUIRE(y.sizes() == expected.sizes());
  CHECK(at::allclose(y, expected, 1e-10, 1e-12));
  const auto ours = torch::autograd::grad({y.square().sum()}, leaves, {}, {}, false, true),
             theirs = torch::autograd::grad({expected.square().sum()}, leaves, {}, {}, false, true);
  for (size_t i = 0; i < leaves.size(); ++i) {
    REQUIRE(ours[i].defined() == theirs[i].defined());
    if (ours[i].defined()) CHECK(at::allclose(ours[i], theirs[i], 1e-9, 1e-11));
  }
}

}  // namespace

TEST_CASE("MixtureOfDepths has the values and gradients of its tokens one by one, in fp64", "[depths]") {
  const Tensor angles = at::outer(at::arange(30, at::kDouble), at::tensor({1.0, 0.3}, at::kDouble)),
               cos = angles.cos(), sin = angles.sin();
  DepthLayer layer;
  layer->to(at::kDouble);
  nn::MixtureOfDepths mod(layer, small(0.3).score(GENERATE("linear", "sigmoid")));
  REQUIRE(mod->router.scalar_type() == at::kDouble);
  std::vector<Tensor> leaves = layer->parameters();
  leaves.push_back(mod->router);
  SECTION("a batch") {
    const Tensor x = torch::randn({3, 11, 8}, at::kDouble).set_requires_grad(true);
    leaves.push_back(x);
    const auto check = [&](const nn::AttentionInput& input, const Tensor& positions) {
      std::vector<Tensor> rows;
      for (int64_t b = 0; b < 3; ++b)
        rows.push_back(sequence_by_hand(mod, layer, x[b], cos, sin, positions[b]));
      check_close(mod(x, input), at::stack(rows), leaves);
      CHECK(at::equal(mod->route.offsets, at::tensor({0, 3, 6, 9}, at::kLong)));
    };
    const Tensor first = at::arange(11).expand({3, 11});
    check(nn::AttentionInput().cos(cos.narrow(0, 0, 11)).sin(sin.narrow(0, 0, 11)), first);
    check(nn::AttentionInput().cos(cos).sin(sin).position_ids(first[0]), first);
    const Tensor ids = 2 * first + at::arange(3).view({3, 1});
    check(nn::AttentionInput().cos(cos).sin(sin).position_ids(ids), ids);
  }
  SECTION("packed sequences") {
    const Tensor x = torch::randn({13, 8}, at::kDouble).set_requires_grad(true);
    leaves.push_back(x);
    const std::vector<int64_t> bounds{0, 5, 6, 13};
    std::vector<Tensor> rows, positions;
    for (size_t s = 0; s + 1 < bounds.size(); ++s) {
      const int64_t length = bounds[s + 1] - bounds[s];
      positions.push_back(at::arange(length));
      rows.push_back(sequence_by_hand(mod, layer, x.narrow(0, bounds[s], length), cos, sin, positions[s]));
    }
    const auto input = nn::AttentionInput()
                           .cos(cos)
                           .sin(sin)
                           .position_ids(at::cat(positions))
                           .cu_seqlens_q(at::tensor({0, 5, 6, 13}, at::kInt));
    check_close(mod(x, input), at::cat(rows), leaves);
    CHECK(at::equal(mod->route.offsets, at::tensor({0, 2, 3, 5}, at::kLong)));
  }
}

TEST_CASE("MixtureOfDepths chooses the lowest of equal tokens, and at least one", "[depths]") {
  const auto chosen = [](int64_t tokens, double capacity, double weight) {
    nn::MixtureOfDepths mod(PrefixSum(), small(capacity));
    const torch::NoGradGuard no_grad;
    mod->router.fill_(weight);
    mod(torch::ones({2, tokens, 8}));
    return mod->route.index;
  };
  CHECK(at::equal(chosen(5, 0.4, 0), at::tensor({0, 1, 5, 6}, at::kLong)));
  CHECK(at::equal(chosen(5, 0.01, 0.5), at::tensor({0, 5}, at::kLong)));
  CHECK(at::equal(chosen(5, 0.5, 0), at::tensor({0, 1, 2, 5, 6, 7}, at::kLong)));  // 2.5 is rounded up
  CHECK(chosen(3, 1, 0).numel() == 6);
  CHECK(chosen(0, 0.5, 0).numel() == 0);
}

TEST_CASE("The predictor of MixtureOfDepths is causal", "[depths]") {
  nn::MixtureOfDepths mod(PrefixSum(), small(0.25));
  {
    const torch::NoGradGuard no_grad;
    for (const Tensor& t : mod->parameters()) t.copy_(torch::randint(-2, 3, t.sizes()));
  }
  mod->eval();
  const Tensor x = torch::randint(-3, 4, {4, 12, 8}, at::kFloat);
  const Tensor y = mod(x);
  CHECK(mod->route.loss.item<float>() == 0);
  const Tensor wanted = (at::matmul(x, mod->predictor) + mod->predictor_bias).gt(0);
  CHECK(at::equal(mod->route.index, wanted.flatten().nonzero().flatten()));
  CHECK(wanted.any().item<bool>());
  for (int64_t t = 0; t < 12; ++t) {
    Tensor changed = x.clone();
    changed.slice(1, t) = torch::randint(-3, 4, {4, 12 - t, 8}, at::kFloat);
    CHECK(at::equal(mod(changed).narrow(1, 0, t), y.narrow(1, 0, t)));
  }
  mod->options.choice("top_k");
  mod(x);
  CHECK(mod->route.index.numel() == 12);
}

TEST_CASE("The loss of MixtureOfDepths trains the predictor alone", "[depths]") {
  nn::MixtureOfDepths mod(PrefixSum(), small(0.25));
  mod->to(at::kDouble);
  const Tensor x = torch::randn({3, 8, 8}, at::kDouble).set_requires_grad(true);
  mod(x);
  Tensor expected = at::zeros({}, at::kDouble);
  std::vector<bool> is_chosen(24);
  for (int64_t i = 0; i < 6; ++i) is_chosen[mod->route.index[i].item<int64_t>()] = true;
  for (int64_t t = 0; t < 24; ++t) {
    const Tensor p = (at::dot(x.detach()[t / 8][t % 8], mod->predictor) + mod->predictor_bias).sigmoid();
    expected = expected - (is_chosen[t] ? p.log() : (1 - p).log()).sum() / 24;
  }
  CHECK(at::allclose(mod->route.loss, expected, 1e-10));
  const std::vector<Tensor> leaves{mod->predictor, mod->predictor_bias, mod->router, x};
  const auto ours = torch::autograd::grad({mod->route.loss}, leaves, {}, {}, false, true),
             theirs = torch::autograd::grad({expected}, {leaves[0], leaves[1]});
  CHECK(at::allclose(ours[0], theirs[0], 1e-9, 1e-11));
  CHECK(at::allclose(ours[1], theirs[1], 1e-9, 1e-11));
  CHECK_FALSE(ours[2].defined());
  CHECK_FALSE(ours[3].defined());
}

TEST_CASE("The second run of a checkpoint computes the tokens of the first", "[depths][checkpoint]") {
  PrefixSum block;
  nn::MixtureOfDepths mod(block, small(0.25));
  Tensor x = torch::randn({2, 12, 8});
  x.select(-1, 0) = at::arange(24).view({2, 12});
  x.set_requires_grad(true);
  const Tensor noise = 5 * torch::randn({2, 12, 8});
  noise.select(-1, 0).zero_();
  Tensor loss;
  const auto run = [&](const Tensor& y) {
    const Tensor out = mod(shoestring::is_recomputing() ? y + noise : y);
    return out.sin();
  };
  SECTION("with other weights") {
    shoestring::checkpoint(run, x).sum().backward();
    REQUIRE(block->seen.size() == 2);
    CHECK(at::equal(block->seen[0], block->seen[1]));
  }
  SECTION("with the gradients of a plain call") {
    noise.zero_();
    std::vector<Tensor> leaves = mod->parameters();
    leaves.push_back(x);
    const auto total = [&](const Tensor& y) { return y.sum() + mod->route.loss; };
    const Tensor plain = total(run(x)), index = mod->route.index;
    const auto expected = torch::autograd::grad({plain}, leaves);
    const Tensor again = total(shoestring::checkpoint(run, x));
    const Tensor before = mod->route.weight;
    const auto found = torch::autograd::grad({again}, leaves);
    for (size_t i = 0; i < leaves.size(); ++i) CHECK(at::equal(found[i], expected[i]));
    CHECK(mod->route.weight.is_same(before));
    CHECK(at::equal(mod->route.index, index));
  }
}

TEST_CASE("MixtureOfDepths is cloned, printed and part of a Sequential", "[depths]") {
  nn::MixtureOfDepths mod(nn::GatedMLP(8, 4), small(0.5));
  const Tensor x = torch::randn({2, 6, 8}), y = mod(x);
  std::vector<std::string> names;
  for (const auto& each : mod->named_parameters()) names.push_back(each.key());
  CHECK(names == std::vector<std::string>{"router", "predictor", "predictor_bias", "block.gate_proj.weight",
                                          "block.up_proj.weight", "block.down_proj.weight"});
  const auto copy = std::dynamic_pointer_cast<nn::MixtureOfDepthsImpl>(mod->clone());
  CHECK(at::equal(copy->forward(x), y));
  {
    const torch::NoGradGuard no_grad;
    for (const Tensor& t : copy->parameters()) t.zero_();
  }
  CHECK(at::equal(mod(x), y));
  CHECK_FALSE(at::equal(copy->forward(x), y));
  torch::nn::Sequential both(mod);
  CHECK(at::equal(both->forward(x), y));
  std::ostringstream text;
  text << *mod;
  CHECK_THAT(text.str(),
             Contains("shoestring::nn::MixtureOfDepths(8, capacity=0.5, score=linear, choice=auto)"));
  mod->to(at::kBFloat16);
  const Tensor low = mod(x.to(at::kBFloat16));
  CHECK(low.scalar_type() == at::kBFloat16);
  CHECK(mod->route.weight.scalar_type() == at::kFloat);
}

TEST_CASE("MixtureOfDepths refuses what does not fit", "[depths]") {
  const auto make = [](const nn::MixtureOfDepthsOptions& o) { return nn::MixtureOfDepths(PrefixSum(), o); };
  for (const double capacity : {0.0, -0.5, 1.5, std::nan("")})
    CHECK_THROWS_WITH(make(small(capacity)),
                      Contains("nn::MixtureOfDepths: capacity: expected a share above 0 and at most 1"));
  CHECK_THROWS_WITH(make(nn::MixtureOfDepthsOptions(0)), Contains("features: expected a number above 0"));
  CHECK_THROWS_WITH(make(small(1).score("tanh")), Contains("score: expected 'linear' or 'sigmoid'"));
  CHECK_THROWS_WITH(make(small(1).choice("x")), Contains("choice: expected 'auto', 'top_k' or 'predictor'"));
  nn::MixtureOfDepths mod = make(small(0.5));
  CHECK_THROWS_WITH(mod(torch::randn({2, 7})), Contains("x: expected (batch, tokens, 8), or (tokens, 8)"));
  CHECK_THROWS_WITH(mod(torch::randn({8})), Contains("x: expected (batch, tokens, 8), or (tokens, 8)"));
  const Tensor x = torch::randn({2, 4, 8});
  const auto input = [] { return nn::AttentionInput(); };
  CHECK_THROWS_WITH(mod(x, input().source(x)), Contains("input: expected neither source, bias"));
  CHECK_THROWS_WITH(mod(x, input().position_ids(at::arange(5))),
                    Contains("position_ids: expected (1 or batch, tokens) for x of [2, 4, 8], received [5]"));
  const Tensor starts = at::tensor({0, 3}, at::kInt);
  CHECK_THROWS_WITH(mod(x, input().cu_seqlens_q(starts)),
                    Contains("cu_seqlens_q: expected none with a batch"));
  CHECK_THROWS_WITH(mod(x[0], input().cu_seqlens_q(starts)),
                    Contains("cu_seqlens_q: expected ascending offsets from 0 to 4, received [0, 3]"));
  CHECK_THROWS_WITH(
      nn::MixtureOfDepths(DropsFeature(), small(0.5))->forward(x),
      Contains("block: expected a result of the shape of its input, [2, 2, 8], received [2, 2, 7]"));
}
