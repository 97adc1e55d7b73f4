#include "catch.h"
#include "relative_error.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/embedding.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>
#include <torch/utils.h>

#include <ATen/ATen.h>

#include <shoestring/files/safetensors.h>
#include <shoestring/integrations/model_files.h>

#include "adapters/lora_model.h"
#include "folder.h"

using Catch::Matchers::Contains;
using shoestring::nn::AdaptableEmbedding;
using shoestring::nn::IA3Options;
using shoestring::nn::VeraOptions;
namespace lora = shoestring::lora;

namespace {

ApplyOptions ia3() { return ApplyOptions().adapter(IA3Options().feedforward_modules({"down_proj"})); }

}  // namespace

TEST_CASE("IA3 multiplies the output of a layer, or its input", "[lora]") {
  for (const char* quantize : {"none", "nf4"}) {
    torch::manual_seed(4);
    Net net;
    lora::apply(*net, ia3().quantize(quantize));
    CHECK((*net->up->adapters["default"])["ia3_l"].sizes() == at::IntArrayRef({128, 1}));
    CHECK((*net->down->adapters["default"])["ia3_l"].sizes() == at::IntArrayRef({1, 128}));
    const Tensor x = torch::randn({5, 64}).requires_grad_();
    const Tensor up = (*net->up->adapters["default"])["ia3_l"],
                 down = (*net->down->adapters["default"])["ia3_l"];
    {
      const lora::DisableAdapterGuard guard(*net);
      const Tensor base = net->forward(x);
      const torch::NoGradGuard no_grad;
      for (const Tensor& t : {up, down}) t.uniform_(0.5, 1.5);
      CHECK(at::equal(net->forward(x), base));
    }
    std::vector<Tensor> wide;
    for (const Tensor& t : {x, up, down}) wide.push_back(t.detach().to(at::kDouble).requires_grad_());
    const Tensor W = net->up->dense_weight().to(at::kDouble), V = net->down->dense_weight().to(at::kDouble);
    Tensor exact = at::linear(wide[0], W, net->up->bias.to(at::kDouble)) * wide[1].flatten();
    exact = at::linear(at::relu(exact) * wide[2], V, net->down->bias.to(at::kDouble));
    const Tensor y = net->down(at::relu(net->up(x))), upstream = torch::randn_like(y);
    CHECK(relative_error(y, exact) < 2e-6);
    const auto expected = torch::autograd::grad({exact}, wide, {upstream.to(at::kDouble)});
    const auto gradients = torch::autograd::grad({y}, {x, up, down}, {upstream});
    for (int i = 0; i < 3; ++i) CHECK(relative_error(gradients[i], expected[i]) < 5e-6);

    const Tensor whole = net->forward(x);
    lora::merge(*net);
    CHECK(at::allclose(net->forward(x), whole, 1e-4, 1e-5));
    lora::unmerge(*net);
    CHECK(at::equal(net->forward(x), whole));
  }
}

TEST_CASE("projections and a SwiGLU MLP go through IA3 and VeRA as layers alone do", "[lora]") {
  for (const bool vera : {false, true}) {
    torch::manual_seed(2);
    std::vector<AdaptableLinear> layers{AdaptableLinear(64, 96), AdaptableLinear(64, 96),
                                        AdaptableLinear(96, 64)};
    for (size_t i = 0; i < 3; ++i) {
      if (vera) {
        layers[i]->add_adapter(VeraOptions().rank(8));
      } else {
        layers[i]->add_adapter(IA3Options().feedforward(i == 2));
      }
      const torch::NoGradGuard no_grad;
      for (auto& parameter : layers[i]->adapters["default"]->parameters()) parameter.uniform_(0.5, 1.5);
    }
    const Tensor x = torch::randn({5, 64});
    const Tensor alone = layers[2](at::silu(layers[0](x)) * layers[1](x));
    CHECK(at::allclose(shoestring::nn::swiglu_mlp(x, layers[0], layers[1], layers[2]), alone, 1e-5, 1e-5));
  }
}

