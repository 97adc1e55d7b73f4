// Tests nn::Router, nn::Experts and nn::MoE: values and gradients against loops in fp64, and the state.
#include "catch.h"

#include <sstream>

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/generated/variable_factories.h>
#include <torch/serialize.h>

#include <shoestring/core/amp.h>
#include <shoestring/files/safetensors.h>
#include <shoestring/integrations/model_files.h>
#include <shoestring/nn.h>

#include "folder.h"

using at::Tensor;
using Catch::Contains;
using shoestring::MoeRoute;
namespace nn = shoestring::nn;

namespace {

// Rows of weights that are transposed, or of the gate that is interleaved, as in the layout of Qwen3.
Tensor plain_stack(const Tensor& stack, bool transposed) { return transposed ? stack.mT() : stack; }

// Computes nn::MoE token by token in the dtype of x, with the experts that `route` has chosen.
Tensor one_by_one(const nn::MoE& moe, const Tensor& x, const MoeRoute& route) {
  const auto& o = moe->options;
  const Tensor gate_up = plain_stack(moe->experts->gate_up_proj, o.transposed()),
               down = plain_stack(moe->experts->down_proj, o.transposed());
  const Tensor logits = at::linear(x, moe->router->weight);
  std::vector<Tensor> rows;
  for (int64_t t = 0; t < x.size(0); ++t) {
    const Tensor chosen = logits[t].index_select(0, route.index[t]);
    Tensor weight = o.score() == "sigmoid"   ? chosen.sigmoid()
                    : o.score() == "softmax" ? logits[t].softmax(0).index_select(0, route.index[t])
                                             : chosen.softmax(0);
    if (o.renormalize()) weight = weight / weight.sum();
    weight = weight * o.scale();
    Tensor sum = at::zeros_like(x[t]);
    for (int64_t k = 0; k < o.top_k(); ++k) {
      const auto e = route.index[t][k].item<int64_t>();
      Tensor h = at::mv(gate_up[e], x[t]);
      if (o.bias()) h = h + moe->experts->gate_up_proj_bias[e];
      Tensor g = o.interleaved() ? h.slice(0, 0, {}, 2) : h.narrow(0, 0, o.hidden()),
             u = o.interleaved() ? h.slice(0, 1, {}, 2) : h.narrow(0, o.hidden(), o.hidden());
      if (o.limit()) g = g.clamp_max(*o.limit()), u = u.clamp(-*o.limit(), *o.limit());
      const Tensor a = o.activation() == "swigluoai" ? g * (1.702 * g).sigmoid() * (u + 1)
                       : o.activation() == "gelu"    ? at::gelu(g) * u
                                                     : at::silu(g) * u;
      Tensor y = at::mv(down[e], a);
      if (o.bias()) y = y + moe->experts->down_proj_bias[e];
      sum = sum + weight[k] * y;
    }
    rows.push_back(sum);
  }
  const Tensor y = at::stack(rows);
  return moe->shared.is_empty() ? y : y + nn::GatedMLP(moe->shared)(x);
}

std::vector<nn::MoEOptions> variants() {
  const nn::MoEOptions small(6, 5, 8, 3);
  return {small,
          nn::MoEOptions(small)
              .score("sigmoid")
              .renormalize(true)
              .groups(4)
              .top_groups(2)
              .scale(2.5)
              .bias_rate(0.5)
              .shared_hidden(7),
          nn::MoEOptions(small)
              .score("topk_softmax")
              .activation("swigluoai")
              .limit(0.5)
              .bias(true)
              .interleaved(true)
              .transposed(true),
          nn::MoEOptions(small).renormalize(true).activation("gelu").bias(true).shared_hidden(3)};
}

std::vector<std::string> keys(const torch::OrderedDict<std::string, Tensor>& tensors) {
  return tensors.keys();
}

}  // namespace

TEST_CASE("MoE has the values and gradients of its experts one by one, in fp64", "[moe]") {
  for (const auto& options : variants()) {
    CAPTURE(options.score(), options.activation());
    nn::MoE moe(options);
    moe->to(at::kDouble);
    const Tensor x = torch::randn({9, 6}, at::kDouble).set_requires_grad(true);
    if (options.bias_rate() > 0) moe->router->bias.uniform_(-1, 1);
    const auto [y, route] = moe(x);
    REQUIRE(y.scalar_type() == at::kDouble);
    const Tensor expected = one_by_one(moe, x, route);
    CHECK(at::allclose(y, expected, 1e-10, 1e-12));
    const Tensor logits = at::linear(x, moe->router->weight),
                 share = options.score() == "sigmoid" ? logits.sigmoid() / logits.sigmoid().sum(-1, true)
                                                      : logits.softmax(-1),
                 balance = (route.counts * share.sum(0)).sum() * 8 / 81,
                 z = logits.logsumexp(-1).square().mean();
    CHECK(at::allclose(route.balance, balance, 1e-10));
    CHECK(at::allclose(route.z, z, 1e-10));
    std::vector<Tensor> leaves = moe->parameters();
    leaves.push_back(x);
    const auto ours = torch::autograd::grad({y.square().sum() + route.balance + route.z}, leaves),
               theirs = torch::autograd::grad({expected.square().sum() + balance + z}, leaves);
    for (size_t i = 0; i < leaves.size(); ++i) CHECK(at::allclose(ours[i], theirs[i], 1e-9, 1e-11));
  }
}

