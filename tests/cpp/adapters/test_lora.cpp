#include "catch.h"

#include <fstream>
#include <sstream>

#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>
#include <torch/utils.h>

#include <shoestring/files/safetensors.h>

#include "adapters/lora_model.h"
#include "folder.h"

using Catch::Matchers::Contains;

TEST_CASE("lora::apply adapts layers where they stand, and they train", "[lora]") {
  for (const char* quantize : {"none", "nf4", "fp4", "int4", "int8"}) {
    CAPTURE(quantize);
    Net net = make(options(quantize));
    CHECK(net->up->is_quantized() == (std::string(quantize) != "none"));
    std::vector<Tensor> trained;
    for (const auto& parameter : net->parameters()) {
      if (parameter.requires_grad()) trained.push_back(parameter);
    }
    REQUIRE(trained.size() == 4);
    torch::optim::SGD optimizer(trained, 0.1);
    Tensor x = torch::randn({32, 64}), target = torch::randn({32, 5});
    double first = 0, last = 0;
    for (int step = 0; step < 20; ++step) {
      optimizer.zero_grad();
      Tensor loss = at::mse_loss(net->forward(x), target);
      loss.backward();
      optimizer.step();
      (step == 0 ? first : last) = loss.item<double>();
    }
    CHECK(last < 0.95 * first);
  }
}

TEST_CASE("an adapted layer agrees with fp64", "[lora]") {
  for (const char* quantize : {"none", "nf4", "int8"}) {
    Net net = make(options(quantize));
    auto& layer = net->up;
    Tensor base = layer->is_quantized() ? layer->base->dequantize(at::kFloat) : layer->weight;
    Tensor A = lora_A(layer).detach().to(at::kDouble), B = lora_B(layer).detach().to(at::kDouble);
    Tensor dense = base.to(at::kDouble) + layer->adapters["default"]->lora()->scaling() * at::matmul(B, A);
    Tensor x = torch::randn({7, 64}).requires_grad_();
    Tensor y = layer->forward(x), upstream = torch::randn_like(y);
    Tensor exact = at::linear(x.detach().to(at::kDouble), dense, layer->bias.detach().to(at::kDouble));
    CHECK((y.detach() - exact).norm().item<double>() < 1e-6 * exact.norm().item<double>());
    auto gradients = torch::autograd::grad({y}, {x, lora_A(layer), lora_B(layer)}, {upstream});
    Tensor G = upstream.to(at::kDouble), X = x.detach().to(at::kDouble);
    const std::vector<Tensor> expected{
        at::matmul(G, dense),
        layer->adapters["default"]->lora()->scaling() * at::matmul(at::matmul(B.t(), G.t()), X),
        layer->adapters["default"]->lora()->scaling() * at::matmul(G.t(), at::matmul(X, A.t()))};
    for (int i = 0; i < 3; ++i) {
      CHECK((gradients[i] - expected[i]).norm().item<double>() < 1e-6 * expected[i].norm().item<double>());
    }
  }
}

TEST_CASE("DoRA agrees with autograd in fp64, its norm taken for a constant", "[lora]") {
  for (const char* quantize : {"none", "nf4", "int8"}) {
    Net net = make(options(quantize, false, /*dora=*/true));
    auto& layer = net->up;
    const Tensor magnitude = (*layer->adapters["default"])["lora_magnitude_vector"];
    const auto wide = [](const Tensor& t) { return t.detach().to(at::kDouble).requires_grad_(); };
    Tensor base = layer->is_quantized() ? layer->base->dequantize(at::kFloat) : layer->weight;
    Tensor A = wide(lora_A(layer)), B = wide(lora_B(layer)), m = wide(magnitude);
    Tensor x = torch::randn({7, 64}).requires_grad_(), X = wide(x);
    Tensor dense =
        base.detach().to(at::kDouble) + layer->adapters["default"]->lora()->scaling() * at::matmul(B, A);
    Tensor exact =
        at::linear(X, dense) * (m / dense.detach().norm(2, 1)) + layer->bias.detach().to(at::kDouble);
    Tensor y = layer->forward(x), upstream = torch::randn_like(y);
    CHECK((y.detach() - exact.detach()).norm().item<double>() < 1e-6 * exact.norm().item<double>());
    auto gradients = torch::autograd::grad({y}, {x, lora_A(layer), lora_B(layer), magnitude}, {upstream});
    auto expected = torch::autograd::grad({exact}, {X, A, B, m}, {upstream.to(at::kDouble)});
    for (int i = 0; i < 4; ++i) {
      CHECK((gradients[i] - expected[i]).norm().item<double>() < 2e-6 * expected[i].norm().item<double>());
    }
  }
}

