#include "catch.h"
#include "relative_error.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/serialize.h>
#include <torch/utils.h>

#include <ATen/ATen.h>

#include "adapters/lora_model.h"
#include "folder.h"

using Catch::Matchers::Contains;
namespace lora = shoestring::lora;

namespace {

// Builds a model with three adapters of different ranks: "a", "b" with lora_bias, and "c" with DoRA.
Net several(const char* quantize = "none") {
  torch::manual_seed(4);
  Net net;
  const auto options = [&](const char* name) { return ApplyOptions().adapter_name(name).quantize(quantize); };
  lora::apply(*net, options("a").adapter(LoraOptions().rank(4).alpha(8)));
  lora::apply(
      *net, options("b").adapter(LoraOptions().rank(3).alpha(5).lora_bias(true)).target_modules({"up_proj"}));
  lora::apply(*net, options("c").adapter(LoraOptions().rank(2).alpha(4).dora(true)));
  const torch::NoGradGuard no_grad;
  for (AdaptableLinear layer : {net->up, net->down}) {
    for (auto& item : layer->adapters) {
      change(*item.value());
      if (item.value()->has("lora_bias")) (*item.value())["lora_bias"].normal_();
    }
  }
  return net;
}

// Computes a layer's output in fp64: the output of the base layer, plus the contribution of each named
// adapter.
Tensor exact(AdaptableLinear& layer, const Tensor& x, const std::vector<std::string>& names) {
  const Tensor W = layer->dense_weight().to(at::kDouble), X = x.detach().to(at::kDouble);
  Tensor y = at::linear(X, W, layer->bias.to(at::kDouble));
  for (const auto& name : names) {
    if (!layer->has_adapter(name)) continue;
    const auto& own = *layer->adapters[name];
    Tensor sum = W + own.lora()->scaling() * own["lora_B"].to(at::kDouble).mm(own["lora_A"].to(at::kDouble));
    if (own.has("lora_magnitude_vector"))
      sum = sum * (own["lora_magnitude_vector"].to(at::kDouble) / sum.norm(2, 1)).unsqueeze(1);
    y = y + at::linear(X, sum - W);
    if (own.has("lora_bias")) y = y + own.lora()->scaling() * own["lora_bias"].to(at::kDouble);
  }
  return y.detach();
}

}  // namespace

TEST_CASE("adapters are used alone, added, and not at all", "[lora]") {
  for (const char* quantize : {"none", "nf4", "int8"}) {
    Net net = several(quantize);
    CHECK(lora::adapter_names(*net) == std::vector<std::string>{"a", "b", "c"});
    const Tensor x = torch::randn({5, 64});
    const std::vector<std::vector<std::string>> choices{{"a"},      {"b"},           {"c"}, {"a", "b"},
                                                        {"a", "c"}, {"b", "c", "a"}, {}};
    for (const auto& names : choices) {
      lora::set_adapter(*net, names);
      CAPTURE(quantize, names);
      CHECK(relative_error(net->up(x), exact(net->up, x, names)) < 2e-6);
      for (auto& item : net->up->adapters) {
        const bool used = std::find(names.begin(), names.end(), item.key()) != names.end();
        for (const auto& tensor : item.value()->parameters()) CHECK(tensor.requires_grad() == used);
      }
    }
    lora::set_adapter(*net, {"a", "c"});
    {
      const lora::DisableAdapterGuard guard(*net);
      CHECK(relative_error(net->up(x), exact(net->up, x, {})) < 2e-6);
    }
    CHECK(relative_error(net->up(x), exact(net->up, x, {"a", "c"})) < 2e-6);
  }
}

TEST_CASE("gradients of several adapters are those of their sum", "[lora]") {
  Net net = several();
  lora::set_adapter(*net, {"a", "c"});
  Tensor x = torch::randn({5, 64}).requires_grad_();
  const auto& a = *net->up->adapters["a"];
  const auto& c = *net->up->adapters["c"];
  const std::vector<Tensor> inputs{x,           a["lora_A"], a["lora_B"],
                                   c["lora_A"], c["lora_B"], c["lora_magnitude_vector"]};
  std::vector<Tensor> wide;
  for (const auto& t : inputs) wide.push_back(t.detach().to(at::kDouble).requires_grad_());
  const Tensor W = net->up->weight.to(at::kDouble), upstream = torch::randn({5, 128});
  const Tensor sum = W + 2 * wide[4].mm(wide[3]);
  const Tensor y = at::linear(
      wide[0], W + 2 * wide[2].mm(wide[1]) + sum * (wide[5] / sum.detach().norm(2, 1)).unsqueeze(1) - W);
  const auto expected = torch::autograd::grad({y}, wide, {upstream.to(at::kDouble)});
  const auto gradients = torch::autograd::grad({net->up(x)}, inputs, {upstream});
  for (size_t i = 0; i < inputs.size(); ++i) CHECK(relative_error(gradients[i], expected[i]) < 5e-6);
}