TEST_CASE("MoE leaves tokens without experts to the shared MLP", "[moe]") {
  nn::MoE moe(nn::MoEOptions(6, 5, 4, 2).shared_hidden(3));
  const Tensor x = torch::randn({2, 5, 6}), mask = torch::arange(5).lt(3).expand({2, 5});
  const auto [y, route] = moe(x, mask);
  CHECK(y.sizes() == x.sizes());
  CHECK(at::equal(y.slice(1, 3), moe->shared(x).slice(1, 3)));
  CHECK(route.counts.sum().item<int64_t>() == 2 * 3 * 2);
}

TEST_CASE("Router computes logits in fp32, under autocast too", "[moe]") {
  nn::Router router(nn::RouterOptions(64, 8, 2).renormalize(true));
  const Tensor x = torch::randn({50, 64});
  const MoeRoute plain = router(x);
  CHECK(at::equal(plain.index, std::get<1>(at::linear(x, router->weight).topk(2))));
  {
    const shoestring::AutocastGuard autocast(at::kCPU, at::kBFloat16);
    const MoeRoute cast = router(x);
    CHECK(cast.weight.scalar_type() == at::kFloat);
    CHECK(at::equal(cast.weight, plain.weight));
  }
  router->to(at::kBFloat16);
  const Tensor rounded = x.to(at::kBFloat16);
  const MoeRoute low = router(rounded);
  CHECK(low.weight.scalar_type() == at::kFloat);
  const Tensor logits = at::linear(rounded.to(at::kFloat), router->weight.to(at::kFloat));
  CHECK(at::allclose(low.weight, std::get<0>(logits.topk(2)).softmax(-1), 1e-4, 1e-5));
}

TEST_CASE("MoE computes its products in the dtype of autocast", "[moe]") {
  nn::MoE moe(nn::MoEOptions(16, 24, 4, 2).shared_hidden(8));
  const Tensor x = torch::randn({10, 16});
  const Tensor plain = std::get<0>(moe(x));
  const shoestring::AutocastGuard autocast(at::kCPU, at::kBFloat16);
  const auto [y, route] = moe(x);
  CHECK(y.scalar_type() == at::kBFloat16);
  CHECK(route.balance.scalar_type() == at::kFloat);
  CHECK(at::allclose(y.to(at::kFloat), plain, 5e-2, 5e-2));
}

TEST_CASE("Router raises the bias of experts with few tokens", "[moe]") {
  nn::Router router(nn::RouterOptions(4, 4, 1).score("sigmoid").bias_rate(0.25));
  {
    const torch::NoGradGuard no_grad;
    router->weight.copy_(at::eye(4));
  }
  const Tensor x = at::eye(4).index_select(0, torch::tensor({0, 0, 0, 1, 1, 2}));
  router(x.narrow(0, 0, 3));
  router(x.narrow(0, 3, 3));  // micro-batches add up
  CHECK(at::equal(router->counts, torch::tensor({3, 2, 1, 0})));
  router->eval();
  router(x);
  CHECK(router->counts.sum().item<int64_t>() == 6);
  router->train();
  // The mean is 1.5: two experts have more tokens, two have fewer. The sum of the signs is 0.
  router->update_bias();
  CHECK(at::equal(router->bias, torch::tensor({-0.25f, -0.25f, 0.25f, 0.25f})));
  CHECK(router->counts.count_nonzero().item<int64_t>() == 0);

  // Over two ranks the counts are 3 + 1, 2 + 2, 1 + 3 and 0 + 0, of which the mean is 3.
  router->counts.copy_(torch::tensor({3, 2, 1, 0}));
  int calls = 0;
  router->update_bias([&](Tensor counts) {
    ++calls;
    CHECK(at::equal(counts, torch::tensor({3, 2, 1, 0})));
    return counts.add_(torch::tensor({1, 2, 3, 0}));
  });
  CHECK(calls == 1);
  // Signs -1, -1, -1 and 1 times 0.25, less their mean of -0.125.
  const Tensor change = torch::tensor({-0.125f, -0.125f, -0.125f, 0.375f});
  CHECK(at::allclose(router->bias, torch::tensor({-0.25f, -0.25f, 0.25f, 0.25f}) + change));
  // The bias takes part in the choice, not in the weight: the scores are 0.73 and three times 0.5.
  router->bias.copy_(torch::tensor({0.f, 0.f, 0.f, 1.f}));
  const MoeRoute biased = router(x.narrow(0, 0, 1));
  CHECK(biased.index.item<int64_t>() == 3);
  CHECK(biased.weight.item<float>() == Approx(0.5));

  // Equal counts change nothing.
  router->counts.fill_(7);
  const Tensor before = router->bias.clone();
  router->update_bias();
  CHECK(at::allclose(router->bias, before - before.mean()));
  CHECK_THROWS_WITH(nn::Router(4, 4, 1)->update_bias(),
                    Contains("nn::Router: update_bias: expected a router with a bias_rate above 0"));
}

