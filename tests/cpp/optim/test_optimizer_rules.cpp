// Tests the operators of the optimizers as a C++ program calls them through PyTorch's dispatcher.

#include <cmath>

#include <ATen/ATen.h>
#include <torch/optim/sgd.h>

#include "catch.h"
#include "operators.h"

using at::Tensor;

namespace {}  // namespace

TEST_CASE("adamw_ takes numbers that a device holds", "[adamw]") {
  const NamedArguments plain{
      {"lr", 0.125}, {"beta1", 0.9}, {"beta2", 0.999}, {"eps", 1e-8}, {"weight_decay", 1e-2}};
  const auto run = [&](double scale, const NamedArguments& options) {
    at::manual_seed(7);
    const std::vector<Tensor> params{at::randn({700}), at::randn({3})};
    const NamedArguments state{{"params", params},
                               {"step", at::zeros({2})},
                               {"exp_avg", at::zeros({4 * 256}, at::kByte)},
                               {"exp_avg_scale", at::zeros({4})},
                               {"exp_avg_sq", at::zeros({4 * 256}, at::kByte)},
                               {"exp_avg_sq_scale", at::zeros({4})}};
    for (int step = 0; step < 2; ++step) {
      const auto grads = gradients({at::randn({700}) * scale, at::randn({3}) * scale});
      call("adamw_", with(with(options, plain), with({{"grads", grads}}, state)));
    }
    std::vector<Tensor> result = params;
    for (size_t i = 1; i < state.size(); ++i) result.push_back(state[i].second.toTensor());
    return result;
  };
  const auto expected = run(1, {});
  const auto same = [&](const std::vector<Tensor>& other) {
    for (size_t i = 0; i < expected.size(); ++i) CHECK(at::equal(other[i], expected[i]));
  };
  same(run(1, {{"lr", 9.0}, {"lr_tensor", number(0.125)}}));
  same(run(1024, {{"grad_scale", number(1024)}}));
  same(run(4, {{"clip_coef", number(0.25)}, {"found_inf", number(0)}}));
  const auto skipped = run(1, {{"found_inf", number(1)}});
  at::manual_seed(7);
  CHECK(at::equal(skipped[0], at::randn({700})));
  CHECK(skipped[2].count_nonzero().item<int64_t>() == 0);
  CHECK_THROWS_WITH(
      run(1, {{"clip_coef", at::zeros({2})}}),
      Catch::Contains("adamw_: clip_coef: expected one fp32 number on the parameters' device, cpu"));
}

TEST_CASE("lion_ moves every weight by lr", "[lion]") {
  at::manual_seed(7);
  const Tensor g = at::randn({700}), start = at::randn({700});
  const NamedArguments plain{{"lr", 0.125}, {"beta1", 0.9}, {"beta2", 0.99}, {"weight_decay", 0.5}};
  const auto run = [&](bool coded, double scale, const NamedArguments& options) {
    const std::vector<Tensor> params{start.clone()};
    NamedArguments state{{"params", params},
                         {"grads", gradients({g * scale})},
                         {"step", at::zeros({1})},
                         {"exp_avg", at::zeros({768}, coded ? at::kByte : at::kFloat)}};
    if (coded) state.push_back({"exp_avg_scale", at::zeros({3})});
    for (int step = 0; step < 2; ++step) call("lion_", with(with(options, plain), state));
    return params[0];
  };
  const Tensor exact = run(false, 1, {});
  const double keep = 1 - 0.125 * 0.5;
  CHECK(at::allclose(exact, start * keep * keep - (1 + keep) * 0.125 * g.sign(), 1e-5, 1e-6));
  // All steps have the same gradients. So the quantised moments, too, have the signs of the gradients, and
  // Lion's updates are exact.
  CHECK(at::allclose(run(true, 1, {}), exact, 1e-6, 1e-6));
  const NamedArguments scaled{{"lr", 9.0}, {"lr_tensor", number(0.125)}, {"grad_scale", number(64)}};
  CHECK(at::allclose(run(true, 64, scaled), exact, 1e-6, 1e-6));
  CHECK(at::equal(run(true, 1, {{"found_inf", number(1)}}), start));
  CHECK_THROWS_WITH(run(true, 1, {{"beta1", 1.0}}),
                    Catch::Contains("lion_: beta1: expected a number in [0, 1), received 1"));
}

TEST_CASE("sgd_ is LibTorch's", "[sgd]") {
  for (bool nesterov : {false, true}) {
    CAPTURE(nesterov);
    at::manual_seed(8);
    Tensor reference = at::randn({1000}).requires_grad_();
    const std::vector<Tensor> params{reference.detach().clone()}, coded{params[0].clone()};
    const double dampening = nesterov ? 0 : 0.25;
    torch::optim::SGD opt(
        {reference},
        torch::optim::SGDOptions(0.1).momentum(0.9).dampening(dampening).weight_decay(0.05).nesterov(
            nesterov));
    const NamedArguments options{{"lr", 0.1},
                                 {"momentum", 0.9},
                                 {"dampening", dampening},
                                 {"weight_decay", 0.05},
                                 {"nesterov", nesterov}};
    const NamedArguments plain{
        {"params", params}, {"step", at::zeros({1})}, {"momentum_buffer", at::zeros({1024})}};
    const NamedArguments codes{{"params", coded},
                               {"step", at::zeros({1})},
                               {"momentum_buffer", at::zeros({1024}, at::kByte)},
                               {"momentum_buffer_scale", at::zeros({4})}};
    for (int step = 0; step < 4; ++step) {
      const Tensor g = at::randn({1000});
      reference.mutable_grad() = g.clone();
      opt.step();
      call("sgd_", with({{"grads", gradients({g})}}, with(options, plain)));
      call("sgd_", with({{"grads", gradients({g})}}, with(options, codes)));
    }
    CHECK(at::allclose(params[0], reference.detach(), 1e-5, 1e-6));
    CHECK((coded[0] - params[0]).norm().item<double>() < 0.02 * params[0].norm().item<double>());
    CHECK(!at::equal(coded[0], params[0]));
  }
  CHECK_THROWS_WITH(call("sgd_", {{"params", std::vector<Tensor>{at::zeros({3})}},
                                  {"grads", gradients({at::ones({3})})},
                                  {"step", at::zeros({1})},
                                  {"momentum_buffer", at::zeros({256})},
                                  {"lr", 0.1},
                                  {"momentum", 0.0},
                                  {"dampening", 0.0},
                                  {"weight_decay", 0.0}}),
                    Catch::Contains("sgd_: momentum: expected a number above 0 (without momentum use "
                                    "torch::optim::SGD), received 0"));
}
