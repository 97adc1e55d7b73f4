#include "catch.h"
#include "folder.h"
#include "relative_error.h"

#include <sstream>

#include <torch/utils.h>

#include <shoestring/adapters/lora.h>
#include <shoestring/integrations/model_files.h>
#include <shoestring/integrations/quantized_training.h>
#include <shoestring/nn.h>
#include <shoestring/optim.h>

using at::Tensor;
using Catch::Matchers::Contains;
using shoestring::PrepareQuantizedOptions;
using shoestring::QuantizeOptions;
using shoestring::nn::AdaptableLinear;

namespace {

struct PreparedNetImpl : torch::nn::Cloneable<PreparedNetImpl> {
  PreparedNetImpl() { reset(); }
  void reset() override {
    gate = register_module("gate", AdaptableLinear(64, 96));
    up = register_module("up", AdaptableLinear(64, 96));
    down = register_module("down", AdaptableLinear(96, 64));
    head = register_module("head", AdaptableLinear(64, 5));
  }
  Tensor forward(const Tensor& x) { return head(x + shoestring::nn::swiglu_mlp(x, gate, up, down)); }

  AdaptableLinear gate = nullptr, up = nullptr, down = nullptr, head = nullptr;
};
TORCH_MODULE(PreparedNet);

PrepareQuantizedOptions prepare_form(const char* quant_type, bool double_quant = false) {
  return PrepareQuantizedOptions()
      .quantize(QuantizeOptions().quant_type(quant_type))
      .double_quant(double_quant)
      .skip({"head"});
}

}  // namespace

TEST_CASE("A converted module has the weights with which it was trained", "[quantized_training]") {
  const std::pair<const char*, bool> forms[] = {
      {"nf4", false}, {"nf4", true}, {"fp4", false}, {"int4", false}, {"int8", false}};
  for (const auto& [quant_type, double_quant] : forms) {
    CAPTURE(quant_type, double_quant);
    torch::manual_seed(3);
    PreparedNet net;
    const Tensor before = net->up->weight;
    const auto options = prepare_form(quant_type, double_quant);
    CHECK(shoestring::prepare_quantized(*net, options) == std::vector<std::string>{"gate", "up", "down"});
    CHECK(net->up->weight.is_same(before));
    CHECK_FALSE(net->head->is_fake_quantized());

    shoestring::optim::AdamW optimizer(net->parameters(), shoestring::optim::AdamWOptions(1e-2));
    const Tensor x = torch::randn({16, 64}), y = torch::randn({16, 5});
    double first = 0, last = 0;
    for (int step = 0; step < 8; ++step) {
      optimizer.zero_grad();
      Tensor loss = (net(x) - y).square().mean();
      loss.backward();
      optimizer.step();
      last = loss.item<double>();
      if (step == 0) first = last;
    }
    CHECK(last < first);

    const auto up = net->up->weight.detach().clone();
    const Tensor trained = net->up->computed_weight().detach(), logits = net(x).detach();
    CHECK(at::equal(trained, shoestring::fake_quantize(up, options.quantize(), double_quant)));
    // The gradient is straight-through: that of the fake-quantised weight, for each of the layers.
    const auto copy = std::dynamic_pointer_cast<PreparedNetImpl>(net->clone());
    CHECK(copy->up->is_fake_quantized());
    CHECK(at::equal(copy->forward(x), logits));

    CHECK(shoestring::convert_quantized(*net).size() == 3);
    CHECK(at::equal(net->up->base->dequantize(at::kFloat), trained));
    CHECK_FALSE(net->up->is_fake_quantized());
    CHECK(net->head->weight.requires_grad());
    CHECK(relative_error(net(x), logits.to(at::kDouble)) < 1e-5);

    const Folder folder;
    shoestring::save_model(*net, folder.path);
    PreparedNet loaded;
    shoestring::load_model(*loaded, folder.path);
    CHECK(at::equal(loaded->up->base->dequantize(at::kFloat), trained));
    CHECK(at::equal(loaded(x), net(x)));
    shoestring::lora::apply(*loaded);
    CHECK(loaded(x).requires_grad());
  }
}

TEST_CASE("A frozen prepared layer computes with its fake-quantised weight", "[quantized_training]") {
  torch::manual_seed(3);
  PreparedNet net;
  for (auto& p : net->parameters()) p.requires_grad_(false);
  const Tensor x = torch::randn({4, 64});
  shoestring::prepare_quantized(*net, prepare_form("nf4"));
  const Tensor prepared = net(x);
  shoestring::convert_quantized(*net);
  CHECK(relative_error(net(x), prepared.to(at::kDouble)) < 1e-5);
  std::stringstream text;
  text << net->up << net->head;
  CHECK_THAT(text.str(), Contains("bias=true, nf4)") && Contains("out_features=5, bias=true)"));
}

TEST_CASE("prepare_quantized refuses what does not fit and changes nothing", "[quantized_training]") {
  PreparedNet net;
  const auto refused = [&](const PrepareQuantizedOptions& options, const char* message) {
    CHECK_THROWS_WITH(shoestring::prepare_quantized(*net, options), Contains(message));
  };
  refused(prepare_form("nf5"),
          "prepare_quantized: quantize: expected none, nf4, fp4, int4 or int8, received 'nf5'");
  refused(prepare_form("none"),
          "prepare_quantized: quantize: expected nf4, fp4, int4 or int8, received 'none'");
  refused(prepare_form("int4", true), "prepare_quantized: double_quant: expected false with int4");
  refused(PrepareQuantizedOptions().quantize(QuantizeOptions().block_size(48)), "expected a power of two");
  refused(PrepareQuantizedOptions().target_modules({"out"}), "prepare_quantized: target_modules:");
  refused(PrepareQuantizedOptions().skip({"out"}), "prepare_quantized: skip:");
  refused(PrepareQuantizedOptions().skip({"gate", "up", "down", "head"}),
          "AdaptableLinear layers, received none");
  CHECK_THROWS_WITH(shoestring::convert_quantized(*net), Contains("expected layers that prepare_quantized"));
  net->up->quantize();
  refused(PrepareQuantizedOptions(), "received up, which is quantised; name it in skip");
  CHECK_FALSE(net->gate->is_fake_quantized());
  CHECK(shoestring::prepare_quantized(*net, prepare_form("int8").skip({"up", "down"})).size() == 2);
  refused(PrepareQuantizedOptions().target_modules({"gate"}), "received gate, which is prepared already");
  // Layers that are prepared already keep their format.
  CHECK(shoestring::prepare_quantized(*net, PrepareQuantizedOptions().skip({"up"})) ==
        std::vector<std::string>{"down"});
  CHECK_THROWS_WITH(net->gate->add_adapter(), Contains("expected layers without fake quantisation"));
  CHECK_THROWS_WITH(net->up->fake_quantize(), Contains("received one that is quantised already"));
  CHECK_THROWS_WITH(net->up->convert_quantized(), Contains("expected a layer with fake quantisation"));
}
