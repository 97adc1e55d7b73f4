// Tests how optimizers treat gradients before a step: sums over micro-batches, steps within the backward
// pass, and gradient clipping combined with one of these.

#include "catch.h"

#include <optional>
#include <utility>

#include <torch/csrc/autograd/autograd.h>

#include "optim/optimizers.h"

using at::Tensor;
using Catch::Contains;
using namespace shoestring::optim;

namespace {

// Returns a random gradient of parameter `p`; it depends only on the step, the micro-batch and the size of p.
Tensor gradient(const Tensor& p, int step, int micro) {
  at::manual_seed(1000 * step + micro + p.numel());
  return at::randn(p.sizes()).to(p.scalar_type());
}

void backward(const std::vector<Tensor>& params, int step, int micro) {
  Tensor loss = at::zeros({});
  for (const Tensor& p : params) loss = loss + (p * gradient(p, step, micro)).sum();
  torch::autograd::backward({loss}, {});
}

AdamWOptions options(at::ScalarType dtype) {
  return AdamWOptions(1e-2)
      .weight_rounding(dtype == at::kBFloat16 ? "stochastic" : "nearest")
      .seed(7)
      .min_quantize_size(10);
}

constexpr int kSteps = 4;

}  // namespace

TEST_CASE("micro-batches add up within the step", "[optim]") {
  for (bool clip : {false, true}) {
    for (bool in_backward : {false, true}) {
      // steps within the backward pass clip by the norm of the previous step's gradients, so the results
      // differ
      if (clip && in_backward) continue;
      CAPTURE(clip, in_backward);
      const auto summed = parameters(), whole = parameters();
      AdamW opt(two_groups(summed), options(at::kFloat)), other(two_groups(whole), options(at::kFloat));
      opt.set_step_in_backward(in_backward);
      if (clip) opt.set_max_grad_norm(0.5);
      if (clip) other.set_max_grad_norm(0.5);
      for (int step = 0; step < kSteps; ++step) {
        {
          const auto micro = opt.accumulate();
          for (int i : {0, 1}) backward(summed, step, i);
          for (const Tensor& p : summed) CHECK(!p.grad().defined());
        }
        backward(summed, step, 2);
        opt.step();
        opt.zero_grad();
        for (const Tensor& p : whole) {
          const Tensor sum = gradient(p, step, 0) + gradient(p, step, 1);
          p.mutable_grad() = clip ? sum + gradient(p, step, 2) : gradient(p, step, 2) + sum;
        }
        other.step();
      }
      CHECK(equal(summed, whole));
      if (clip) CHECK(at::equal(opt.grad_norm(), other.grad_norm()));
    }
  }
}

TEST_CASE("sums are kept in the dtype that was asked for", "[optim]") {
  for (auto dtype : {at::kFloat, at::kBFloat16}) {
    const Tensor p = at::zeros({1}, at::kBFloat16).requires_grad_();
    SGD opt({p}, SGDOptions(1).state_format("fp32").momentum(1e-6).weight_rounding("remainder"));
    opt.set_accumulate_dtype(dtype);
    {
      const auto micro = opt.accumulate();
      for (double g : {1.0, 1.0 / 512}) {
        const Tensor loss = (p * g).sum();
        torch::autograd::backward({loss}, {});
      }
    }
    opt.step();  // there is no new gradient, so this step uses the accumulated sum of the micro-batches
    CHECK(state_of(opt, p)["momentum_buffer"].item<double>() == (dtype == at::kFloat ? 1 + 1.0 / 512 : 1));
    const Tensor before = p.detach().clone();
    opt.step();  // the previous step has used up the accumulated sum, so nothing changes
    CHECK(at::equal(p, before));
  }
  const auto params = parameters();
  AdamW opt(params);
  CHECK_THROWS_WITH(opt.set_accumulate_dtype(at::kHalf),
                    Contains("AdamW: accumulate_dtype: expected at::kFloat or at::kBFloat16, received Half"));
}