TEST_CASE("VeRA trains vectors around two matrices that all layers share", "[lora]") {
  torch::manual_seed(4);
  Net net;
  const Tensor x = torch::randn({5, 64}), base = net->forward(x);
  lora::apply(*net, ApplyOptions().adapter(VeraOptions().rank(8).seed(3)));
  CHECK(at::allclose(net->forward(x), base, 1e-6, 1e-6));
  const auto& own = *net->up->adapters["default"];
  CHECK(own["vera_A"].sizes() == at::IntArrayRef({8, 128}));
  CHECK(own["vera_B"].sizes() == at::IntArrayRef({128, 8}));
  CHECK(own["vera_A"].is_same((*net->down->adapters["default"])["vera_A"]));
  int64_t trained = 0;
  for (const auto& parameter : net->parameters())
    trained += parameter.requires_grad() ? parameter.numel() : 0;
  CHECK(trained == 8 + 128 + 8 + 64);
  torch::NoGradGuard no_grad;
  own["vera_lambda_b"].normal_();
  own["vera_lambda_d"].normal_();
  const Tensor W =
      net->up->weight + (own["vera_lambda_b"].unsqueeze(1) * own["vera_B"])
                            .mm(own["vera_lambda_d"].unsqueeze(1) * own["vera_A"].narrow(1, 0, 64));
  CHECK(relative_error(net->up(x), at::linear(x, W, net->up->bias)) < 2e-6);
  const Tensor y = net->forward(x);
  net->to(at::kCPU);
  CHECK(at::equal(std::dynamic_pointer_cast<NetImpl>(net->clone())->forward(x), y));
  lora::merge(*net);
  CHECK(at::allclose(net->forward(x), y, 1e-4, 1e-5));
  lora::unmerge(*net);
  CHECK_THROWS_WITH(lora::apply(*net, ApplyOptions().adapter_name("b")),
                    Contains("expected adapters of the kind that up_proj has, VeRA, received LoRA"));
}

TEST_CASE("embeddings take on LoRA and DoRA", "[lora]") {
  for (const bool dora : {false, true}) {
    torch::manual_seed(4);
    AdaptableEmbedding layer(shoestring::nn::AdaptableEmbeddingOptions(11, 8).padding_idx(2));
    CHECK(layer->weight[2].count_nonzero().item<int64_t>() == 0);
    const Tensor ids = at::randint(11, {3, 4}), base = layer(ids);
    CHECK(at::equal(base, at::embedding(layer->weight, ids)));
    layer->add_adapter(LoraOptions().rank(4).alpha(6).dora(dora));
    CHECK(at::allclose(layer(ids), base, 1e-6, 1e-6));
    auto& own = *layer->adapters["default"];
    {
      const torch::NoGradGuard no_grad;
      own["lora_embedding_A"].normal_();
      if (dora) own["lora_magnitude_vector"].mul_(1.5);
    }
    std::vector<Tensor> inputs{own["lora_embedding_A"], own["lora_embedding_B"]}, wide;
    for (const Tensor& t : inputs) wide.push_back(t.detach().to(at::kDouble).requires_grad_());
    Tensor sum = layer->weight.to(at::kDouble).t() + 1.5 * wide[1].mm(wide[0]);
    if (dora)
      sum = sum *
            (own["lora_magnitude_vector"].detach().to(at::kDouble) / sum.detach().norm(2, 1)).unsqueeze(1);
    const Tensor exact = sum.t().index_select(0, ids.flatten()).view({3, 4, 8}), y = layer(ids),
                 upstream = torch::randn_like(y);
    CHECK(relative_error(y, exact) < 2e-6);
    // The embedding layer ignores the padding index in the gradient of lora_embedding_A; the reference
    // computation does not. The upstream gradient is set to zero there, so that both give the same gradient.
    const Tensor kept = (ids != 2).to(at::kFloat).unsqueeze(-1);
    const auto gradients = torch::autograd::grad({y}, inputs, {upstream * kept});
    const auto expected = torch::autograd::grad({exact}, wide, {(upstream * kept).to(at::kDouble)});
    for (int i = 0; i < 2; ++i) CHECK(relative_error(gradients[i], expected[i]) < 5e-6);

    CHECK(at::equal(
        std::dynamic_pointer_cast<shoestring::nn::AdaptableEmbeddingImpl>(layer->clone())->forward(ids), y));
    layer->merge();
    CHECK(at::allclose(layer(ids), y, 1e-5, 1e-5));
    layer->unmerge();
    CHECK(at::equal(layer(ids), y));
    layer->delete_adapter("default");
    CHECK(at::equal(layer(ids), base));
  }
  AdaptableEmbedding layer(11, 8);
  CHECK_THROWS_WITH(layer->add_adapter(IA3Options()), Contains("expected LoRA or DoRA without lora_bias"));
}

