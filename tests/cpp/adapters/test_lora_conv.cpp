#include "catch.h"
#include "relative_error.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/conv.h>
#include <torch/utils.h>

#include <ATen/ATen.h>

#include <shoestring/adapters/lora.h>

using at::Tensor;
using Catch::Matchers::Contains;
using shoestring::nn::AdaptableConv1d;
using shoestring::nn::AdaptableConv2d;
using shoestring::nn::AdaptableConv3d;
using shoestring::nn::LoraOptions;
namespace lora = shoestring::lora;

namespace {

// Gives an adapter values as if it had been trained.
void train(shoestring::nn::AdapterImpl& adapter) {
  const torch::NoGradGuard no_grad;
  for (auto& item : adapter.tensors) {
    if (item.key() == "lora_magnitude_vector") {
      item.value().mul_(1.5);
    } else {
      item.value().normal_(0, 0.3);
    }
  }
}

// Compares a layer that has adapters "a" (LoRA) and "b" (`second`) with LibTorch's layer, whose weight and
// bias are those of the adapted layer, computed in fp64.
template <class Layer, class Plain>
void check_layer(Layer layer, Plain plain, const Tensor& x) {
  INFO(*layer << " " << x.sizes());
  {
    const torch::NoGradGuard no_grad;
    plain->weight.copy_(layer->weight);
    if (layer->bias.defined()) plain->bias.copy_(layer->bias);
  }
  const Tensor base = layer(x);
  CHECK(at::equal(base, plain(x)));
  for (const bool dora : {false, true}) {
    layer->add_adapter(LoraOptions().rank(3).alpha(6).dora(dora).lora_bias(!dora), "a");
    // a new adapter changes nothing
    CHECK(at::allclose(layer(x), base, 1e-5, 1e-5));
    layer->add_adapter(LoraOptions().rank(2).alpha(3), "b");
    train(*layer->adapters["a"]);
    train(*layer->adapters["b"]);
    layer->active = {"a", "b"};
    auto &a = *layer->adapters["a"], &b = *layer->adapters["b"];

    std::vector<Tensor> inputs{a["lora_A"], a["lora_B"], b["lora_A"], b["lora_B"]}, wide;
    for (const Tensor& t : inputs) wide.push_back(t.detach().to(at::kDouble).requires_grad_());
    const auto low = [&](int i, double scaling) {
      return scaling * wide[i + 1].flatten(1).mm(wide[i].flatten(1));
    };
    const Tensor dense = layer->weight.to(at::kDouble).flatten(1);
    Tensor own = dense + low(0, 2);
    if (dora)
      own = own * (a["lora_magnitude_vector"].to(at::kDouble).detach().view({-1, 1}) /
                   own.detach().norm(2, 1, /*keepdim=*/true));
    const Tensor weight = (own + low(2, 1.5)).view(layer->weight.sizes());
    plain->to(at::kDouble);
    Tensor exact;
    {
      // LibTorch's layer holds a leaf, so the reference replaces its values and the gradient is taken of it.
      const torch::NoGradGuard no_grad;
      plain->weight.set_data(weight.detach());
      if (layer->bias.defined()) plain->bias.set_data(layer->bias.detach().to(at::kDouble));
    }
    exact = plain(x.to(at::kDouble));
    const Tensor y = layer(x), upstream = at::randn_like(y);
    std::vector<int64_t> vector(static_cast<size_t>(y.dim()), 1);
    vector[static_cast<size_t>(y.dim() - (layer->weight.dim() - 1))] = -1;
    const Tensor added = dora ? exact : exact + 2 * a["lora_bias"].detach().to(at::kDouble).view(vector);
    CHECK(relative_error(y, added) < 5e-6);
    const auto gradients = torch::autograd::grad({y}, inputs, {upstream});
    const Tensor by_weight = torch::autograd::grad({exact}, {plain->weight}, {upstream.to(at::kDouble)})[0];
    const auto expected = torch::autograd::grad({weight}, wide, {by_weight});
    for (size_t i = 0; i < inputs.size(); ++i) CHECK(relative_error(gradients[i], expected[i]) < 2e-5);

    const auto copy = std::dynamic_pointer_cast<typename Layer::ContainedType>(layer->clone());
    CHECK(at::equal(copy->forward(x), y));
    const Tensor before = layer->weight.clone();
    layer->merge();
    CHECK(!layer->has_adapter());
    CHECK(at::allclose(layer(x), y, 1e-4, 1e-4));
    layer->unmerge();
    CHECK(at::equal(layer->weight, before));
    CHECK(at::equal(layer(x), y));
    layer->delete_adapter("a");
    layer->delete_adapter("b");
    CHECK(at::equal(layer(x), base));
    plain->to(at::kFloat);
  }
}

}  // namespace