TEST_CASE("steps within backward are the same steps", "[optim]") {
  for (auto dtype : {at::kFloat, at::kBFloat16}) {
    CAPTURE(dtype);
    const auto early = parameters(dtype), late = parameters(dtype);
    AdamW opt(two_groups(early), options(dtype)), other(two_groups(late), options(dtype));
    opt.set_step_in_backward(true);
    for (int step = 0; step < kSteps; ++step) {
      backward(early, step, 0);
      for (const Tensor& p : early) CHECK(!p.grad().defined());
      opt.step();
      other.zero_grad();
      backward(late, step, 0);
      other.step();
      CHECK(equal(early, late));
    }
    opt.add_param_group({std::vector<Tensor>{at::zeros({3}, dtype).requires_grad_()}});
    const Tensor& added = opt.param_groups()[2].params()[0];
    backward({added}, 0, 0);
    CHECK(added.count_nonzero().item<int64_t>() == 3);
    opt.set_step_in_backward(false);
    backward({added}, 0, 0);
    CHECK(added.grad().defined());
  }
}

TEST_CASE("steps within backward refuse a second backward without a step", "[optim]") {
  const auto params = parameters();
  AdamW opt(two_groups(params), options(at::kFloat));
  opt.set_step_in_backward(true);
  backward(params, 0, 0);
  const Tensor stepped = params[0].detach().clone();
  CHECK_THROWS_WITH(backward(params, 0, 1),
                    Contains("step_in_backward: expected step() after each backward"));
  CHECK(at::equal(params[0], stepped));
  for (const Tensor& p : params) p.mutable_grad() = Tensor();
  opt.step();
  backward(params, 1, 0);
  opt.step();
  CHECK(state_of(opt, params[0])["step"].item<float>() == 2);
}

TEST_CASE("within backward, gradients are clipped to the norm of the step before, also after a load",
          "[optim]") {
  const auto early = parameters(), late = parameters(), resumed = parameters();
  AdamW opt(two_groups(early), options(at::kFloat)), other(two_groups(late), options(at::kFloat));
  std::optional<AdamW> continued;
  opt.set_step_in_backward(true);
  opt.set_max_grad_norm(0.5);
  Tensor norm;
  for (int step = 0; step < kSteps; ++step) {
    if (step == 2) {
      copy(early, resumed);
      continued.emplace(two_groups(resumed));
      continued->set_step_in_backward(true);
      continued->set_max_grad_norm(0.5);
      load_archive(*continued, archived(opt));
    }
    const bool sums = step % 2 == 1;
    for (AdamW* each : {&opt, continued ? &*continued : nullptr}) {
      if (each == nullptr) continue;
      const auto& params = each == &opt ? early : resumed;
      if (sums) {
        const auto micro = each->accumulate();
        backward(params, step, 1);
      }
      backward(params, step, 0);
      each->step();
    }
    double squares = 0;
    for (const Tensor& p : late) {
      const Tensor g = sums ? gradient(p, step, 1) + gradient(p, step, 0) : gradient(p, step, 0);
      squares += g.square().sum().item<double>();
      p.mutable_grad() = norm.defined() ? g * ((norm + 1e-6).reciprocal() * 0.5).clamp_max(1) : g;
    }
    other.step();
    norm = opt.grad_norm().clone();
    CHECK(norm.item<double>() == Approx(std::sqrt(squares)).epsilon(1e-5));
    for (size_t i = 0; i < early.size(); ++i) CHECK(at::allclose(early[i], late[i], 1e-5, 1e-6));
    if (continued) CHECK(equal(early, resumed));
  }
}

TEST_CASE("an optimizer may move, and be gone before its parameters", "[optim]") {
  const auto params = parameters(), plain = parameters();
  {
    AdamW other(plain);
    std::vector<AdamW> all;
    all.emplace_back(params);
    all[0].set_step_in_backward(true);
    backward(params, 0, 0);
    AdamW moved = std::move(all[0]);
    all.clear();
    moved.step();
    backward(params, 1, 0);
    moved.step();
    for (int step : {0, 1}) {
      other.zero_grad();
      backward(plain, step, 0);
      other.step();
    }
    CHECK(equal(params, plain));
    AdamW second(params);  // a second optimizer, which registers its hooks on the same parameters
    const auto micro = second.accumulate();
    moved.set_step_in_backward(false);
    backward(params, 2, 0);
    CHECK(!params[1].grad().defined());
  }
  backward(params, 3, 0);
  CHECK(at::equal(params[1].grad(), gradient(params[1], 3, 0)));
}
