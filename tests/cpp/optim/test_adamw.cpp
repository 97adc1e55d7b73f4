#include "catch.h"

#include <algorithm>
#include <cmath>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <shoestring/ops.h>
#include <shoestring/optim.h>

#include "capabilities.h"
#include "optim/optimizers.h"

using at::Tensor;
using shoestring::optim::AdamW;
using shoestring::optim::AdamWOptions;

TEST_CASE("8-bit codes decode to their values and back", "[adamw]") {
  for_each_capability([&](const char* capability) {
    CAPTURE(capability);
    Tensor codes = at::arange(256).to(at::kByte);
    for (bool is_signed : {true, false}) {
      Tensor values = shoestring::dequantize_8bit(codes, at::full({1}, 3.5f), is_signed);
      CHECK(std::abs(values[255].item<float>() - 3.5f) < 1e-6f);
      CHECK(values[is_signed ? 127 : 0].item<float>() == 0);
      CHECK((values.slice(0, 1) > values.slice(0, 0, 255)).all().item<bool>());
      auto [again, scale] = shoestring::quantize_8bit(values, is_signed);
      CHECK(at::equal(again, codes));
      CHECK(at::equal(scale, values.slice(0, 255)));
    }
  });
}

TEST_CASE("adamw with fp32 state agrees with fp64", "[adamw]") {
  auto params = parameters();
  std::vector<Tensor> exact, m, v;
  for (const Tensor& p : params) {
    exact.push_back(p.detach().to(at::kDouble));
    m.push_back(at::zeros_like(exact.back()));
    v.push_back(at::zeros_like(exact.back()));
  }
  AdamW opt(params, AdamWOptions(1e-2).state_format("fp32").weight_decay(0.1).betas({0.8, 0.95}));
  for (int step = 1; step <= 4; ++step) {
    train(opt, params, step, step + 1);
    for (size_t i = 0; i < params.size(); ++i) {
      Tensor g = params[i].grad().to(at::kDouble);
      m[i] = 0.8 * m[i] + 0.2 * g;
      v[i] = 0.95 * v[i] + 0.05 * g * g;
      Tensor update = m[i] / (1 - std::pow(0.8, step)) / ((v[i] / (1 - std::pow(0.95, step))).sqrt() + 1e-8);
      exact[i] = exact[i] * (1 - 1e-2 * 0.1) - 1e-2 * update;
    }
  }
  for (size_t i = 0; i < params.size(); ++i) {
    CHECK((params[i].detach() - exact[i]).abs().sum().item<double>() <= 1e-6 * params[i].numel());
  }
  CHECK(state_of(opt, params[1])["step"].item<float>() == 4);
}

TEST_CASE("adamw with 8-bit state follows fp32 state", "[adamw]") {
  auto params = parameters(), exact = parameters(), start = parameters();
  AdamW opt(params), other(exact, AdamWOptions().state_format("fp32"));
  train(opt, params, 0, 20);
  train(other, exact, 0, 20);
  for (int i : {1, 2}) {
    const double moved = (exact[i] - start[i]).norm().item<double>();
    CHECK((params[i] - exact[i]).norm().item<double>() < 0.03 * moved);
  }
  const auto& state = state_of(opt, params[2]);
  CHECK(state["exp_avg"].scalar_type() == at::kByte);
  CHECK(state["exp_avg_scale"].numel() == (5000 + 255) / 256);
  // The moments' codes of all parameters in a group share one allocation.
  CHECK(state["exp_avg"].storage().nbytes() == 256 * (1 + 2 + 20));
}

TEST_CASE("adamw clips to the norm of all groups' gradients and leaves them alone", "[adamw]") {
  auto clipped = parameters(), plain = parameters();
  const auto groups = [](const std::vector<Tensor>& p) {
    return std::vector<torch::optim::OptimizerParamGroup>{{{p[0], p[1]}}, {{p[2], p[3]}}};
  };
  AdamW opt(groups(clipped)), other(groups(plain));
  opt.set_max_grad_norm(0.5);
  // gradients of 1.0 have a norm above max_grad_norm and are clipped; gradients of 1e-4 are not
  for (double size : {1.0, 1e-4}) {
    for (int i : {0, 1, 3}) {  // params[2] has no gradient in this test
      clipped[i].mutable_grad() = at::full_like(clipped[i], size);
      plain[i].mutable_grad() = clipped[i].grad() * std::min(1.0, 0.5 / (size * std::sqrt(301.0) + 1e-6));
    }
    opt.step();
    other.step();
    for (int i : {0, 1, 2, 3}) CHECK(at::allclose(clipped[i], plain[i], 1e-6, 1e-7));
    CHECK(std::abs(opt.grad_norm().item<double>() - size * std::sqrt(301.0)) < 1e-6 * std::sqrt(301.0));
    CHECK(clipped[1].grad()[0].item<float>() == static_cast<float>(size));
  }
  opt.set_max_grad_norm(std::nullopt);
  opt.step();
  CHECK(!opt.grad_norm().defined());
  CHECK_THROWS_WITH(opt.set_max_grad_norm(0), Catch::Contains("max_grad_norm: expected a number above 0"));
}