TEST_CASE("convolutions take on LoRA and DoRA", "[lora]") {
  torch::manual_seed(4);
  namespace nn = torch::nn;
  const auto one = nn::Conv1dOptions(5, 7, 3).stride(2).padding(1);
  check_layer(AdaptableConv1d(one), nn::Conv1d(one), at::randn({4, 5, 9}));
  check_layer(AdaptableConv1d(one), nn::Conv1d(one), at::randn({5, 9}));
  const auto same = nn::Conv1dOptions(5, 7, 4).padding(torch::kSame).dilation(2);
  check_layer(AdaptableConv1d(same), nn::Conv1d(same), at::randn({2, 5, 9}));
  const auto circular = nn::Conv1dOptions(5, 7, 3).padding(2).dilation(2).padding_mode(torch::kCircular);
  check_layer(AdaptableConv1d(circular), nn::Conv1d(circular), at::randn({2, 5, 9}));
  const auto two = nn::Conv2dOptions(5, 7, {3, 2}).padding({1, 0});
  check_layer(AdaptableConv2d(two), nn::Conv2d(two), at::randn({4, 5, 6, 7}));
  const auto mirrored = nn::Conv2dOptions(3, 4, {3, 2}).padding({2, 1}).padding_mode(torch::kReflect);
  check_layer(AdaptableConv2d(mirrored), nn::Conv2d(mirrored), at::randn({2, 3, 6, 5}));
  const auto pointwise = nn::Conv2dOptions(5, 7, 1).bias(false);
  check_layer(AdaptableConv2d(pointwise), nn::Conv2d(pointwise), at::randn({4, 5, 3, 4}));
  const auto three = nn::Conv3dOptions(3, 4, 2);
  check_layer(AdaptableConv3d(three), nn::Conv3d(three), at::randn({2, 3, 4, 3, 5}));
}

TEST_CASE("a new convolution has the initial values of LibTorch's", "[lora]") {
  torch::manual_seed(7);
  AdaptableConv2d ours(torch::nn::Conv2dOptions(4, 6, 3).groups(2));
  torch::manual_seed(7);
  torch::nn::Conv2d theirs(torch::nn::Conv2dOptions(4, 6, 3).groups(2));
  CHECK(at::equal(ours->weight, theirs->weight));
  CHECK(at::equal(ours->bias, theirs->bias));
  const Tensor x = at::randn({2, 4, 5, 5});
  CHECK(at::equal(ours(x), theirs(x)));
}

TEST_CASE("rows of a batch use different adapters of a convolution", "[lora]") {
  torch::manual_seed(4);
  AdaptableConv1d layer(torch::nn::Conv1dOptions(5, 7, 3));
  layer->add_adapter(LoraOptions().rank(3), "a");
  layer->add_adapter(LoraOptions().rank(2), "b");
  for (auto& item : layer->adapters) train(*item.value());
  const Tensor x = at::randn({3, 5, 9});
  std::vector<Tensor> expected;
  for (const std::vector<std::string>& names : {std::vector<std::string>{}, {"a"}, {"b"}}) {
    layer->active = names;
    expected.push_back(layer(x)[static_cast<int64_t>(expected.size())]);
  }
  const lora::AdaptersPerRowGuard guard(*layer, {std::nullopt, "a", "b"});
  CHECK(at::allclose(layer(x), at::stack(expected), 1e-5, 1e-5));
}

TEST_CASE("dropout of a convolution's adapters is of their input, in training alone", "[lora]") {
  torch::manual_seed(4);
  AdaptableConv1d layer(torch::nn::Conv1dOptions(5, 7, 3));
  layer->add_adapter(LoraOptions().rank(3).dropout(0.5));
  train(*layer->adapters["default"]);
  const Tensor x = at::randn({3, 5, 9});
  CHECK(!at::equal(layer(x), layer(x)));
  layer->eval();
  CHECK(at::equal(layer(x), layer(x)));
}

TEST_CASE("convolutions refuse what they cannot do", "[lora]") {
  AdaptableConv2d grouped(torch::nn::Conv2dOptions(4, 4, 1).groups(2));
  CHECK_THROWS_WITH(grouped->add_adapter(LoraOptions()),
                    Contains("expected a convolution with groups=1, received this layer of 2 groups"));
  AdaptableConv2d layer(4, 4, 1);
  CHECK_THROWS_WITH(layer->add_adapter(LoraOptions().init("pissa")),
                    Contains("expected LoRA or DoRA with init 'default' or 'gaussian' for a convolution"));
  CHECK_THROWS_WITH(layer->merge(), Contains("merge: expected a layer with an adapter"));
  CHECK_THROWS_WITH(layer->unmerge(), Contains("unmerge: expected a layer that was merged"));
  CHECK_THROWS_WITH(AdaptableConv2d(torch::nn::Conv2dOptions(4, 4, 1).groups(3)),
                    Contains("groups: expected a number that divides in_channels, 4"));
}