TEST_CASE("each row of the batch has an adapter of its own", "[lora]") {
  for (const char* quantize : {"none", "nf4"}) {
    Net net = several(quantize);
    const Tensor x = torch::randn({4, 3, 64});
    {
      const lora::AdaptersPerRowGuard guard(*net, {"a", std::nullopt, "c", "b"});
      const Tensor y = net->up(x);
      CHECK(relative_error(y[0], exact(net->up, x[0], {"a"})) < 2e-6);
      CHECK(relative_error(y[1], exact(net->up, x[1], {})) < 2e-6);
      CHECK(relative_error(y[2], exact(net->up, x[2], {"c"})) < 2e-6);
      CHECK(relative_error(y[3], exact(net->up, x[3], {"b"})) < 2e-6);
      CHECK(relative_error(net->up(x.select(1, 0)), y.select(1, 0)) < 2e-6);
      CHECK_THROWS_WITH(
          net->up(x.narrow(0, 0, 3)),
          Contains("expected one name for each of the 3 rows of the batch that reached a layer, "
                   "received 4"));
    }
    CHECK(relative_error(net->up(x), exact(net->up, x, {"c"})) < 2e-6);
  }
}

TEST_CASE("an adapter that changed the base has its own rows, the others have the base as it was", "[lora]") {
  torch::manual_seed(4);
  Net net;
  const Tensor x = torch::randn({2, 3, 64}), base = net->up(x);
  lora::apply(*net, ApplyOptions().adapter_name("p").adapter(LoraOptions().rank(4).init("pissa")));
  change(*net->up->adapters["p"]);
  const Tensor alone = net->up(x);
  lora::apply(*net, ApplyOptions().adapter_name("q"));
  const lora::AdaptersPerRowGuard guard(*net, {"p", "q"});
  CHECK(at::allclose(net->up(x)[0], alone[0], 1e-4, 1e-5));
  CHECK(at::allclose(net->up(x)[1], base[1], 1e-4, 1e-5));
}

TEST_CASE("one adapter among several is merged, and all are there again", "[lora]") {
  for (const char* quantize : {"none", "nf4"}) {
    Net net = several(quantize);
    const Tensor x = torch::randn({5, 64});
    lora::set_adapter(*net, {"b"});
    const Tensor y = net->forward(x);
    lora::set_adapter(*net, {"a", "c"});
    const Tensor former = net->forward(x);
    const Tensor bytes = net->up->base_weight().clone();
    const auto report = lora::merge(*net, lora::MergeOptions().adapter_names({"b"}));
    CHECK(at::allclose(net->forward(x), y, 1e-4, 1e-5));
    CHECK(report.layers.count("up_proj") == 1);
    CHECK(report.error < 1e-6);
    CHECK_FALSE(net->up->has_adapter());
    lora::unmerge(*net);
    CHECK(at::equal(net->up->base_weight(), bytes));
    lora::set_adapter(*net, {"a", "c"});
    CHECK(at::equal(net->forward(x), former));
  }
}

TEST_CASE("a merge into 4 bits says what it lost", "[lora]") {
  Net net = several("nf4");
  lora::set_adapter(*net, {"a", "c"});
  const Tensor x = torch::randn({5, 64}), y = net->forward(x);
  const auto report = lora::merge(*net, lora::MergeOptions().requantize(true));
  CHECK(net->up->is_quantized());
  CHECK(report.error > 1e-3);
  CHECK(report.error < 1);
  CHECK(relative_error(net->forward(x), y) < 0.3);
  lora::unmerge(*net);
  CHECK(at::equal(net->forward(x), y));
}

TEST_CASE("adapters are deleted, cloned and saved by name", "[lora]") {
  Net net = several();
  const Tensor x = torch::randn({5, 64});
  lora::set_adapter(*net, {"a", "c"});
  const Tensor y = net->forward(x);
  const auto copy = std::dynamic_pointer_cast<NetImpl>(net->clone());
  CHECK(at::equal(copy->forward(x), y));
  lora::set_adapter(*copy, {"b"});
  CHECK(at::equal(net->forward(x), y));

  Folder directory;
  lora::save_adapter(*net, directory.path, {"b"});
  torch::manual_seed(4);
  Net bare;
  lora::load_adapter(*bare, directory.path, "b");
  lora::load_adapter(*bare, directory / "b", "twice");
  lora::set_adapter(*net, {"b"});
  CHECK(at::equal(bare->forward(x), net->forward(x)));
  for (const char* file : {"b/adapter_config.json", "b/adapter_model.safetensors"})
    std::remove((directory / file).c_str());
  ::rmdir((directory / "b").c_str());

  lora::set_adapter(*net, {"a", "c"});
  lora::delete_adapter(*net, "b");
  CHECK(at::equal(net->forward(x), y));
  lora::delete_adapter(*net, "a");
  CHECK(relative_error(net->up(x), exact(net->up, x, {"c"})) < 2e-6);
  lora::delete_adapter(*net, "c");
  CHECK(relative_error(net->up(x), exact(net->up, x, {})) < 2e-6);
  CHECK(net->up->children().empty());
  CHECK_THROWS_WITH(lora::delete_adapter(*net, "c"),
                    Contains("expected names of this module's adapters, none; received 'c'"));
  CHECK_THROWS_WITH(lora::apply(*net, ApplyOptions().adapter_name("a.b")),
                    Contains("adapter_name: expected a name without dots"));
}