TEST_CASE("layers together give what they give alone", "[lora]") {
  for (const bool adapted : {true, false}) {
    for (const char* quantize : {"none", "nf4"}) {
      CAPTURE(adapted, quantize);
      torch::manual_seed(2);
      std::vector<AdaptableLinear> layers{AdaptableLinear(64, 96), AdaptableLinear(64, 96),
                                          AdaptableLinear(96, 64)};
      std::vector<Tensor> trained;
      for (auto& layer : layers) {
        if (!adapted) break;
        if (std::string(quantize) != "none") layer->quantize();
        layer->add_adapter(LoraOptions().rank(4).dora(layer.ptr() == layers[1].ptr()));
        change(*layer->adapters["default"]);
      }
      for (auto& layer : layers) {
        for (auto& parameter : layer->parameters()) {
          if (parameter.requires_grad()) trained.push_back(parameter);
        }
      }
      Tensor x = torch::randn({5, 64}).requires_grad_();
      trained.push_back(x);
      Tensor alone = layers[2](at::silu(layers[0](x)) * layers[1](x));
      Tensor together = shoestring::nn::swiglu_mlp(x, layers[0], layers[1], layers[2]);
      CHECK(at::allclose(together, alone, 1e-5, 1e-5));
      const Tensor upstream = torch::randn_like(alone);
      const auto expected = torch::autograd::grad({alone}, trained, {upstream});
      const auto gradients = torch::autograd::grad({together}, trained, {upstream});
      for (size_t i = 0; i < trained.size(); ++i) CHECK(at::allclose(gradients[i], expected[i], 1e-4, 1e-5));
    }
  }
}

TEST_CASE("dropout reaches the adapter alone, and only in training", "[lora]") {
  Net net = make(options("nf4"));
  auto& layer = net->up;
  Tensor x = torch::randn({64, 64}), y = layer->forward(x);
  std::get<LoraOptions>(layer->adapters["default"]->options).dropout(0.5);
  layer->eval();
  CHECK(at::equal(layer->forward(x), y));
  layer->train();
  torch::manual_seed(3);
  Tensor dropped = layer->forward(x);
  CHECK_FALSE(at::allclose(dropped, y, 1e-3, 1e-3));
  torch::manual_seed(3);
  CHECK(at::equal(layer->forward(x), dropped));
}

TEST_CASE("merge adds the adapter; unmerge restores every byte", "[lora]") {
  for (const char* quantize : {"none", "nf4", "int8"}) {
    for (bool nested : {false, true}) {
      if (nested && std::string(quantize) == "int8") continue;
      Net net = make(options(quantize, nested, /*dora=*/nested || std::string(quantize) == "none"));
      Tensor x = torch::randn({7, 64}), y = net->forward(x);
      auto& layer = net->up;
      Tensor bytes = (layer->is_quantized() ? layer->base->packed : layer->weight).clone();
      for (int cycle = 0; cycle < 3; ++cycle) {
        shoestring::lora::merge(*net);
        CHECK(layer->weight.sizes() == at::IntArrayRef({128, 64}));
        CHECK_FALSE(layer->has_adapter());
        CHECK(layer->named_parameters().size() == 2);
        CHECK(at::allclose(net->forward(x), y, 1e-5, 1e-5));
        shoestring::lora::unmerge(*net);
        CHECK(at::equal(layer->is_quantized() ? layer->base->packed : layer->weight, bytes));
        CHECK(at::equal(net->forward(x), y));
      }
    }
  }
}

TEST_CASE("merging leaves layers without an adapter alone", "[lora]") {
  Net net = make(options("nf4").target_modules({"up_proj"}));
  Tensor x = torch::randn({7, 64}), y = net->forward(x);
  shoestring::lora::merge(*net, shoestring::lora::MergeOptions().reversible(false));
  CHECK(net->down->is_quantized());
  CHECK(at::allclose(net->forward(x), y, 1e-5, 1e-5));
  CHECK_THROWS_WITH(shoestring::lora::unmerge(*net), Contains("received one without saved weights"));
}

