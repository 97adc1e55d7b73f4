#include "catch.h"

#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include <ATen/ATen.h>

#include <shoestring/optim.h>

#include "adapters/lora_model.h"
#include "folder.h"

using Catch::Matchers::Contains;

namespace {

Tensor base_of(AdaptableLinear& layer) { return layer->dense_weight().clone(); }
Tensor change_of(AdaptableLinear& layer) {
  return layer->adapters["default"]->lora()->scaling() * lora_B(layer).mm(lora_A(layer)).detach();
}

// Builds a model whose weights have quickly falling singular values, so that a randomised SVD finds the
// largest ones.
Net falling() {
  torch::manual_seed(4);
  Net net;
  const torch::NoGradGuard no_grad;
  for (AdaptableLinear layer : {net->up, net->down}) {
    const auto [U, values, V] = at::linalg_svd(layer->weight, /*full_matrices=*/false);
    layer->weight.copy_((U * values[0] * at::pow(0.7, at::arange(values.numel()))).mm(V));
  }
  return net;
}

ApplyOptions start(const char* init, const char* quantize = "none") {
  return ApplyOptions().quantize(quantize).adapter(LoraOptions().rank(4).alpha(6).init(init));
}

}  // namespace

TEST_CASE("PiSSA's adapter is the best of its rank, and the base the rest", "[lora]") {
  for (const char* init : {"pissa", "pissa_niter_16"}) {
    CAPTURE(init);
    Net net = falling();
    const Tensor dense = base_of(net->up);
    shoestring::lora::apply(*net, start(init));
    const auto [U, values, V] = at::linalg_svd(dense, /*full_matrices=*/false);
    const Tensor best = (U.narrow(1, 0, 4) * values.narrow(0, 0, 4)).mm(V.narrow(0, 0, 4));
    CHECK(at::allclose(change_of(net->up), best, 1e-4, 1e-4));
    CHECK(at::allclose(base_of(net->up), dense - best, 1e-4, 1e-4));
    CHECK(at::allclose(lora_A(net->up).norm(2, 1), lora_B(net->up).norm(2, 0), 1e-3, 1e-4));
  }
}

TEST_CASE("OLoRA's matrices are the QR decomposition's", "[lora]") {
  Net net = falling();
  const Tensor dense = base_of(net->up);
  shoestring::lora::apply(*net, start("olora"));
  const Tensor B = lora_B(net->up).detach();
  CHECK(at::allclose(B.t().mm(B), at::eye(4), 1e-5, 1e-5));
  CHECK(at::allclose(lora_A(net->up).detach(), B.t().mm(dense), 1e-4, 1e-4));
  CHECK(at::allclose(base_of(net->up) + change_of(net->up), dense, 1e-5, 1e-5));
}

TEST_CASE("LoftQ and PiSSA lose less of a weight to quantising", "[lora]") {
  const auto lost = [](const ApplyOptions& options) {
    torch::manual_seed(4);
    Net net;
    const Tensor dense = base_of(net->up);
    shoestring::lora::apply(*net, options);
    CHECK(net->up->is_quantized());
    return (base_of(net->up) + change_of(net->up) - dense).norm().item<double>();
  };
  const double plain = lost(start("default", "nf4"));
  const double loftq = lost(start("loftq", "nf4"));
  CHECK(lost(start("pissa", "nf4")) < plain);
  CHECK(loftq < 0.97 * plain);
  auto more = start("loftq", "nf4");
  std::get<LoraOptions>(more.adapter()).loftq_iterations(5);
  CHECK(lost(more) < loftq);
}

TEST_CASE("the base is what it was whenever an adapter that changed it is not in use", "[lora]") {
  Net net = falling();
  const Tensor x = torch::randn({5, 64}), y = net->forward(x);
  shoestring::lora::apply(*net, start("pissa"));
  CHECK(at::allclose(net->forward(x), y, 1e-5, 1e-5));
  for (AdaptableLinear layer : {net->up, net->down}) change(*layer->adapters["default"]);
  const Tensor trained = net->forward(x);
  CHECK_FALSE(at::allclose(trained, y, 1e-2, 1e-2));
  {
    const shoestring::lora::DisableAdapterGuard guard(*net);
    CHECK(at::allclose(net->forward(x), y, 1e-5, 1e-5));
  }
  shoestring::lora::apply(*net, ApplyOptions().adapter_name("other"));
  CHECK(at::allclose(net->forward(x), y, 1e-5, 1e-5));
  shoestring::lora::set_adapter(*net, {"default"});
  CHECK(at::allclose(net->forward(x), trained, 1e-5, 1e-5));

  // Load the adapter into a fresh copy of the original model, and into the model that it was saved from.
  Folder directory;
  shoestring::lora::save_adapter(*net, directory.path, {"default"});
  Net bare = falling();
  shoestring::lora::load_adapter(*bare, directory.path);
  CHECK(at::allclose(bare->forward(x), trained, 1e-5, 1e-5));
  CHECK(bare->up->adapters["default"]->lora()->rank() == 8);
  shoestring::lora::load_adapter(*net, directory.path);
  CHECK(at::allclose(net->forward(x), trained, 1e-5, 1e-5));

  shoestring::lora::merge(*bare);
  CHECK(at::allclose(bare->forward(x), trained, 1e-5, 1e-5));
  shoestring::lora::delete_adapter(*net, "default");
  shoestring::lora::delete_adapter(*net, "other");
  CHECK(at::allclose(net->forward(x), y, 1e-5, 1e-5));
}

