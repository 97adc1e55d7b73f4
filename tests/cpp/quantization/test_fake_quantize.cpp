#include "capabilities.h"
#include "catch.h"
#include "relative_error.h"

#include <sstream>

#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>
#include <torch/utils.h>

#include <shoestring/gemm/ops.h>
#include <shoestring/nn.h>

using at::Tensor;
using shoestring::QuantizeOptions;
using shoestring::nn::FakeQuantizedLinear;
using shoestring::nn::QuantizedLinear;
using shoestring::nn::QuantizedLinearOptions;

namespace {

struct FakeForm {
  const char* quant_type;
  int64_t block_size;
  bool double_quant;

  QuantizeOptions options() const { return QuantizeOptions().quant_type(quant_type).block_size(block_size); }
};
constexpr FakeForm kFakeForms[] = {
    {"nf4", 64, false}, {"fp4", 32, false}, {"int4", 128, false}, {"int8", 64, false}, {"nf4", 64, true}};

// Quantises and dequantises x by the operators for stored weights.
Tensor stored_values(const Tensor& x, const FakeForm& form) {
  if (form.quant_type == std::string("int8")) {
    const auto [codes, scales] = shoestring::quantize_int8(x);
    return shoestring::dequantize_int8(codes, scales, x.scalar_type());
  }
  const auto [packed, absmax] = shoestring::quantize_4bit(x, form.options());
  if (!form.double_quant)
    return shoestring::dequantize_4bit(packed, absmax, x.sizes(), x.scalar_type(), {}, form.options());
  const auto [codes, nested] = shoestring::quantize_absmax(absmax);
  return shoestring::dequantize_4bit(packed, codes, x.sizes(), x.scalar_type(), nested, form.options());
}

}  // namespace

TEST_CASE("fake_quantize gives the values of the stored weight on every capability", "[fake_quantize]") {
  for_each_capability([&](const char* capability) {
    at::manual_seed(3);
    for (const FakeForm& form : kFakeForms) {
      for (auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
        for (int64_t columns : {1, 33, 100, 4097}) {
          CAPTURE(capability, form.quant_type, form.double_quant, columns, dtype);
          Tensor x = at::randn({columns, 9}).to(dtype).t().requires_grad_();
          Tensor y = shoestring::fake_quantize(x, form.options(), form.double_quant);
          CHECK(y.is_contiguous());
          CHECK(at::equal(y, stored_values(x.detach(), form)));
          Tensor upstream = at::randn(y.sizes()).to(dtype);
          CHECK(at::equal(torch::autograd::grad({y}, {x}, {upstream})[0], upstream));
        }
      }
    }
  });
}

TEST_CASE("fake_quantize refuses what does not fit", "[fake_quantize]") {
  using Catch::Matchers::Contains;
  const Tensor x = at::ones({2, 64});
  CHECK_THROWS_WITH(shoestring::fake_quantize(x.to(at::kDouble)), Contains("expected fp32, bf16 or fp16"));
  CHECK_THROWS_WITH(shoestring::fake_quantize(x, QuantizeOptions().block_size(48)),
                    Contains("fake_quantize: block_size: expected a power of two"));
  CHECK_THROWS_WITH(shoestring::fake_quantize(x, QuantizeOptions().quant_type("int4"), true),
                    Contains("double_quant: expected False with quant_type 'int4'"));
  CHECK_THROWS_WITH(shoestring::fake_quantize(x, QuantizeOptions().quant_type("int8").block_size(32)),
                    Contains("block_size and double_quant: expected None and False with quant_type 'int8'"));
  CHECK(at::equal(shoestring::fake_quantize(x, QuantizeOptions().quant_type("int8").block_size(64)),
                  shoestring::fake_quantize(x, QuantizeOptions().quant_type("int8"))));
}

TEST_CASE("FakeQuantizedLinear trains the weight that it quantises", "[fake_quantize]") {
  for (const FakeForm& form : kFakeForms) {
    CAPTURE(form.quant_type, form.double_quant);
    torch::manual_seed(3);
    FakeQuantizedLinear layer(
        QuantizedLinearOptions(96, 10).quantize(form.options()).double_quant(form.double_quant));
    torch::manual_seed(3);
    torch::nn::Linear same(96, 10);  // the same initial values
    CHECK(at::equal(layer->weight, same->weight));
    CHECK(at::equal(layer->bias, same->bias));

    Tensor x = torch::randn({7, 96}), values = stored_values(layer->weight.detach(), form);
    Tensor y = layer->forward(x);
    CHECK(at::equal(y, shoestring::dense_linear(x, values, layer->bias.detach())));
    Tensor upstream = torch::randn_like(y);
    y.backward(upstream);
    CHECK(relative_error(layer->weight.grad(), at::matmul(upstream.to(at::kDouble).t(), x.to(at::kDouble))) <
          1e-6);

    const QuantizedLinear stored = layer->quantized();
    CHECK(at::equal(stored->dequantize(at::kFloat), values));
    CHECK(stored->bias.is_same(layer->bias));
    CHECK(stored->named_parameters().size() == 1);
    CHECK(relative_error(QuantizedLinear(stored)(x), y.detach().to(at::kDouble)) < 1e-6);
  }
}

TEST_CASE("FakeQuantizedLinear clones, converts, saves and prints", "[fake_quantize]") {
  const auto options =
      QuantizedLinearOptions(64, 10).bias(false).quantize(QuantizeOptions().quant_type("int4"));
  FakeQuantizedLinear layer(options);
  Tensor x = torch::randn({3, 64}), y = layer->forward(x);
  auto copy = std::dynamic_pointer_cast<shoestring::nn::FakeQuantizedLinearImpl>(layer->clone());
  CHECK(at::equal(copy->forward(x), y));
  CHECK_FALSE(copy->weight.is_same(layer->weight));
  std::stringstream stream;
  torch::save(layer, stream);
  FakeQuantizedLinear other(options);
  torch::load(other, stream);
  CHECK(at::equal(other->forward(x), y));
  layer->to(at::kBFloat16);
  CHECK(layer->forward(x.to(at::kBFloat16)).scalar_type() == at::kBFloat16);
  CHECK_FALSE(layer->quantized()->bias.defined());
  CHECK(layer->quantized()->dtype == at::kBFloat16);
  std::stringstream text;
  text << layer;
  CHECK(
      text.str() ==
      "shoestring::nn::FakeQuantizedLinear(in_features=64, out_features=10, bias=false, int4, block_size=64, "
      "double_quant=false)");
}
