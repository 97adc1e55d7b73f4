#include "catch.h"

#include <sstream>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/generated/variable_factories.h>
#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>

#include <shoestring/adapters/adaptable_linear.h>
#include <shoestring/core/amp.h>
#include <shoestring/gemm/linear.h>
#include <shoestring/gemm/ops.h>

#include "capabilities.h"
#include "gemm/choice.h"

using at::Tensor;
namespace nn = shoestring::nn;

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

TEST_CASE("the kind of CPU, or a measurement, chooses the products of dense layers", "[linear]") {
  using shoestring::cpu::Capability;
  const auto chosen = [](Capability capability, bool amd, at::ScalarType compute, double ratio,
                         int64_t size = 512) {
    bool measured = false;
    const bool own =
        shoestring::gemm::chooses_own(capability, amd, {compute, at::kFloat, size, {size, size}}, [&] {
          measured = true;
          return ratio;
        });
    return std::pair(own, measured);
  };
  using Found = std::pair<bool, bool>;
  CHECK(chosen(Capability::kAmx, false, at::kBFloat16, 2.0) == Found(true, false));
  CHECK(chosen(Capability::kAmx, false, at::kFloat, 0.5) == Found(false, false));
  for (const auto capability : {Capability::kAvx512, Capability::kAvx2}) {
    CHECK(chosen(capability, false, at::kFloat, 0.9) == Found(false, true));
    CHECK(chosen(capability, false, at::kFloat, 0.7) == Found(true, true));
    CHECK(chosen(capability, false, at::kBFloat16, 0.7) == Found(true, true));
    CHECK(chosen(capability, true, at::kFloat, 0.9) == Found(true, false));
    CHECK(chosen(capability, true, at::kBFloat16, 0.9) == Found(false, true));
    CHECK(chosen(capability, true, at::kFloat, 1.1) == Found(true, false));
    CHECK(chosen(capability, true, at::kHalf, 0.1) == Found(false, false));
    CHECK(chosen(capability, true, at::kFloat, 0.1, 64) == Found(false, false));
  }
  CHECK(chosen(Capability::kPlain, true, at::kFloat, 0.1) == Found(false, false));
}

TEST_CASE("dense layers use the products that the rule chooses", "[linear]") {
  at::manual_seed(3);
  const Tensor x = torch::randn({64, 48});
  nn::AdaptableLinear q(nn::AdaptableLinearOptions(48, 32)),
      k(nn::AdaptableLinearOptions(48, 16).bias(false));
  const Tensor expected = x.mm(k->weight.t());
  for_each_capability([&](const char* capability) {
    CAPTURE(capability);
    const bool own = std::string(capability) == "amx";
    const shoestring::AutocastGuard autocast(at::kCPU, at::kBFloat16);
    const Tensor ours = shoestring::linear(x, q->weight, q->bias), theirs = at::linear(x, q->weight, q->bias);
    CHECK(at::equal(q(x), own ? ours : theirs));
    CHECK(at::equal(shoestring::dense_linear(x, q->weight, q->bias), own ? ours : theirs));
    const auto both = shoestring::nn::forward_together(x, {q, k});
    CHECK(at::equal(both[0], own ? ours : theirs));
    CHECK(at::allclose(both[1].to(at::kFloat), expected, 2e-2, 2e-2));
    // few tokens, and a frozen weight
    CHECK(at::equal(q(x.slice(0, 0, 8)), at::linear(x.slice(0, 0, 8), q->weight, q->bias)));
    const Tensor frozen = q->weight.detach();
    CHECK(at::equal(shoestring::dense_linear(x, frozen),
                    own ? shoestring::linear(x, frozen) : at::linear(x, frozen)));
  });
}