TEST_CASE("initialisations that cannot be are refused", "[lora]") {
  Net net;
  CHECK_THROWS_WITH(shoestring::lora::apply(*net, start("eva")),
                    Contains("init: expected 'default', 'gaussian', 'pissa'"));
  CHECK_THROWS_WITH(shoestring::lora::apply(*net, start("loftq")),
                    Contains("expected quantize with 'loftq'"));
  CHECK_THROWS_WITH(
      shoestring::lora::apply(*net, ApplyOptions().adapter(LoraOptions().rank(65).init("pissa"))),
      Contains("rank: expected at most 64 for 'pissa', the smaller side of"));
  CHECK_THROWS_WITH(
      shoestring::lora::apply(*net, ApplyOptions().adapter(LoraOptions().dora(true).init("pissa"))),
      Contains("init: expected its default with dora"));
  for (const char* init : {"pissa", "pissa_niter_2", "loftq"}) {
    const auto form = [&](const LoraOptions& own) { return ApplyOptions().quantize("nf4").adapter(own); };
    CHECK_THROWS_WITH(shoestring::lora::apply(*net, form(LoraOptions().rank(4).alpha(0).init(init))),
                      Contains("alpha: expected a positive number with init '" + std::string(init)));
    CHECK_THROWS_WITH(shoestring::lora::apply(
                          *net, form(LoraOptions().rank(4).alpha_pattern({{"up_proj", -1}}).init(init))),
                      Contains("alpha_pattern: expected a positive number with init"));
  }
  CHECK_THROWS_WITH(shoestring::lora::apply(*net, ApplyOptions().quantize("int8").double_quant(true)),
                    Contains("block_size and double_quant"));
  for (const auto& parameter : net->parameters()) CHECK(parameter.requires_grad());
  torch::manual_seed(0);
  shoestring::lora::apply(*net, start("gaussian"));
  CHECK(std::abs(lora_A(net->up).std().item<double>() - 0.25) < 0.03);
}

TEST_CASE("LoRA+ gives lora_B and vectors a learning rate of their own", "[lora]") {
  Net net;
  shoestring::lora::apply(*net, ApplyOptions().adapter(LoraOptions().rank(4).dora(true)));
  net->head->weight.requires_grad_(true);
  const shoestring::optim::AdamWOptions defaults = shoestring::optim::AdamWOptions(1e-3).weight_decay(0.1);
  const auto groups = shoestring::lora::loraplus_param_groups(
      *net, defaults, shoestring::lora::LoraPlusOptions().lr_ratio(4));
  REQUIRE(groups.size() == 3);
  std::map<double, size_t> rates;
  for (const auto& group : groups) {
    const auto& own = static_cast<const shoestring::optim::AdamWOptions&>(group.options());
    for (const auto& parameter : group.params())
      CHECK(own.weight_decay() == (parameter.dim() == 1 ? 0 : 0.1));
    rates[own.lr()] += group.params().size();
  }
  // Expected number of parameter tensors for each learning rate. 1e-3: two lora_A and one parameter of the
  // head. 4e-3: two lora_B and two magnitude vectors.
  CHECK(rates == std::map<double, size_t>{{1e-3, 3}, {4e-3, 4}});
  const Tensor A = lora_A(net->up).detach().clone(), B = lora_B(net->up).detach().clone();
  shoestring::optim::AdamW ours(groups, defaults);
  net->forward(torch::randn({8, 64})).square().mean().backward();
  ours.step();
  CHECK(std::abs((lora_B(net->up) - B).abs().mean().item<double>() - 4e-3) < 4e-4);
  // The gradient of lora_A is zero while lora_B is zero, so only weight decay changes lora_A.
  CHECK(at::equal(lora_A(net->up), A.mul(1 - 1e-4)));

  torch::optim::AdamW theirs(shoestring::lora::loraplus_param_groups(*net, torch::optim::AdamWOptions(1e-3)));
  CHECK(theirs.param_groups().size() == 3);
  CHECK(theirs.param_groups()[1].options().get_lr() == 16e-3);
  CHECK_THROWS_WITH(
      shoestring::lora::loraplus_param_groups(*net, 1e-3, shoestring::lora::LoraPlusOptions().lr_ratio(0.5)),
      Contains("lr_ratio: expected at least 1"));
}

TEST_CASE("EVA refuses adapters that it cannot initialise", "[lora]") {
  Net net = make(options("none"));
  const auto run = [&](const shoestring::lora::ChooseRows&) { net(at::randn({3, 64})); };
  CHECK_THROWS_WITH(
      shoestring::lora::initialize_eva(*net, run),
      Contains("expected lora_B of zeros, as before training, received other values in up_proj"));
  for (AdaptableLinear layer : {net->up, net->down}) lora_B(layer).detach().zero_();
  CHECK_THROWS_WITH(shoestring::lora::initialize_eva(*net, run),
                    Contains("run: expected at least 8 directions in the inputs of up_proj, received 3"));
  CHECK(!net->up->observer);
  CHECK(net->is_training());
  using shoestring::lora::EvaOptions;
  CHECK_THROWS_WITH(shoestring::lora::initialize_eva(*net, run, EvaOptions().rho(0.5)),
                    Contains("rho: expected a number of at least 1, received 0.5"));
  CHECK_THROWS_WITH(shoestring::lora::initialize_eva(*net, run, EvaOptions().adapter_name("b")),
                    Contains("expected linear layers with a LoRA adapter 'b', received none"));
}