TEST_CASE("Experts have the initial values of linear layers", "[moe]") {
  torch::manual_seed(0);
  nn::Experts experts(nn::ExpertsOptions(16, 25, 100).bias(true));
  const auto check = [](const Tensor& t, double bound) {
    CHECK(t.abs().max().item<double>() <= bound);
    // The standard deviation of a uniform distribution. The smallest tensor has 400 elements.
    CHECK(t.std().item<double>() == Approx(bound / std::sqrt(3)).epsilon(0.15));
  };
  check(experts->gate_up_proj, 0.2);
  check(experts->gate_up_proj_bias, 0.2);
  check(experts->down_proj, 0.1);
  check(experts->down_proj_bias, 0.1);
  const Tensor before = experts->down_proj.clone();
  experts->reset_parameters();
  CHECK_FALSE(at::equal(experts->down_proj, before));
}

TEST_CASE("MoE is cloned, moved, saved and loaded", "[moe]") {
  const auto options = nn::MoEOptions(6, 5, 4, 2).bias_rate(0.1).shared_hidden(3);
  nn::MoE moe(options);
  const Tensor x = torch::randn({7, 6});
  moe(x);
  moe->router->update_bias();
  const Tensor y = std::get<0>(moe(x));
  CHECK(keys(moe->named_parameters()) ==
        std::vector<std::string>{"router.weight", "experts.gate_up_proj", "experts.down_proj",
                                 "shared.gate_proj.weight", "shared.up_proj.weight",
                                 "shared.down_proj.weight"});
  CHECK(keys(moe->named_buffers()) == std::vector<std::string>{"router.bias", "router.counts"});
  CHECK(keys(nn::Experts(nn::ExpertsOptions(2, 3, 4).bias(true))->named_parameters()) ==
        std::vector<std::string>{"gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"});

  const auto copy = std::dynamic_pointer_cast<nn::MoEImpl>(moe->clone());
  const auto same_as = [&](nn::MoEImpl& other) {
    CHECK(at::equal(other.router->bias, moe->router->bias));
    CHECK(at::equal(other.router->counts, moe->router->counts));
    other.eval();
    CHECK(at::equal(std::get<0>(other.forward(x)), y));
  };
  same_as(*copy);
  {
    const torch::NoGradGuard no_grad;
    copy->experts->down_proj.zero_();
    copy->router->bias.zero_();
  }
  CHECK(at::equal(std::get<0>(moe(x)), y));

  std::stringstream file;
  torch::save(moe, file);
  nn::MoE loaded(options);
  torch::load(loaded, file);
  same_as(*loaded);

  const Folder folder;
  shoestring::save_safetensors(folder / "moe.safetensors", [&] {
    auto all = moe->named_parameters();
    for (const auto& buffer : moe->named_buffers()) all.insert(buffer.key(), buffer.value());
    return all;
  }());
  nn::MoE again(options);
  shoestring::load_model(*again, folder / "moe.safetensors");
  same_as(*again);

  moe->to(at::kBFloat16);
  CHECK(moe->router->weight.scalar_type() == at::kBFloat16);
  CHECK(moe->experts->down_proj.scalar_type() == at::kBFloat16);
  CHECK(moe->router->bias.scalar_type() == at::kFloat);
  CHECK(moe->router->counts.scalar_type() == at::kLong);
  CHECK(std::get<0>(moe(x.to(at::kBFloat16))).scalar_type() == at::kBFloat16);
  moe->to(torch::Device(at::kCPU), at::kDouble);
  CHECK(moe->router->weight.scalar_type() == at::kDouble);
  CHECK(moe->router->bias.scalar_type() == at::kFloat);
  CHECK(moe->router->counts.scalar_type() == at::kLong);
}

