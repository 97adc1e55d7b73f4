#include "catch.h"

#include <cmath>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/sgd.h>

#include <shoestring/optim.h>

#include "optim/optimizers.h"

using at::Tensor;
using Catch::Contains;
using shoestring::optim::Lion;
using shoestring::optim::LionOptions;
using shoestring::optim::SGD;
using shoestring::optim::SGDOptions;

namespace {

double grad_norm(const std::vector<Tensor>& params) {
  double squares = 0;
  for (const Tensor& p : params) squares += p.grad().square().sum().item<double>();
  return std::sqrt(squares);
}

// Returns the norm of the difference between `params` and `exact`, divided by the norm of the change of
// `exact` since the start.
double distance(const std::vector<Tensor>& params, const std::vector<Tensor>& exact) {
  const auto start = parameters();
  double off = 0, moved = 0;
  for (size_t i = 0; i < params.size(); ++i) {
    off += (params[i].detach().to(at::kDouble) - exact[i].detach()).square().sum().item<double>();
    moved += (exact[i].detach().to(at::kDouble) - start[i].detach()).square().sum().item<double>();
  }
  return std::sqrt(off / moved);
}

template <class Optimizer, class Options>
void check_groups() {
  auto params = parameters();
  Groups groups;
  groups.emplace_back(std::vector<Tensor>{params[0], params[1]});
  groups.emplace_back(std::vector<Tensor>{params[2]},
                      std::make_unique<Options>(Options(0).state_format("fp32")));
  Optimizer opt(groups, Options(0.125));
  opt.add_param_group({std::vector<Tensor>{params[3]}, std::make_unique<Options>(Options(0.5))});
  CHECK(opt.param_groups()[2].options().get_lr() == 0.5);
  const Tensor still = params[2].detach().clone(), unused = params[0].detach().clone();
  const Tensor moves = params[1].detach().clone();
  const Tensor loss = opt.step([&] {
    opt.zero_grad();
    Tensor sum = params[1].sum() + params[2].sum();
    torch::autograd::backward({sum}, {});
    return sum;
  });
  CHECK(at::equal(loss, moves.sum() + still.sum()));
  CHECK(at::equal(params[2], still));  // params[2] does not change, because its group has lr = 0
  CHECK(at::equal(params[0], unused));
  // For a gradient of ones, the first step of Lion and of SGD subtracts lr from each weight.
  CHECK(at::allclose(params[1], moves - 0.125));
  CHECK(opt.state().count(params[0].unsafeGetTensorImpl()) == 0);
  CHECK(opt.state().count(params[2].unsafeGetTensorImpl()) == 1);

  // Clipping uses one norm over the gradients of both parameter groups.
  params[1].mutable_grad() = at::full({300}, 3.0f);
  params[2].mutable_grad() = at::full({5000}, 4.0f);
  opt.set_max_grad_norm(1.0);
  opt.step();
  CHECK(std::abs(opt.grad_norm().template item<double>() - std::sqrt(300 * 9.0 + 5000 * 16.0)) < 1e-3);
}

}  // namespace

TEST_CASE("optim::SGD follows LibTorch's", "[sgd]") {
  for (bool nesterov : {false, true}) {
    for (bool clipped : {false, true}) {
      CAPTURE(nesterov, clipped);
      auto exact = parameters(), fp32 = parameters(), coded = parameters();
      const double dampening = nesterov ? 0 : 0.25;
      torch::optim::SGD reference(
          exact, torch::optim::SGDOptions(0.05).momentum(0.8).dampening(dampening).weight_decay(0.1).nesterov(
                     nesterov));
      const auto options =
          SGDOptions(0.05).momentum(0.8).dampening(dampening).weight_decay(0.1).nesterov(nesterov);
      SGD opt(fp32, SGDOptions(options).state_format("fp32")), small(coded, options);
      if (clipped) {
        opt.set_max_grad_norm(0.5);
        small.set_max_grad_norm(0.5);
      }
      for (int step = 0; step < 10; ++step) {
        new_gradients(exact, step);
        if (clipped) {
          const double norm = grad_norm(exact);
          for (const Tensor& p : exact) p.mutable_grad().mul_(0.5 / (norm + 1e-6));
        }
        reference.step();
        train(opt, fp32, step, step + 1);
        train(small, coded, step, step + 1);
      }
      CHECK(distance(fp32, exact) < 1e-6);
      const double far = distance(coded, exact);
      CHECK(far < 0.02);
      CHECK(far > 1e-5);
      const auto& state = state_of(small, coded[1]);
      CHECK(state["momentum_buffer"].scalar_type() == at::kByte);
      CHECK(state["momentum_buffer_scale"].numel() == 2);
      CHECK(state["step"].item<float>() == 10);
      // The momentum's codes of all parameters share one allocation.
      CHECK(state["momentum_buffer"].storage().nbytes() == 256 * (1 + 2 + 20));
    }
  }
}

