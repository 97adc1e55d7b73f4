#include "catch.h"

#include <cmath>
#include <limits>

#include <ATen/ATen.h>

#include <shoestring/files/safetensors.h>
#include <shoestring/optim.h>

#include "folder.h"

using namespace shoestring::optim;
using at::Tensor;
using Catch::Contains;

TEST_CASE("GradientNoise finds the critical batch size of a known covariance", "[gradient_noise]") {
  at::manual_seed(0);
  const auto deviations = at::linspace(0.5, 2.0, 600);
  const auto weight = at::full({600}, 0.3).requires_grad_();
  SGD optimizer({weight}, SGDOptions(0).state_format("fp32"));
  GradientNoise measured(optimizer);
  CHECK(std::isnan(measured.critical_batch()));
  for (int step = 0; step < 300; ++step) {
    for (int i = 0; i < 4; ++i) {
      const auto sums = i < 3 ? optimizer.accumulate() : nullptr;
      const auto x = at::randn({2, 600}) * deviations;
      ((weight - x).square().sum(1).mean() * 0.5 / 4).backward();
    }
    measured.update(2, 4);
    optimizer.step();
    optimizer.zero_grad();
  }
  const double noise = deviations.square().sum().item<double>(), square = 0.09 * 600;
  CHECK(measured.noise() == Approx(noise).epsilon(0.05));
  CHECK(measured.critical_batch() == Approx(noise / square).epsilon(0.1));
}

TEST_CASE("The state of GradientNoise continues a run", "[gradient_noise]") {
  const auto weight = at::ones({5}).requires_grad_();
  AdamW optimizer({weight});
  GradientNoise whole(optimizer, 0.9), first(optimizer, 0.9), second(optimizer, 0.5);
  const auto number = [](double x) { return at::scalar_tensor(x, at::kFloat); };
  for (int step = 0; step < 6; ++step) {
    whole.observe(number(10 + step), 2, number(7), 8);
    (step < 3 ? first : second).observe(number(10 + step), 2, number(7), 8);
    if (step != 2) continue;
    const Folder folder;
    shoestring::save_safetensors(folder / "noise", first.state());
    second.load_state(shoestring::load_safetensors(folder / "noise"));
  }
  CHECK(second.critical_batch() == whole.critical_batch());
  CHECK(at::equal(second.state()["averages"], whole.state()["averages"]));
}

TEST_CASE("GradientNoise and scale_lr refuse wrong arguments", "[gradient_noise]") {
  const auto weight = at::ones({5}).requires_grad_();
  AdamW optimizer({weight});
  CHECK_THROWS_WITH(GradientNoise(optimizer, 1),
                    Contains("GradientNoise: decay: expected a number in [0, 1)"));
  GradientNoise noise(optimizer);
  CHECK_THROWS_WITH(noise.update(4, 1), Contains("micro_batches: expected at least 2"));
  CHECK_THROWS_WITH(noise.update(0, 2), Contains("rows: expected a number of at least 1"));
  weight.sum().backward();
  CHECK_THROWS_WITH(noise.update(4, 2), Contains("micro-batches within accumulate(), received none"));
  CHECK(scale_lr(1e-3, 64, 256) == Approx(2e-3));
  CHECK(scale_lr(1e-3, 64, 1024, "linear", 128) == Approx(2e-3));
  CHECK_THROWS_WITH(scale_lr(1e-3, 64, 0), Contains("scale_lr: batch: expected a finite number above 0"));
  CHECK_THROWS_WITH(scale_lr(1e-3, 64, 2, "cube"), Contains("rule: expected sqrt or linear, received cube"));
}
