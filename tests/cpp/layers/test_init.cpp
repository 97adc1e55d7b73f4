#include "catch.h"

#include <cmath>
#include <map>

#include <torch/csrc/autograd/generated/variable_factories.h>
#include <torch/nn/modules.h>

#include <shoestring/nn.h>

using at::Tensor;
using Catch::Contains;
namespace init = shoestring::nn::init;

namespace {

/// A head whose weight is that of an embedding.
struct TiedLinearImpl : torch::nn::Module {
  explicit TiedLinearImpl(const Tensor& weight) { register_parameter("weight", weight); }
};
TORCH_MODULE(TiedLinear);

/// A module with every kind of parameter.
struct MupModelImpl : torch::nn::Module {
  explicit MupModelImpl(int64_t width, bool tied = false)
      : tokens(register_module("tokens", torch::nn::Embedding(50, width))),
        place(register_parameter("place", torch::randn({7, width}))),
        up(register_module("up", torch::nn::Linear(width, 4 * width))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({4 * width})))),
        down(register_module("down", shoestring::nn::AdaptableLinear(4 * width, width))),
        conv(register_module("conv",
                             torch::nn::Conv1d(torch::nn::Conv1dOptions(width, width, 3).groups(width)))),
        transposed(register_module("transposed", torch::nn::ConvTranspose1d(width, 5, 3))),
        head(register_module("head", torch::nn::Linear(torch::nn::LinearOptions(width, 50).bias(false)))) {
    if (tied) register_module("tied", TiedLinear(tokens->weight));
  }

  torch::nn::Embedding tokens;
  Tensor place;
  torch::nn::Linear up;
  torch::nn::LayerNorm norm;
  shoestring::nn::AdaptableLinear down;
  torch::nn::Conv1d conv;
  torch::nn::ConvTranspose1d transposed;
  torch::nn::Linear head;
};
TORCH_MODULE(MupModel);

init::MupOptions mup_options(const std::string& optimizer = "adam") {
  return init::MupOptions().optimizer(optimizer).kinds({{"place", "input"}});
}

std::map<std::string, init::MupGroup> mup_by_name(const std::vector<init::MupGroup>& groups) {
  std::map<std::string, init::MupGroup> found;
  for (const auto& group : groups) {
    REQUIRE(group.names.size() == group.params.size());
    for (const auto& name : group.names) found[name] = group;
  }
  return found;
}

}  // namespace

TEST_CASE("trunc_normal_ draws from the normal distribution between its bounds", "[init]") {
  const Tensor t = torch::empty({200000}, at::kDouble);
  at::manual_seed(4);
  init::trunc_normal_(t, 1, 2, -1, 2);
  CHECK(t.min().item<double>() >= -1);
  CHECK(t.max().item<double>() <= 2);
  // The distribution function at some values, within five standard deviations of a share of the draws.
  const auto cdf = [](double x) { return (1 + std::erf((x - 1) / 2 / std::sqrt(2.0))) / 2; };
  for (const double x : {-0.5, 0.0, 1.0, 1.7}) {
    const double share = t.le(x).to(at::kDouble).mean().item<double>();
    const double exact = (cdf(x) - cdf(-1)) / (cdf(2) - cdf(-1));
    CHECK(std::abs(share - exact) < 5 * std::sqrt(exact * (1 - exact) / 200000));
  }
}

TEST_CASE("trunc_normal_ takes a generator, all dtypes and strides, and refuses bounds that do not fit",
          "[init]") {
  at::manual_seed(7);
  const at::Generator generator = at::detail::getDefaultCPUGenerator().clone();
  const Tensor one = init::trunc_normal_(torch::empty({9, 5}).t(), 0, 0.02, -0.04, 0.04, generator.clone());
  const Tensor other = init::trunc_normal_(torch::empty({9, 5}).t(), 0, 0.02, -0.04, 0.04, generator.clone());
  CHECK(at::equal(one, other));
  CHECK(one.abs().max().item<double>() <= 0.04 + 1e-8);
  const Tensor weight = torch::empty({4, 4}).requires_grad_();
  CHECK_FALSE(init::trunc_normal_(weight).grad_fn());
  CHECK_THROWS_WITH(init::trunc_normal_(weight, 0, 0), Contains("std: expected a number above 0"));
  CHECK_THROWS_WITH(init::trunc_normal_(weight, 0, 1, 2, 1), Contains("b: expected a bound above a = 2"));
  CHECK_THROWS_WITH(init::trunc_normal_(weight, 100), Contains("mean: expected a distribution with a share"));
}

