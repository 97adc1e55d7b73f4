#include "catch.h"

#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <shoestring/files/safetensors.h>
#include <shoestring/optim.h>

#include "folder.h"

using namespace shoestring::optim;
using at::Tensor;
using Catch::Contains;

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

torch::nn::Sequential guarded_model() {
  at::manual_seed(3);
  return torch::nn::Sequential(torch::nn::Linear(16, 40), torch::nn::BatchNorm1d(40),
                               torch::nn::Linear(40, 5));
}

Tensor guarded_batch(int64_t step) {
  at::manual_seed(static_cast<uint64_t>(step));
  return at::randn({8, 16});
}

/// Computes gradients, and puts `bad` into one of them unless it is 0.
Tensor backward(torch::nn::Sequential& model, torch::optim::Optimizer& optimizer, int64_t step,
                double bad = 0) {
  optimizer.zero_grad();
  Tensor loss = model->forward(guarded_batch(step)).square().mean();
  loss.backward();
  if (bad != 0) model->parameters()[4].mutable_grad()[1][2] = bad;
  return loss;
}

std::vector<Tensor> weights_of(const torch::nn::Sequential& model) {
  std::vector<Tensor> found;
  for (const Tensor& p : model->parameters()) found.push_back(p.detach().clone());
  return found;
}

bool same_weights(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Tensor& x, const Tensor& y) { return at::equal(x, y); });
}

std::unique_ptr<torch::optim::Optimizer> guarded_optimizer(int kind, const torch::nn::Sequential& model) {
  const auto params = model->parameters();
  if (kind == 0) return std::make_unique<AdamW>(params, AdamWOptions(0.01));
  if (kind == 1) {
    auto lion = std::make_unique<Lion>(params, LionOptions(0.01));
    lion->set_max_grad_norm(0.1);
    return lion;
  }
  if (kind == 2) return std::make_unique<torch::optim::AdamW>(params, torch::optim::AdamWOptions(0.01));
  return std::make_unique<torch::optim::SGD>(params, torch::optim::SGDOptions(0.01).momentum(0.9));
}

Tensor guarded_loss(double value) { return at::scalar_tensor(value, at::kFloat); }

}  // namespace

TEST_CASE("A guard leaves no trace of bad steps", "[guard]") {
  const int kind = GENERATE(0, 1, 2, 3);
  auto model = guarded_model(), reference = guarded_model();
  const auto optimizer = guarded_optimizer(kind, model), plain = guarded_optimizer(kind, reference);
  Guard guard(*optimizer);
  for (int64_t step = 0; step < 6; ++step) {
    const bool is_bad = step == 1 || step == 4;
    guard.step(backward(model, *optimizer, step, is_bad ? (step == 1 ? kNan : INFINITY) : 0));
    backward(reference, *plain, step);
    if (!is_bad) plain->step();
  }
  guard.check();
  CHECK(same_weights(weights_of(model), weights_of(reference)));
  REQUIRE(guard.bad_steps().size() == 2);
  CHECK(guard.bad_steps()[0].step == 1);
  CHECK(guard.bad_steps()[1].reason == "gradient");
  CHECK(guard.steps() == 6);
}

TEST_CASE("A guard finds losses that are not finite and spikes", "[guard]") {
  const auto weight = at::zeros({2}).requires_grad_();
  torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(0.1));
  Guard guard(optimizer, GuardOptions("stop").spike(3).window(2));
  for (const double loss : {1.0, 3.0}) guard.step(guarded_loss(loss));
  guard.step(guarded_loss(9));
  CHECK_THROWS_WITH(guard.step(guarded_loss(1)),
                    Contains("Guard: step 2: expected a loss of at most 5 (mean 2 + spike "
                             "3 x deviation 1), received 9."));
  guard.step(guarded_loss(INFINITY));
  CHECK_THROWS_WITH(guard.check(), Contains("step 3: expected a finite loss, received inf"));
  guard.watch(guarded_loss(1));
  guard.watch(guarded_loss(5));
  guard.step();  // their mean is 3
  guard.check();
  CHECK(guard.bad_steps().size() == 2);
}