TEST_CASE("adamw: groups, closures, schedules and parameters without a gradient", "[adamw]") {
  auto params = parameters();
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<Tensor>{params[0], params[1]});
  groups.emplace_back(std::vector<Tensor>{params[2], params[3]},
                      std::make_unique<AdamWOptions>(AdamWOptions(0).weight_decay(0).state_format("fp32")));
  AdamW opt(groups, AdamWOptions(1e-2));
  const Tensor still = params[2].detach().clone(), first = params[0].detach().clone();
  Tensor loss = opt.step([&] {
    opt.zero_grad();
    Tensor sum = params[1].square().sum() + params[2].square().sum();
    torch::autograd::backward({sum}, {});
    return sum;
  });
  CHECK(loss.item<float>() > 0);
  CHECK(at::equal(params[2], still));  // params[2] does not change, because its group has lr = 0
  CHECK(at::equal(params[0], first));
  CHECK(opt.state().count(params[0].unsafeGetTensorImpl()) == 0);

  const Tensor codes = state_of(opt, params[1])["exp_avg"].clone();
  params[0].mutable_grad() = at::ones({1});
  params[1].mutable_grad() = Tensor();
  opt.param_groups()[0].options().set_lr(0.5);
  // params[0] gets its first gradient. The state of its group moves to a larger allocation, which must keep
  // the state of params[1].
  opt.step();
  CHECK(at::equal(state_of(opt, params[1])["exp_avg"], codes));
  CHECK(state_of(opt, params[1])["step"].item<float>() == 1);
  CHECK(std::abs((params[0] - (first * (1 - 0.5 * 0.01) - 0.5)).item<float>()) < 1e-5);
}

TEST_CASE("adamw refuses what does not fit, and changes nothing", "[adamw]") {
  using Catch::Contains;
  auto params = parameters();
  CHECK_THROWS_WITH(AdamW(params, AdamWOptions(-1)),
                    Contains("lr: expected a number of at least 0, received -1"));
  CHECK_THROWS_WITH(AdamW(params, AdamWOptions().betas({0.9, 1})),
                    Contains("betas: expected two numbers in [0, 1)"));
  CHECK_THROWS_WITH(
      AdamW(params, AdamWOptions().state_format("2bit")),
      Contains("state_format: expected \"8bit\" or \"4bit\" or \"bf16\" or \"fp32\", received \"2bit\""));
  CHECK_THROWS_WITH(
      AdamW(params, AdamWOptions().weight_rounding("exact")),
      Contains(
          "weight_rounding: expected \"nearest\" or \"stochastic\" or \"remainder\", received \"exact\""));
  CHECK_THROWS_WITH(AdamW(params, AdamWOptions().min_quantize_size(-1)),
                    Contains("AdamW: min_quantize_size: expected a whole number of at least 0, received -1"));
  CHECK_THROWS_WITH(AdamW({params[0], params[1], params[0]}),
                    Contains("AdamW: params[2]: expected each parameter once, received a duplicate"));
  CHECK_THROWS_WITH(AdamW(parameters(at::kHalf), AdamWOptions().weight_rounding("remainder")),
                    Contains("AdamW: params[0]: expected bf16 (or fp32, on which the option has no effect) "
                             "with weight_rounding="));

  Tensor wide = at::zeros({3}, at::kDouble).requires_grad_();
  CHECK_THROWS_WITH(AdamW({params[0], wide}),
                    Contains("AdamW: params[1]: expected fp32, bf16 or fp16, received Double"));

  AdamW opt({params[0], params[1]});
  params[0].mutable_grad() = at::ones({1});
  params[1].mutable_grad() = at::sparse_coo_tensor({300}, at::kFloat);
  const Tensor before = params[0].detach().clone();
  CHECK_THROWS_WITH(opt.step(), Contains("adamw_: grads[1]: expected a dense tensor, received Sparse"));
  CHECK(at::equal(params[0], before));
}