TEST_CASE("optim::Lion agrees with fp64", "[lion]") {
  for (bool maximize : {false, true}) {
    CAPTURE(maximize);
    auto fp32 = parameters(), coded = parameters();
    std::vector<Tensor> exact, m;
    for (const Tensor& p : fp32) {
      exact.push_back(p.detach().to(at::kDouble));
      m.push_back(at::zeros_like(exact.back()));
    }
    const auto options = LionOptions(0.01).betas({0.8, 0.95}).weight_decay(0.2).maximize(maximize);
    Lion opt(fp32, LionOptions(options).state_format("fp32")), small(coded, options);
    if (maximize) {  // If maximize is set, this test also clips the gradients, which changes the moment.
      opt.set_max_grad_norm(0.5);
      small.set_max_grad_norm(0.5);
    }
    for (int step = 0; step < 10; ++step) {
      train(opt, fp32, step, step + 1);
      train(small, coded, step, step + 1);
      const double factor = maximize ? -0.5 / (grad_norm(fp32) + 1e-6) : 1;
      for (size_t i = 0; i < exact.size(); ++i) {
        const Tensor g = fp32[i].grad().to(at::kDouble) * factor;
        exact[i] = exact[i] * (1 - 0.01 * 0.2) - 0.01 * (0.8 * m[i] + 0.2 * g).sign();
        m[i] = 0.95 * m[i] + 0.05 * g;
      }
    }
    // with a single weight update of the wrong sign, the distance to the exact weights would be 7e-3
    CHECK(distance(fp32, exact) < 2e-5);
    // Quantisation of the moment may change the sign of an update near zero. A few weights then differ from
    // the exact ones by twice the learning rate.
    const double far = distance(coded, exact);
    CHECK(far < 0.15);
    CHECK(far > 1e-4);
    const auto& state = state_of(small, coded[1]);
    CHECK(state["exp_avg"].scalar_type() == at::kByte);
    CHECK(state["exp_avg_scale"].numel() == 2);
    CHECK(!state_of(opt, fp32[1]).contains("exp_avg_scale"));
    CHECK_THROWS_WITH(state_of(opt, fp32[1])["exp_avg_scale"],
                      Contains("expected one of exp_avg, step, received exp_avg_s"));
    CHECK((state_of(opt, fp32[1])["exp_avg"] - m[1]).norm().item<double>() <
          1e-6 * m[1].norm().item<double>());
  }
}

TEST_CASE("Lion and SGD: groups, closures and clipping", "[lion][sgd]") {
  check_groups<Lion, LionOptions>();
  check_groups<SGD, SGDOptions>();
}

TEST_CASE("Lion and SGD refuse what does not fit, and change nothing", "[lion][sgd]") {
  auto params = parameters();
  CHECK_THROWS_WITH(Lion(params, LionOptions(-1)),
                    Contains("Lion: lr: expected a number of at least 0, received -1"));
  CHECK_THROWS_WITH(Lion(params, LionOptions().betas({0.9, 1})),
                    Contains("Lion: betas: expected two numbers in [0, "));
  CHECK_THROWS_WITH(Lion(params, LionOptions().state_format("2bit")),
                    Contains("Lion: state_format: expected \"8bit\" or"));
  CHECK_THROWS_WITH(SGD(params, SGDOptions().weight_decay(-2)),
                    Contains("SGD: weight_decay: expected a number of at"));
  CHECK_THROWS_WITH(
      SGD(params, SGDOptions().momentum(0)),
      Contains("SGD: momentum: expected a number above 0 (without momentum use torch::optim::SGD)"));
  CHECK_THROWS_WITH(SGD(params, SGDOptions().nesterov(true).dampening(0.5)),
                    Contains("SGD: dampening: expected 0 with nesterov, received 0.5"));
  CHECK_THROWS_WITH(SGD(params, SGDOptions().dampening(NAN)),
                    Contains("SGD: dampening: expected a number that is finite"));

  Groups foreign;
  foreign.emplace_back(params, std::make_unique<torch::optim::SGDOptions>(0.1));
  CHECK_THROWS_WITH(SGD(foreign), Contains("expected SGDOptions in every group, received the options of"));
}
