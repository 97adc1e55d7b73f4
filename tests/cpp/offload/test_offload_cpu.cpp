// Tests optimizers that step on the CPU while the parameters are on a device. Gradients are copied to host
// memory, and new weights are copied back while backward runs.

#include "catch.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/custom_function.h>

#include "emulated.h"
#include "offload/disturbed.h"
#include "optim/optimizers.h"

using at::Tensor;
using Catch::Contains;
using namespace shoestring::optim;

namespace {

// Returns five parameters: three are larger than a bucket of 8 MiB, and two are small. The emulated
// suite leaves out the tests with these parameters, because they would take minutes there. Tests with small
// parameters run the same kernels.
std::vector<Tensor> large(int64_t seed = 3) {
  at::manual_seed(static_cast<uint64_t>(seed));
  std::vector<Tensor> params;
  for (const int64_t rows : {2100, 3, 2200, 7, 2300})
    params.push_back(at::randn({rows, 1024}).set_requires_grad(true));
  return params;
}

Tensor loss_of(const std::vector<Tensor>& params, double scale) {
  Tensor loss = at::zeros({});
  for (const Tensor& p : params) loss = loss + (p * p).sum() * scale;
  return loss;
}

// An identity function whose backward waits until `ready` returns true; `came` records whether `ready`
// returned true in time.
struct WaitFor : torch::autograd::Function<WaitFor> {
  static inline std::function<bool()> ready;
  static inline bool came = false;

  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list grads) {
    for (int i = 0; i < 5000 && !(came = ready()); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return grads;
  }
};

}  // namespace

TEST_CASE("buckets are stepped before backward has ended", "[offload]") {
  if (is_emulated()) return;
  const auto params = large();
  SGD opt(params, SGDOptions(0.1).state_format("fp32"));
  opt.set_offload("cpu");
  opt.set_step_in_backward(true);
  const auto before = params[4].detach().clone();
  // Backward computes the gradients of params[0] to params[3] only after the optimizer has changed params[4].
  WaitFor::ready = [&] { return !at::equal(params[4].detach(), before); };
  WaitFor::came = false;
  const Tensor others = WaitFor::apply(loss_of({params[0], params[1], params[2], params[3]}, 1));
  (others + loss_of({params[4]}, 1)).backward();
  CHECK(WaitFor::came);
  for (const Tensor& p : params) CHECK(!p.grad().defined());
  opt.step();
}

TEST_CASE("changes of parameters between steps are seen", "[offload]") {
  if (is_emulated()) return;
  const auto device = large(), offloaded = large();
  AdamW one(device), other(offloaded);
  other.set_offload("cpu");
  for (int step = 0; step < 3; ++step) {
    for (const auto& [opt, params] :
         {std::pair<AdamW*, std::vector<Tensor>>{&one, device}, {&other, offloaded}}) {
      loss_of(params, 0.5).backward();
      opt->step();
      opt->zero_grad();
      at::NoGradGuard no_grad;
      params[0].mul_(0.5);
      params[1].set_data(params[1].detach().clone().neg_());
    }
    CHECK(equal(device, offloaded));
  }
}

TEST_CASE("within backward, clipping is that of all gradients", "[offload]") {
  if (is_emulated()) return;
  const Disturbed slow({.max_delay_us = 300});
  const auto device = large(), offloaded = large();
  AdamW one(device, AdamWOptions(1e-2).state_format("fp32")),
      other(offloaded, AdamWOptions(1e-2).state_format("fp32"));
  other.set_offload("cpu");
  other.set_step_in_backward(true);
  for (auto* opt : {&one, &other}) opt->set_max_grad_norm(1);
  for (int step = 0; step < 4; ++step) {
    for (const auto& [opt, params] :
         {std::pair<AdamW*, std::vector<Tensor>>{&one, device}, {&other, offloaded}}) {
      for (int micro = 0; micro < 3; ++micro) {
        const auto sums = micro < 2 ? opt->accumulate() : nullptr;
        // params[0] has no gradient in the last micro-batch. params[1] has no gradient at all in odd steps.
        std::vector<Tensor> used(params.begin() + 2, params.end());
        if (micro < 2) used.push_back(params[0]);
        if (step % 2 == 0) used.push_back(params[1]);
        loss_of(used, 1 + micro).backward();
      }
      opt->step();
      opt->zero_grad();
    }
    CHECK(equal(device, offloaded));
    CHECK(at::equal(one.grad_norm(), other.grad_norm()));
    CHECK(one.grad_norm().item<float>() > 1);
  }
}

TEST_CASE("a second backward without a step is refused", "[offload]") {
  if (is_emulated()) return;
  const auto params = large();
  for (const bool clip : {false, true}) {
    CAPTURE(clip);
    AdamW opt(params);
    opt.set_offload("cpu");
    opt.set_step_in_backward(true);
    if (clip) opt.set_max_grad_norm(1);
    loss_of(params, 1).backward();
    const char* message = "AdamW: step_in_backward: expected step() after each backward";
    CHECK_THROWS_WITH((params[0] * at::ones({1024})).sum().backward(), Contains(message));
    params[0].mutable_grad() = Tensor();
    opt.step();
    loss_of(params, 1).backward();
    opt.step();
    CHECK(state_of(opt, params[0])["step"].item<float>() == 2);
    for (const Tensor& p : params) torch::autograd::impl::set_post_acc_grad_hooks(p, nullptr);
  }
}

TEST_CASE("threads that step one optimizer wait for each other", "[offload]") {
  at::manual_seed(3);
  std::vector<Tensor> params;
  for (int i = 0; i < 6; ++i) params.push_back(at::randn({64, 64}).set_requires_grad(true));
  AdamW optimizer(params, AdamWOptions(1e-3));
  optimizer.set_offload("cpu");
  for (Tensor& p : params) p.mutable_grad() = at::ones_like(p);
  const auto steps = [&] {
    for (int i = 0; i < 50; ++i) optimizer.step();
  };
  std::thread one(steps), two(steps);
  one.join(), two.join();
  for (const Tensor& p : params) {
    CHECK(p.isfinite().all().item<bool>());
    const auto& state = static_cast<ParamState&>(*optimizer.state().at(p.unsafeGetTensorImpl()));
    CHECK(state["step"].item<float>() == 100);
  }
}