TEST_CASE("adapted modules clone and serialise", "[lora]") {
  Net net = make(options("nf4", true, /*dora=*/true));
  Tensor x = torch::randn({3, 64}), y = net->forward(x);
  auto copy = std::dynamic_pointer_cast<shoestring::nn::AdaptableLinearImpl>(net->up->clone());
  CHECK(at::equal(copy->forward(x), net->up->forward(x)));
  std::stringstream stream;
  torch::save(net, stream);
  torch::manual_seed(8);
  Net other;
  shoestring::lora::apply(*other, options("nf4", true, true));
  torch::load(other, stream);
  CHECK(at::equal(other->forward(x), y));
}

TEST_CASE("adapters are written and read in PEFT's format", "[lora]") {
  Folder directory;
  Net net = make(options("none").target_modules({"up_proj"}));
  Tensor x = torch::randn({3, 64}), y = net->forward(x);
  shoestring::lora::save_adapter(*net, directory.path);
  std::ifstream file(directory / "adapter_config.json");
  std::stringstream text;
  text << file.rdbuf();
  for (const char* part : {"\"peft_type\": \"LORA\"", "\"r\": 4", "\"lora_alpha\": 8", "\"up_proj\""}) {
    CHECK_THAT(text.str(), Contains(part));
  }
  torch::manual_seed(4);
  Net bare;
  shoestring::lora::load_adapter(*bare, directory.path);
  CHECK(at::equal(bare->forward(x), y));
  CHECK_FALSE(bare->down->has_adapter());
  CHECK_FALSE(bare->head->weight.requires_grad());

  Net all = make(options("none"));
  CHECK_THROWS_WITH(shoestring::lora::load_adapter(*all, directory.path),
                    Contains("expected values for down_proj, which has an adapter 'default'; found none"));
  CHECK_THROWS_WITH(shoestring::lora::load_adapter(*bare, directory / "none"),
                    Contains("adapter_config.json"));
  std::ofstream(directory / "adapter_config.json") << R"({"peft_type": "LORA", "use_dora": true})";
  const std::string weights = directory / "adapter_model.safetensors";
  CHECK_THROWS_WITH(shoestring::lora::load_adapter(*bare, directory.path),
                    Contains(weights + ": expected the weights that were saved with " +
                             (directory / "adapter_config.json")));
  // Rewrite the weights file without the digest of the configuration that save_adapter stores in its
  // metadata.
  shoestring::save_safetensors(weights, shoestring::load_safetensors(weights));
  CHECK_THROWS_WITH(shoestring::lora::load_adapter(*bare, directory.path),
                    Contains("lora_magnitude_vector [128], received lora_A [4, 64], lora_B [128, 4]"));
  std::ofstream(directory / "adapter_config.json") << R"({"peft_type": "LORA", "use_qalora": true})";
  CHECK_THROWS_WITH(shoestring::lora::load_adapter(*bare, directory.path),
                    Contains("use_qalora: expected null or false"));

  Net dora = make(options("none", false, /*dora=*/true).target_modules({"up_proj"}));
  y = dora->forward(x);
  shoestring::lora::save_adapter(*dora, directory.path);
  shoestring::lora::load_adapter(*bare, directory.path);
  CHECK(at::equal(bare->forward(x), y));
}

TEST_CASE("lora::apply refuses what it cannot do, and then changes nothing", "[lora]") {
  Net net;
  CHECK_THROWS_WITH(shoestring::lora::apply(*net, ApplyOptions().target_modules({"head"})),
                    Contains("AdaptableEmbedding or AdaptableConv1d, 2d or 3d layers, received head"));
  CHECK_THROWS_WITH(shoestring::lora::apply(*net, ApplyOptions().target_modules({"up_proj", "q_proj", "v"})),
                    Contains("target_modules: expected names of modules, received 'q_proj', 'v', which match "
                             "nothing; the module has ") &&
                        Contains("up_proj"));
  CHECK_THROWS_WITH(shoestring::lora::apply(*net, ApplyOptions().quantize("int3")),
                    Contains("expected none, nf4, fp4, int4 or int8"));
  CHECK_THROWS_WITH(shoestring::lora::apply(*net, ApplyOptions().quantize("int4").double_quant(true)),
                    Contains("double_quant: expected false with int4"));
  CHECK_THROWS_WITH(shoestring::lora::apply(*net, ApplyOptions().adapter(LoraOptions().rank(0))),
                    Contains("rank: expected at least 1, received 0"));
  CHECK_THROWS_WITH(shoestring::lora::merge(*net), Contains("expected a module with adapters"));
  for (const auto& parameter : net->parameters()) CHECK(parameter.requires_grad());
  shoestring::lora::apply(*net);
  CHECK_THROWS_WITH(shoestring::lora::apply(*net),
                    Contains("expected a new name, but the module has an adapter 'default'"));
}