TEST_CASE("A guard restores weights, state and buffers", "[guard]") {
  const int kind = GENERATE(0, 1, 2, 3);
  auto model = guarded_model(), reference = guarded_model();
  const auto optimizer = guarded_optimizer(kind, model), plain = guarded_optimizer(kind, reference);
  Guard guard(*optimizer, GuardOptions("rollback").every(3));
  guard.include(*model);
  for (int64_t step = 0; step < 4; ++step) {
    guard.step(backward(model, *optimizer, step));
    backward(reference, *plain, step);
    if (step < 3) plain->step();
  }
  for (int64_t step = 4; step < 7; ++step)
    guard.step(backward(model, *optimizer, step, step == 5 ? kNan : 0));
  CHECK(guard.rollbacks() == 1);
  CHECK(same_weights(weights_of(model), weights_of(reference)));
  CHECK(same_weights(model->buffers(), reference->buffers()));
  guard.step(backward(model, *optimizer, 7));
  backward(reference, *plain, 7);
  plain->step();
  CHECK(same_weights(weights_of(model), weights_of(reference)));
}

TEST_CASE("Several optimizers share a guard", "[guard]") {
  auto model = guarded_model(), reference = guarded_model();
  const auto split = [](const torch::nn::Sequential& net) {
    std::vector<Tensor> matrices, others;
    for (const Tensor& p : net->parameters()) (p.dim() == 2 ? matrices : others).push_back(p);
    return std::pair(std::make_unique<Muon>(matrices, MuonOptions(0.01)),
                     std::make_unique<AdamW>(others, AdamWOptions(0.01)));
  };
  const auto [muon, adamw] = split(model);
  const auto [plain_muon, plain_adamw] = split(reference);
  Guard guard({muon.get(), adamw.get()}, GuardOptions("rollback").every(2));
  guard.include(*model);
  const auto gradients = [](auto& net, auto& first, auto& second, int64_t step) {
    first->zero_grad();
    return backward(net, *second, step);
  };
  for (int64_t step = 0; step < 2; ++step) {
    guard.step(gradients(model, muon, adamw, step));
    gradients(reference, plain_muon, plain_adamw, step);
    plain_muon->step();
    plain_adamw->step();
  }
  // The copy is taken before step 2. The bad gradient is AdamW's, and Muon does not step, either.
  const bool from_copy = GENERATE(false, true);
  if (from_copy) guard.step(gradients(model, muon, adamw, 2));
  const Tensor loss = gradients(model, muon, adamw, 3);
  adamw->param_groups()[0].params()[1].mutable_grad()[0] = kNan;
  const auto before = weights_of(model);
  guard.step(loss);
  CHECK(same_weights(weights_of(model), before));
  guard.check();
  CHECK(guard.bad_steps().size() == 1);
  CHECK(guard.rollbacks() == 1);
  CHECK(same_weights(weights_of(model), weights_of(reference)) == from_copy);
  CHECK_THROWS_WITH(Guard(std::vector<torch::optim::Optimizer*>()),
                    Contains("Guard: optimizers: expected at least one, received none"));
  Guard other({muon.get(), adamw.get()});
  {
    const auto sums = adamw->accumulate();
    gradients(model, muon, adamw, 4);
  }
  CHECK_THROWS_WITH(other.step(guarded_loss(1)), Contains("optimizers: expected gradients in grad()"));
}

TEST_CASE("A guard gives up", "[guard]") {
  const auto weight = at::zeros({2}).requires_grad_();
  torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(0.1));
  Guard skips(optimizer, GuardOptions().limit(2));
  for (int i = 0; i < 2; ++i) skips.step(guarded_loss(kNan));
  CHECK_THROWS_WITH(skips.check(),
                    Contains("step 1: expected a finite loss, received nan. This was bad step 2 in"));
  Guard restores(optimizer, GuardOptions("rollback").limit(1));
  for (const double loss : {1.0, kNan, 1.0, kNan}) restores.step(guarded_loss(loss));
  CHECK_THROWS_WITH(restores.check(), Contains("The copy of step 0 has been restored 1 times"));
}

TEST_CASE("A guard works with a gradient scaler", "[guard]") {
  const int kind = GENERATE(0, 3);
  auto model = guarded_model(), reference = guarded_model();
  const auto optimizer = guarded_optimizer(kind, model), plain = guarded_optimizer(kind, reference);
  GradScaler scaler(GradScalerOptions().init_scale(0x1p126)), other(GradScalerOptions().init_scale(0x1p126));
  Guard guard(*optimizer);
  for (int64_t step = 0; step < 40; ++step) {
    optimizer->zero_grad();
    const Tensor loss = model->forward(guarded_batch(step)).square().mean() * 64;
    scaler.scale(loss).backward();
    guard.step(scaler, step == 30 ? loss * kNan : loss);
    scaler.update();
    plain->zero_grad();
    other.scale(reference->forward(guarded_batch(step)).square().mean() * 64).backward();
    step == 30 ? other.unscale_(*plain) : other.step(*plain);
    other.update();
  }
  guard.check();
  CHECK(scaler.get_scale() == other.get_scale());
  CHECK(scaler.get_scale() < 0x1p126);
  REQUIRE(guard.bad_steps().size() == 1);
  CHECK(guard.bad_steps()[0].step == 30);
  CHECK(same_weights(weights_of(model), weights_of(reference)));
}