TEST_CASE("MoE and its parts print their options", "[moe]") {
  std::ostringstream text;
  text << nn::MoE(nn::MoEOptions(6, 5, 4, 2).shared_hidden(3).bias_rate(0.5).bias(true));
  CHECK(text.str() ==
        "shoestring::nn::MoE(6, hidden=5, experts=4, top_k=2, shared_hidden=3)(\n"
        "  (router): shoestring::nn::Router(6, experts=4, top_k=2, score=softmax, renormalize=false, "
        "bias_rate=0.5)\n"
        "  (experts): shoestring::nn::Experts(experts=4, features=6, hidden=5, activation=silu, bias=true)\n"
        "  (shared): shoestring::nn::GatedMLP(6, 3, activation=silu)(\n"
        "    (gate_proj): shoestring::nn::AdaptableLinear(in_features=6, out_features=3, bias=true)\n"
        "    (up_proj): shoestring::nn::AdaptableLinear(in_features=6, out_features=3, bias=true)\n"
        "    (down_proj): shoestring::nn::AdaptableLinear(in_features=3, out_features=6, bias=true)\n"
        "  )\n"
        ")");
}

TEST_CASE("MoE and its parts refuse what does not fit", "[moe]") {
  CHECK_THROWS_WITH(nn::Router(4, 3, 5), Contains("moe_route: top_k: expected 1 to 3"));
  CHECK_THROWS_WITH(nn::Router(0, 3, 1), Contains("nn::Router: features: expected a number above 0"));
  CHECK_THROWS_WITH(nn::Router(nn::RouterOptions(4, 3, 1).bias_rate(-1)),
                    Contains("nn::Router: bias_rate: expected a number of at least 0, received -1"));
  CHECK_THROWS_WITH(nn::Router(nn::RouterOptions(4, 3, 1).score("max")),
                    Contains("moe_route: score: expected"));
  CHECK_THROWS_WITH(nn::Router(4, 3, 1)->forward(torch::randn({2, 5})),
                    Contains("nn::Router: x: expected (..., 4), received [2, 5]"));
  CHECK_THROWS_WITH(nn::Experts(2, 4, 0),
                    Contains("nn::Experts: hidden: expected a number above 0, received 0"));
  CHECK_THROWS_WITH(nn::Experts(nn::ExpertsOptions(2, 4, 3).activation("relu")),
                    Contains("nn::Experts: activation: expected 'silu', 'gelu', 'gelu_tanh' or 'swigluoai', "
                             "received 'relu'"));
  CHECK_THROWS_WITH(nn::Experts(nn::ExpertsOptions(2, 4, 3).limit(0)),
                    Contains("nn::Experts: limit: expected none or a number above 0, received 0"));
  CHECK_THROWS_WITH(nn::MoE(nn::MoEOptions(4, 3, 2, 1).shared_hidden(-1)),
                    Contains("nn::MoE: shared_hidden: expected a number of at least 0, received -1"));
  CHECK_THROWS_WITH(nn::MoE(nn::MoEOptions(4, 3, 2, 1).shared_hidden(3).activation("swigluoai")),
                    Contains("nn::MoE: shared_hidden: expected 0 with activation 'swigluoai'"));
  CHECK_THROWS_WITH(nn::MoE(nn::MoEOptions(4, 3, 2, 1).shared_hidden(3).limit(1)),
                    Contains("nn::MoE: shared_hidden: expected 0 with a limit"));
  CHECK_THROWS_WITH(nn::MoE(4, 3, 2, 1)->forward(torch::randn({2, 5})), Contains("x: expected (..., 4)"));
}

TEST_CASE("A MoE of copies equals the dense MLP", "[moe]") {
  for (const bool bias : {false, true}) {
    nn::GatedMLP dense(nn::GatedMLPOptions(10, 14).activation("gelu_tanh").bias(bias));
    dense->eval();
    dense->to(at::kDouble);
    const Tensor x = torch::randn({3, 5, 10}, at::kDouble);
    auto moe = nn::upcycle(dense, 6, 3);
    CHECK_FALSE(moe->is_training());
    CHECK(at::allclose(std::get<0>(moe(x)), dense(x), 1e-10, 1e-12));
    for (const Tensor& p : moe->parameters()) CHECK((p.requires_grad() && p.is_leaf()));
    const Tensor y = dense(x);
    dense->up_proj->weight.data().zero_();  // the copies have their own memory
    CHECK(at::allclose(std::get<0>(moe(x)), y, 1e-10, 1e-12));
  }
  nn::GatedMLP quantized(64, 64);
  quantized->up_proj->quantize();
  CHECK_THROWS_WITH(nn::upcycle(quantized, 2, 1),
                    Contains("nn::upcycle: dense: expected dense weights, received quantised ones"));
  nn::GatedMLP adapted(8, 8);
  adapted->down_proj->add_adapter();
  CHECK_THROWS_WITH(nn::upcycle(adapted, 2, 1), Contains("expected layers without adapters, received 1"));
}
