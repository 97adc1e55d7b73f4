#include "capabilities.h"
#include "catch.h"
#include "relative_error.h"

#include <sstream>

#include <torch/csrc/autograd/autograd.h>
#include <torch/serialize.h>
#include <torch/utils.h>

#include <shoestring/nn.h>

using at::Tensor;
using shoestring::nn::QuantizedLinear;
using shoestring::nn::QuantizedLinearOptions;

TEST_CASE("QuantizedLinear agrees with its dequantised weight in fp64", "[quantized_linear]") {
  for_each_capability([&](const char* capability) {
    for (bool nested : {false, true}) {
      // With 100 input features, quantisation blocks span two rows of the weight. With 2048, the dense weight
      // needs more than one panel of 1 MiB.
      for (int64_t in : {100, 2048}) {
        torch::manual_seed(3);
        CAPTURE(capability, nested, in);
        QuantizedLinear layer(QuantizedLinearOptions(in, 300).double_quant(nested));
        CHECK(layer->packed.dim() == (in == 100 ? 1 : 2));
        Tensor weight = layer->dequantize(at::kFloat).to(at::kDouble),
               bias = layer->bias.detach().to(at::kDouble);
        Tensor x = torch::randn({2, 5, in}).requires_grad_();
        Tensor y = layer->forward(x), upstream = torch::randn_like(y);
        CHECK(relative_error(y, at::linear(x.detach().to(at::kDouble), weight, bias)) < 1e-6);
        auto gradients = torch::autograd::grad({y}, {x, layer->bias}, {upstream});
        CHECK(relative_error(gradients[0], at::matmul(upstream.to(at::kDouble), weight)) < 1e-6);
        CHECK(relative_error(gradients[1], upstream.to(at::kDouble).sum(at::IntArrayRef{0, 1})) < 1e-6);
        Tensor half = layer->forward(x.detach().to(at::kBFloat16));
        CHECK(half.scalar_type() == at::kBFloat16);
        CHECK(relative_error(half, y.detach().to(at::kDouble)) < 1e-2);
      }
    }
  });
}

TEST_CASE("QuantizedLinear of int8 agrees with its dequantised weight in fp64", "[quantized_linear]") {
  torch::manual_seed(3);
  auto int8 = shoestring::QuantizeOptions().quant_type("int8");
  QuantizedLinear layer(QuantizedLinearOptions(100, 30).quantize(int8));
  CHECK(layer->packed.scalar_type() == at::kChar);
  CHECK(layer->options.quantize().block_size() == 100);
  Tensor weight = layer->dequantize(at::kFloat).to(at::kDouble), bias = layer->bias.detach().to(at::kDouble);
  Tensor x = torch::randn({2, 5, 100}).requires_grad_();
  Tensor y = layer->forward(x), upstream = torch::randn_like(y);
  CHECK(relative_error(y, at::linear(x.detach().to(at::kDouble), weight, bias)) < 1e-6);
  auto gradients = torch::autograd::grad({y}, {x}, {upstream});
  CHECK(relative_error(gradients[0], at::matmul(upstream.to(at::kDouble), weight)) < 1e-6);

  auto copy = std::dynamic_pointer_cast<shoestring::nn::QuantizedLinearImpl>(layer->clone());
  CHECK(at::equal(copy->forward(x), y));
  layer->to(at::kBFloat16);
  CHECK(layer->packed.scalar_type() == at::kChar);
  CHECK(at::equal(layer->dequantize(at::kFloat), copy->dequantize(at::kFloat)));
  const auto refused = Catch::Matchers::Contains("expected the defaults with quant_type 'int8'");
  CHECK_THROWS_WITH(QuantizedLinear(QuantizedLinearOptions(100, 30).quantize(int8).double_quant(true)),
                    refused);
  CHECK_THROWS_WITH(QuantizedLinear(QuantizedLinearOptions(100, 30).quantize(int8.block_size(32))), refused);
}

TEST_CASE("QuantizedLinear clones, converts, saves and prints", "[quantized_linear]") {
  torch::manual_seed(3);
  for (bool nested : {false, true}) {
    QuantizedLinear layer(QuantizedLinearOptions(128, 10).double_quant(nested));
    Tensor x = torch::randn({3, 128}), y = layer->forward(x);
    auto copy = std::dynamic_pointer_cast<shoestring::nn::QuantizedLinearImpl>(layer->clone());
    CHECK(at::equal(copy->forward(x), y));
    CHECK(copy->packed.data_ptr() != layer->packed.data_ptr());

    std::stringstream stream;
    torch::save(layer, stream);
    QuantizedLinear other(QuantizedLinearOptions(128, 10).double_quant(nested));
    torch::load(other, stream);
    CHECK(at::equal(other->forward(x), y));

    layer->to(at::kBFloat16);  // changes the dtype of the bias only; codes and scales keep theirs
    CHECK(layer->packed.scalar_type() == at::kByte);
    CHECK(at::equal(layer->dequantize(at::kFloat), other->dequantize(at::kFloat)));
    CHECK(layer->bias.scalar_type() == at::kBFloat16);
    std::ostringstream text;
    text << *layer;
    CHECK_THAT(text.str(),
               Catch::Matchers::Contains("QuantizedLinear(in_features=128, out_features=10, bias=true, nf4"));
  }
}

TEST_CASE("QuantizedLinear refuses a weight of another shape", "[quantized_linear]") {
  QuantizedLinear layer(64, 10);
  CHECK_THROWS_WITH(layer->set_weight(torch::randn({9, 64})),
                    Catch::Matchers::Contains("expected shape (10, 64)"));
}
