// Tests the train and eval modes of ScheduleFreeAdamW.

#include <shoestring/optim.h>

#include "catch.h"
#include "folder.h"
#include "optim/optimizers.h"

using at::Tensor;
using Catch::Contains;
using namespace shoestring::optim;

namespace {

ScheduleFreeAdamWOptions options() {
  return ScheduleFreeAdamWOptions(0.05).betas({0.8, 0.95}).warmup_steps(3);
}

}  // namespace

TEST_CASE("eval makes weights the average, and train takes them back", "[optim]") {
  for (const std::string state : kStates) {
    for (auto dtype : {at::kFloat, at::kBFloat16}) {
      CAPTURE(state, dtype);
      const auto params = parameters(dtype);
      ScheduleFreeAdamW opt(params, options().state_format(state));
      opt.eval();  // eval() must work before the optimizer has any state
      opt.train();
      train(opt, params, 0, 5);
      const auto y = clones(params);
      opt.train();
      CHECK(equal(params, y));
      opt.eval();
      const auto x = clones(params);
      opt.eval();
      CHECK(equal(params, x));
      opt.train();
      const double eps = dtype == at::kFloat ? 1.2e-7 : 7.9e-3;
      for (size_t i = 0; i < params.size(); ++i) {
        const Tensor average = y[i].to(at::kFloat) - state_of(opt, params[i])["offset"].to(at::kFloat) * 0.25;
        CHECK(at::allclose(x[i].to(at::kFloat), average, eps / 2, 1e-9));
        // After eval() and train(), the weights may differ from y, the weights before eval(), by one unit in
        // the last place.
        CHECK(at::allclose(params[i].detach(), y[i], eps, eps / 8));
      }
      CHECK(!at::equal(x[2], y[2]));
    }
  }
}

TEST_CASE("a mode is saved with the weights that it is of", "[optim]") {
  const Folder folder;
  const std::string path = folder / "optimizer.safetensors";
  for (const std::string weights : kRoundings) {
    for (bool file : {false, true}) {
      CAPTURE(weights, file);
      const auto through = parameters(at::kBFloat16), resumed = parameters(at::kBFloat16);
      ScheduleFreeAdamW opt(through, options().weight_rounding(weights)), other(resumed);
      train(opt, through, 0, 3);
      opt.eval();
      copy(through, resumed);
      if (file) {
        save_optimizer(opt, path);
        load_optimizer(other, path);
      } else {
        load_archive(other, archived(opt));
      }
      CHECK_THROWS_WITH(other.step(),
                        Contains("ScheduleFreeAdamW: step: expected train mode, received eval mode"));
      for (auto* each : {&opt, &other}) each->train();
      train(opt, through, 3, 5);
      train(other, resumed, 3, 5);
      CHECK(equal(through, resumed));
    }
  }
}

TEST_CASE("no steps are taken in eval mode", "[optim]") {
  const auto params = parameters();
  ScheduleFreeAdamW opt(params, options());
  train(opt, params, 0, 2);
  opt.eval();
  const auto x = clones(params);
  const std::string message =
      "ScheduleFreeAdamW: step: expected train mode, received eval mode; call train() "
      "before "
      "backward";
  CHECK_THROWS_WITH(opt.step(), Contains(message));
  CHECK_THROWS_WITH(opt.scaled_step(at::ones({})), Contains(message));
  bool called = false;
  const auto closure = [&] {
    called = true;
    return Tensor();
  };
  CHECK_THROWS_WITH(opt.step(closure), Contains(message));
  CHECK(!called);
  for (const Tensor& p : params) p.mutable_grad() = Tensor();
  opt.set_step_in_backward(true);
  CHECK_THROWS_WITH((params[1] * params[1]).sum().backward(), Contains(message));
  CHECK(equal(params, x));
  opt.train();
  for (const Tensor& p : params) p.mutable_grad() = Tensor();
  (params[1] * params[1]).sum().backward();
  opt.step();
  CHECK(state_of(opt, params[1])["step"].item<float>() == 3);
  CHECK_THROWS_WITH(
      SAM(std::make_unique<ScheduleFreeAdamW>(params)),
      Contains("SAM: base: expected an optimizer without train() and eval(), received Schedule"));
}
