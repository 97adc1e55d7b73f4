#include <cmath>

#include <torch/optim/sgd.h>

#include <shoestring/ops.h>

#include "catch.h"

using at::Tensor;

TEST_CASE("lion moves every weight by lr", "[lion]") {
  at::manual_seed(7);
  const Tensor g = at::randn({700}), start = at::randn({700});
  const auto run = [&](shoestring::LionState state, double scale, const shoestring::LionStepOptions& options) {
    std::vector<Tensor> params{start.clone()};
    for (int step = 0; step < 2; ++step) shoestring::lion_(params, {g * scale}, state, options);
    CHECK(state.step.item<float>() == (options.found_inf() ? 0 : 2));
    return params[0];
  };
  const auto options = shoestring::LionStepOptions().lr(0.125).weight_decay(0.5);
  const auto coded = [] { return shoestring::LionState{at::zeros({1}), at::zeros({768}, at::kByte), at::zeros({3})}; };
  const Tensor exact = run({at::zeros({1}), at::zeros({768}), std::nullopt}, 1, options);
  const double keep = 1 - 0.125 * 0.5;
  CHECK(at::allclose(exact, start * keep * keep - (1 + keep) * 0.125 * g.sign(), 1e-5, 1e-6));
  // The signs of the moments are those of the gradients.
  CHECK(at::allclose(run(coded(), 1, options), exact, 1e-6, 1e-6));
  const auto number = [](double x) { return at::full({}, x, at::kFloat); };
  auto scaled = shoestring::LionStepOptions(options).lr(9).lr_tensor(number(0.125)).grad_scale(number(64));
  CHECK(at::allclose(run(coded(), 64, scaled), exact, 1e-6, 1e-6));
  CHECK(at::equal(run(coded(), 1, shoestring::LionStepOptions(options).found_inf(number(1))), start));
  CHECK_THROWS_WITH(run(coded(), 1, shoestring::LionStepOptions().beta1(1)),
                    Catch::Contains("lion_: beta1: expected a number in [0, 1), received 1"));
}

TEST_CASE("sgd is LibTorch's", "[sgd]") {
  for (bool nesterov : {false, true}) {
    CAPTURE(nesterov);
    at::manual_seed(8);
    Tensor reference = at::randn({1000}).requires_grad_();
    std::vector<Tensor> params{reference.detach().clone()}, coded{params[0].clone()};
    const double dampening = nesterov ? 0 : 0.25;
    torch::optim::SGD opt({reference}, torch::optim::SGDOptions(0.1).momentum(0.9).dampening(dampening)
                                           .weight_decay(0.05).nesterov(nesterov));
    const auto options = shoestring::SGDStepOptions().lr(0.1).momentum(0.9).dampening(dampening).weight_decay(0.05)
                             .nesterov(nesterov);
    shoestring::SGDState plain{at::zeros({1}), at::zeros({1024}), std::nullopt};
    shoestring::SGDState codes{at::zeros({1}), at::zeros({1024}, at::kByte), at::zeros({4})};
    for (int step = 0; step < 4; ++step) {
      const Tensor g = at::randn({1000});
      reference.mutable_grad() = g.clone();
      opt.step();
      shoestring::sgd_(params, {g}, plain, options);
      shoestring::sgd_(coded, {g}, codes, options);
    }
    CHECK(at::allclose(params[0], reference.detach(), 1e-5, 1e-6));
    CHECK((coded[0] - params[0]).norm().item<double>() < 0.02 * params[0].norm().item<double>());
    CHECK(!at::equal(coded[0], params[0]));
  }
  std::vector<Tensor> params{at::zeros({3})};
  shoestring::SGDState state{at::zeros({1}), at::zeros({256}), std::nullopt};
  CHECK_THROWS_WITH(shoestring::sgd_(params, {at::ones({3})}, state, shoestring::SGDStepOptions().momentum(0)),
                    Catch::Contains("sgd_: momentum: expected a number above 0, received 0"));
}