TEST_CASE("The state of a guard continues a run", "[guard]") {
  const double losses[] = {1.0, 1.2, 0.9, 1.1, 9.0, 1.0, kNan, 1.05, 0.95, 3.0, 1.0};
  const auto weight = at::zeros({2}).requires_grad_();
  torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(0.1));
  const auto options = GuardOptions().spike(4).window(3);
  Guard whole(optimizer, options), first(optimizer, options), second(optimizer, options);
  for (const double loss : losses) whole.step(guarded_loss(loss));
  for (int i = 0; i < 7; ++i) first.step(guarded_loss(losses[i]));
  const Folder folder;
  shoestring::save_safetensors(folder / "guard", first.state());
  second.load_state(shoestring::load_safetensors(folder / "guard"));
  for (int i = 7; i < 11; ++i) second.step(guarded_loss(losses[i]));
  for (const auto& item : whole.state()) {
    CAPTURE(item.key());
    CHECK(at::allclose(second.state()[item.key()], item.value(), 0, 0, /*equal_nan=*/true));
  }
  CHECK(second.bad_steps().size() == 3);
  CHECK(second.bad_steps()[2].step == 9);
}

TEST_CASE("A guard refuses wrong arguments", "[guard]") {
  const auto weight = at::zeros({2}).requires_grad_();
  torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(0.1));
  CHECK_THROWS_WITH(Guard(optimizer, GuardOptions("halt")),
                    Contains("Guard: on: expected skip, stop or rollback, received halt"));
  CHECK_THROWS_WITH(Guard(optimizer, GuardOptions().spike(-1)), Contains("spike: expected none or a finite"));
  CHECK_THROWS_WITH(Guard(optimizer, GuardOptions("stop").limit(2)),
                    Contains("limit: expected none with on="));
  Guard guard(optimizer, GuardOptions().spike(2));
  CHECK_THROWS_WITH(guard.step(at::zeros({2})),
                    Contains("loss: expected a floating-point tensor with one element"));
  CHECK_THROWS_WITH(guard.step(), Contains("loss: expected a loss to look for spikes, received none"));
  torch::optim::RMSprop other({weight}, torch::optim::RMSpropOptions(0.1));
  CHECK_THROWS_WITH(Guard(other, GuardOptions("rollback")), Contains("expected an optimizer of shoestring"));
  AdamW in_backward({weight}, AdamWOptions(0.1));
  in_backward.set_step_in_backward(true);
  Guard late(in_backward);
  CHECK_THROWS_WITH(late.step(guarded_loss(1)), Contains("optimizers: expected step_in_backward=false"));
}

namespace {

// Assigns a new tensor to its buffer, of which it holds a reference.
struct AssigningImpl : torch::nn::Module {
  AssigningImpl() : mean(register_buffer("mean", at::zeros({4}))) {}
  Tensor forward(const Tensor& x) {
    mean = 0.9 * mean + 0.1 * x.detach();
    return x - mean;
  }
  Tensor& mean;
};

}  // namespace

TEST_CASE("a rollback restores buffers that are other tensors by then", "[guard]") {
  AssigningImpl model;
  const Tensor weight = at::ones({4}).requires_grad_();
  AdamW optimizer({weight}, AdamWOptions(0.1));
  Guard guard(optimizer, GuardOptions("rollback"));
  guard.include(model);
  Tensor at_copy;
  for (const double factor : {1.0, 1.0, kNan, 1.0}) {
    optimizer.zero_grad();
    const Tensor loss = model.forward(weight).square().sum() * factor;
    loss.backward();
    if (!at_copy.defined()) at_copy = model.mean.clone();
    guard.step(loss);
  }
  CHECK(guard.rollbacks() == 1);
  CHECK(at::equal(model.mean, at_copy));
  CHECK(at::equal(model.named_buffers()["mean"], at_copy));
}
