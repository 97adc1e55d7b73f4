#include "catch.h"

#include <cmath>

#include <torch/csrc/autograd/generated/variable_factories.h>

#include <shoestring/losses/diffusion.h>

using at::Tensor;
using shoestring::diffusion::min_snr_weights;
using shoestring::diffusion::MinSnrOptions;

TEST_CASE("min_snr_weights are those of the definition", "[min_snr]") {
  const Tensor alphas = torch::tensor({0.999, 0.9, 0.5, 0.1, 1e-4}, at::kDouble), steps = torch::arange(5);
  const Tensor snr = alphas / (1 - alphas), least = snr.clamp_max(3);
  const auto of = [&](const char* name) {
    return min_snr_weights(alphas, steps, MinSnrOptions(name).gamma(3)).to(at::kDouble);
  };
  CHECK(at::allclose(of("epsilon"), least / snr, 1.2e-7, 0));
  CHECK(at::allclose(of("x0"), least, 1.2e-7, 0));
  CHECK(at::allclose(of("v"), least / (snr + 1), 1.2e-7, 0));
}

TEST_CASE("min_snr_weights are finite at the ends of the schedule", "[min_snr]") {
  const Tensor ends = torch::tensor({0.0, 1.0}, at::kDouble), steps = torch::arange(2);
  CHECK(at::equal(min_snr_weights(ends, steps), torch::tensor({1.f, 0.f})));
  CHECK(at::equal(min_snr_weights(ends, steps, MinSnrOptions("x0")), torch::tensor({0.f, 5.f})));
  CHECK(at::equal(min_snr_weights(ends, steps, MinSnrOptions("v")), torch::tensor({0.f, 0.f})));
}

TEST_CASE("min_snr_weights refuses what it cannot weigh", "[min_snr]") {
  const Tensor alphas = torch::tensor({0.9, 0.5}), steps = torch::arange(2);
  CHECK_THROWS_AS(min_snr_weights(alphas, steps, MinSnrOptions("noise")), c10::ValueError);
  CHECK_THROWS_AS(min_snr_weights(alphas, steps, MinSnrOptions().gamma(NAN)), c10::ValueError);
  CHECK_THROWS_AS(min_snr_weights(alphas + 1, steps), c10::ValueError);
  CHECK_THROWS_AS(min_snr_weights(alphas, steps.to(at::kDouble)), c10::ValueError);
}