TEST_CASE("depth_scaled_ scales the parameters that match", "[init]") {
  torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
  std::map<std::string, Tensor> before;
  for (const auto& p : model->named_parameters()) before[p.key()] = p.value().detach().clone();
  using Names = std::vector<std::string>;
  CHECK(init::depth_scaled_(*model, {"1.*", "[02].weight"}, 8) ==
        Names{"0.weight", "1.weight", "1.bias", "2.weight"});
  for (const auto& p : model->named_parameters()) {
    const double factor = p.key() == "0.bias" || p.key() == "2.bias" ? 1 : 0.25;
    CHECK(at::equal(p.value(), before[p.key()] * factor));
  }
  CHECK_THROWS_WITH(init::depth_scaled_(*model, {"*", "3.*"}, 8),
                    Contains("depth_scaled_: patterns: expected a pattern that matches a parameter, received "
                             "\"3.*\". The parameters are 0.weight"));
  CHECK_THROWS_AS(init::depth_scaled_(*model, {"*"}, 0), c10::ValueError);
}

TEST_CASE("mup_groups follow the table", "[mup]") {
  MupModel model(64), base(16);
  for (const std::string optimizer : {"adam", "sgd"}) {
    for (const bool by_size : {false, true}) {
      const auto options = mup_options(optimizer);
      const auto found =
          mup_by_name(by_size ? init::mup_groups_by_size(*model, {{64, 16}, {256, 64}}, options)
                              : init::mup_groups(*model, *base, options));
      CHECK(found.size() == model->parameters().size());
      const bool adam = optimizer == "adam";
      for (const auto* name :
           {"tokens.weight", "place", "up.bias", "norm.weight", "conv.weight", "down.bias"}) {
        CAPTURE(name);
        CHECK(found.at(name).kind == "input");
        CHECK(found.at(name).lr_multiplier == (adam ? 1 : 4));
        CHECK(found.at(name).std_multiplier == 1);
      }
      for (const auto* name : {"up.weight", "down.weight"}) {
        CHECK(found.at(name).kind == "hidden");
        CHECK(found.at(name).lr_multiplier == (adam ? 0.25 : 1));
        CHECK(found.at(name).std_multiplier == 0.5);
      }
      for (const auto* name : {"head.weight", "transposed.weight"}) {
        CHECK(found.at(name).kind == "output");
        CHECK(found.at(name).lr_multiplier == 0.25);
        CHECK(found.at(name).std_multiplier == 0.25);
      }
      CHECK(found.at("transposed.bias").kind == "fixed");
    }
  }
}

TEST_CASE("mup_ sets the deviations of hidden and output weights", "[mup]") {
  MupModel model(256), base(32);
  const Tensor tokens = model->tokens->weight.detach().clone();
  init::mup_(*model, *base, mup_options());
  const auto ratio = [](const Tensor& a, const Tensor& b) { return (a.std() / b.std()).item<double>(); };
  CHECK(ratio(model->up->weight, base->up->weight) == Approx(1 / std::sqrt(8.0)).epsilon(1e-4));
  CHECK(ratio(model->head->weight, base->head->weight) == Approx(1.0 / 8).epsilon(1e-4));
  CHECK(at::equal(model->tokens->weight, tokens));
}

TEST_CASE("mup_groups leave frozen parameters out, and refuse what they do not know", "[mup]") {
  MupModel model(64), base(16), tied(64, true), tied_base(16, true);
  model->tokens->weight.requires_grad_(false);
  CHECK(mup_by_name(init::mup_groups(*model, *base, mup_options())).count("tokens.weight") == 0);
  CHECK_THROWS_WITH(
      init::mup_groups(*tied, *tied_base, mup_options()),
      Contains("tied.weight: expected one role, received that of \"input\" (tokens.weight) and of "
               "\"output\". Untie the weights."));
  CHECK_THROWS_WITH(init::mup_groups(*model, *base),
                    Contains("kinds: expected \"input\" or \"output\" for place, since its module"));
  CHECK_THROWS_WITH(init::mup_groups(*model, *base, init::MupOptions().kinds({{"places", "input"}})),
                    Contains("kinds: expected a pattern that matches a parameter"));
  CHECK_THROWS_WITH(init::mup_groups(*model, *base, init::MupOptions().kinds({{"place", "hidden"}})),
                    Contains("received \"hidden\""));
  CHECK_THROWS_WITH(init::mup_groups_by_size(*model, {{77, 1}}, mup_options()),
                    Contains("received 77, which no parameter"));
  CHECK_THROWS_WITH(init::mup_groups_by_size(*model, {{64, 0}}, mup_options()),
                    Contains("expected numbers above 0"));
  CHECK_THROWS_WITH(init::mup_groups(*model, *base, mup_options("lion")), Contains("optimizer: expected"));
  torch::nn::Linear other(2, 2);
  CHECK_THROWS_WITH(init::mup_groups(*model, *other, mup_options()),
                    Contains("base: expected a parameter place, received none"));
}
