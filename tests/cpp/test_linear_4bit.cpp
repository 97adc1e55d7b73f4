#include "catch.h"

#include <sstream>

#include <torch/csrc/autograd/autograd.h>
#include <torch/serialize.h>
#include <torch/utils.h>

#include <shoestring/nn.h>

using at::Tensor;
using shoestring::nn::Linear4bit;
using shoestring::nn::Linear4bitOptions;

namespace {

double error(const Tensor& a, const Tensor& b) {
  return (a.to(at::kDouble) - b).norm().item<double>() / (b.norm().item<double>() + 1e-30);
}

}  // namespace

TEST_CASE("Linear4bit agrees with its dequantised weight in fp64", "[linear_4bit]") {
  const std::string before = shoestring::cpu_capability();
  for (const char* capability : {"plain", "avx2", "avx512"}) {
    if (!shoestring::set_cpu_capability(capability)) continue;
    for (bool nested : {false, true}) {
      for (int64_t in : {100, 2048}) {  // rows that straddle blocks; more rows than one panel of 1 MiB
        torch::manual_seed(3);
        CAPTURE(capability, nested, in);
        Linear4bit layer(Linear4bitOptions(in, 300).nested(nested));
        CHECK(layer->packed.dim() == (in == 100 ? 1 : 2));
        Tensor weight = layer->dequantize(at::kFloat).to(at::kDouble), bias = layer->bias.detach().to(at::kDouble);
        Tensor x = torch::randn({2, 5, in}).requires_grad_();
        Tensor y = layer->forward(x), upstream = torch::randn_like(y);
        CHECK(error(y, at::linear(x.detach().to(at::kDouble), weight, bias)) < 1e-6);
        auto gradients = torch::autograd::grad({y}, {x, layer->bias}, {upstream});
        CHECK(error(gradients[0], at::matmul(upstream.to(at::kDouble), weight)) < 1e-6);
        CHECK(error(gradients[1], upstream.to(at::kDouble).sum(at::IntArrayRef{0, 1})) < 1e-6);
        Tensor half = layer->forward(x.detach().to(at::kBFloat16));
        CHECK(half.scalar_type() == at::kBFloat16);
        CHECK(error(half, y.detach().to(at::kDouble)) < 1e-2);
      }
    }
  }
  shoestring::set_cpu_capability(before);
}

TEST_CASE("Linear4bit clones, converts, saves and prints", "[linear_4bit]") {
  torch::manual_seed(3);
  for (bool nested : {false, true}) {
    Linear4bit layer(Linear4bitOptions(128, 10).nested(nested));
    Tensor x = torch::randn({3, 128}), y = layer->forward(x);
    auto copy = std::dynamic_pointer_cast<shoestring::nn::Linear4bitImpl>(layer->clone());
    CHECK(at::equal(copy->forward(x), y));
    CHECK(copy->packed.data_ptr() != layer->packed.data_ptr());

    std::stringstream stream;
    torch::save(layer, stream);
    Linear4bit other(Linear4bitOptions(128, 10).nested(nested));
    torch::load(other, stream);
    CHECK(at::equal(other->forward(x), y));

    layer->to(at::kBFloat16);  // the bias changes, the codes and scales do not
    CHECK(layer->packed.scalar_type() == at::kByte);
    CHECK(at::equal(layer->dequantize(at::kFloat), other->dequantize(at::kFloat)));
    CHECK(layer->bias.scalar_type() == at::kBFloat16);
    std::ostringstream text;
    text << *layer;
    CHECK_THAT(text.str(), Catch::Matchers::Contains("Linear4bit(in_features=128, out_features=10, bias=true, nf4"));
  }
}

TEST_CASE("Linear4bit refuses a weight of another shape", "[linear_4bit]") {
  Linear4bit layer(64, 10);
  CHECK_THROWS_WITH(layer->set_weight(torch::randn({9, 64})), Catch::Matchers::Contains("expected shape (10, 64)"));
}
