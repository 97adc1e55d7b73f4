#include "catch.h"

#include <sstream>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/generated/variable_factories.h>
#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>

#include <shoestring/amp.h>
#include <shoestring/nn/plain_linear.h>

#include "capabilities.h"

using at::Tensor;
namespace nn = shoestring::nn;

TEST_CASE("linear has the result and the gradients of PyTorch's", "[linear]") {
  at::manual_seed(3);
  for_each_capability([&](const char* capability) {
    CAPTURE(capability);
    const Tensor x = torch::randn({5, 7, 40}).requires_grad_(),
                 weight = torch::randn({33, 40}).requires_grad_(), bias = torch::randn({33}).requires_grad_(),
                 residual = torch::randn({5, 7, 33}).requires_grad_();
    const Tensor ours = shoestring::linear(x, weight, bias, shoestring::LinearOptions().residual(residual)),
                 theirs = at::linear(x, weight, bias) + residual, upstream = torch::randn({5, 7, 33});
    CHECK(at::allclose(ours, theirs, 1e-5, 1e-5));
    const auto gradients = [&](const Tensor& y) {
      return torch::autograd::grad({y}, {x, weight, bias, residual}, {upstream});
    };
    const auto found = gradients(ours), expected = gradients(theirs);
    for (size_t i = 0; i < found.size(); ++i) CHECK(at::allclose(found[i], expected[i], 1e-4, 1e-4));
  });
}

TEST_CASE("linear_group computes each layer, and autocast keeps the dtypes of weights", "[linear]") {
  at::manual_seed(3);
  const Tensor x = torch::randn({9, 24}).requires_grad_(), q = torch::randn({16, 24}).requires_grad_(),
               k = torch::randn({8, 24}).requires_grad_(), bias = torch::randn({8});
  const auto alone = shoestring::linear_group(x, {q, k});
  CHECK(at::allclose(alone[0], x.mm(q.t()), 1e-5, 1e-5));
  std::vector<Tensor> outputs;
  {
    const shoestring::AutocastGuard autocast(at::kCPU, at::kBFloat16);
    outputs = shoestring::linear_group(x, {q, k}, {std::nullopt, bias});
  }
  CHECK(outputs[0].scalar_type() == at::kBFloat16);
  CHECK(at::allclose(outputs[1].to(at::kFloat), x.mm(k.t()) + bias, 2e-2, 2e-1));
  (outputs[0].sum() + outputs[1].sum()).backward();
  CHECK(q.grad().scalar_type() == at::kFloat);
  CHECK(x.grad().scalar_type() == at::kFloat);
  CHECK_THROWS_WITH(shoestring::linear_group(x, {q.t()}), Catch::Contains("weight: expected shape"));
  CHECK_THROWS_WITH(shoestring::linear_group(x, {q}, {}, shoestring::LinearOptions().residual(x)),
                    Catch::Contains("residual: expected nullopt"));
}

TEST_CASE("nn::Linear has the parameters of torch::nn::Linear", "[linear]") {
  for (const bool bias : {true, false}) {
    at::manual_seed(3);
    nn::Linear ours(torch::nn::LinearOptions(24, 8).bias(bias));
    at::manual_seed(3);
    torch::nn::Linear theirs(torch::nn::LinearOptions(24, 8).bias(bias));
    REQUIRE(ours->named_parameters().keys() == theirs->named_parameters().keys());
    CHECK(at::equal(ours->weight, theirs->weight));
    std::stringstream file;
    torch::save(theirs, file);
    ours->weight.detach().zero_();
    torch::load(ours, file);
    const Tensor x = torch::randn({3, 24}), residual = torch::randn({3, 8});
    CHECK(at::allclose(ours(x), theirs(x), 1e-5, 1e-6));
    CHECK(at::allclose(ours->forward_with_residual(x, residual), theirs(x) + residual, 1e-5, 1e-6));
    const auto copy = std::dynamic_pointer_cast<nn::LinearImpl>(ours->clone());
    CHECK(at::equal(copy->forward(x), ours(x)));
    std::ostringstream text;
    ours->pretty_print(text);
    CHECK(text.str() == std::string("shoestring::nn::Linear(in_features=24, out_features=8, bias=") +
                            (bias ? "true)" : "false)"));
  }
}