TEST_CASE("a copy of a module is trained whole, beside its original", "[lora]") {
  torch::manual_seed(4);
  Net net;
  const Tensor x = torch::randn({5, 64}), base = net->forward(x), weight = net->head->weight.detach().clone();
  const auto options = [](const char* name) {
    return ApplyOptions().adapter_name(name).modules_to_save({"head"}).quantize("nf4");
  };
  lora::apply(*net, options("a"));
  CHECK(net->head->weight.requires_grad());
  const auto train = [&] {
    std::vector<Tensor> trained;
    for (const auto& parameter : net->parameters()) {
      if (parameter.requires_grad()) trained.push_back(parameter);
    }
    torch::optim::SGD optimizer(trained, 0.5);
    net->forward(x).square().mean().backward();
    optimizer.step();
    optimizer.zero_grad();
    return net->forward(x).detach();
  };
  const Tensor a = train();
  CHECK_FALSE(at::equal(net->head->weight, weight));
  lora::apply(*net, options("b"));
  // adapter "b" has its own copy of the head, which starts from the original weight
  CHECK(at::equal(net->head->weight, weight));
  const Tensor b = train();
  {
    const lora::DisableAdapterGuard guard(*net);
    CHECK(at::equal(net->head->weight, weight));
    CHECK_FALSE(net->head->weight.requires_grad());
  }
  CHECK(at::equal(net->forward(x), b));
  lora::set_adapter(*net, {"a"});
  CHECK(at::equal(net->forward(x), a));
  CHECK_THROWS_WITH(
      lora::set_adapter(*net, {"a", "b"}),
      Contains("expected at most one adapter with a trained copy (modules_to_save) of head, received a, b"));
  CHECK_THROWS_WITH(lora::AdaptersPerRowGuard(*net, {"a", "b"}),
                    Contains("which has a trained copy (modules_to_save) of head"));

  // save_model writes the base weights of the model, whichever adapter is active.
  Folder directory;
  shoestring::save_model(*net, directory.path);
  CHECK(at::equal(shoestring::load_safetensors(directory / "model.safetensors")["head.weight"], weight));
  CHECK(at::equal(net->forward(x), a));

  lora::merge(*net);
  CHECK(at::allclose(net->forward(x), a, 1e-4, 1e-5));
  lora::unmerge(*net);
  CHECK(at::equal(net->forward(x), a));
  lora::delete_adapter(*net, "a");
  CHECK(at::equal(net->head->weight, weight));
  lora::set_adapter(*net, {"b"});
  CHECK(at::equal(net->forward(x), b));
  lora::delete_adapter(*net, "b");
  CHECK(net->head->children().empty());
}

TEST_CASE("backward of a trained copy under another adapter is right or an error", "[lora]") {
  Net net;
  lora::apply(*net, ApplyOptions().modules_to_save({"head"}));
  const Tensor x = torch::randn({5, 64}).requires_grad_();
  {
    const torch::NoGradGuard no_grad;
    net->head->weight.mul_(2);
  }
  // Backward of `loss` must also work while adapters are disabled. The backward of `square` must raise an
  // error: it needs the trained weight, which DisableAdapterGuard modifies in place.
  const Tensor loss = net->forward(x).sum(), square = (net->head->weight * net->head->weight).sum();
  const Tensor expected = torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true)[0];
  {
    const lora::DisableAdapterGuard guard(*net);
    CHECK(at::equal(torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true)[0], expected));
    CHECK_THROWS_WITH(square.backward({}, /*retain_graph=*/true),
                      Contains("modified by an inplace operation"));
  }
  (loss + square).backward();
  CHECK(net->head->weight.grad().defined());
  CHECK(at::equal(x.grad(), expected));
}

TEST_CASE("biases of the base are trained on request", "[lora]") {
  for (const char* which : {"all", "lora_only"}) {
    Net net;
    lora::apply(*net, ApplyOptions().target_modules({"up_proj"}).bias(which));
    CHECK(net->up->bias.requires_grad());
    CHECK(net->down->bias.requires_grad() == (std::string(which) == "all"));
    CHECK(net->head->bias.requires_grad() == (std::string(which) == "all"));
    CHECK_THROWS_WITH(lora::apply(*net, ApplyOptions().adapter_name("b").bias("all")),
                      Contains("expected 'none', since the adapter 'default' trains the base's biases"));
    lora::set_adapter(*net, {});
    CHECK_FALSE(net->up->bias.requires_grad());
  }
  Net net;
  CHECK_THROWS_WITH(lora::apply(*net, ia3().bias("all")), Contains("bias: expected 'none', received 'all'"));
  CHECK_THROWS_WITH(lora::apply(*net, ApplyOptions().bias("some")),
                    Contains("expected 'none', 'all' or 'lora_only'"));
  CHECK_THROWS_WITH(lora::apply(*net, ApplyOptions().modules_to_save({"lm_head"})),
                    Contains("received 'lm_head', which matches nothing"));
  CHECK_THROWS_WITH(
      lora::apply(*net, ia3().target_modules({"up_proj"})),
      Contains(
          "feedforward_modules: expected names of modules, received 'down_proj', which matches nothing"));
  for (const auto& parameter : net->parameters()) CHECK(parameter.requires_grad());
}
