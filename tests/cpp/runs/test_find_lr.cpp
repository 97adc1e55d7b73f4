#include "catch.h"

#include <cmath>
#include <stdexcept>

#include <ATen/ATen.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <shoestring/optim.h>
#include <shoestring/runs/find_lr.h>

using at::Tensor;
using Catch::Contains;
using namespace shoestring;

namespace {

torch::nn::Sequential searched_model() {
  at::manual_seed(3);
  return torch::nn::Sequential(torch::nn::Linear(16, 40), torch::nn::BatchNorm1d(40),
                               torch::nn::Linear(40, 1));
}

}  // namespace

TEST_CASE("find_lr finds a rate and leaves no trace", "[find_lr]") {
  std::vector<double> losses[2];
  for (const bool searches : {false, true}) {
    auto model = searched_model();
    optim::AdamW optimizer(model->parameters(), optim::AdamWOptions(1e-3));
    const auto step = [&] {
      optimizer.zero_grad();
      const Tensor x = at::randn({32, 16});
      Tensor loss = (model->forward(x) - x.sum(1, true)).square().mean();
      loss.backward();
      optimizer.step();
      return loss;
    };
    for (int i = 0; i < 2; ++i) step();
    if (searches) {
      TrainingRun run{training_tensors(*model), {&optimizer}};
      const LrRange range = find_lr(step, run, FindLrOptions().start(1e-5).end(1).steps(40));
      CHECK(range.suggestion > 1e-5);
      CHECK(range.suggestion < 1);
      CHECK(range.spread >= 1);
      CHECK(range.passes.size() == 2);
    }
    for (int i = 0; i < 3; ++i) losses[searches].push_back(step().item<double>());
  }
  CHECK(losses[0] == losses[1]);
}

TEST_CASE("find_lr refuses losses that never fall", "[find_lr]") {
  const auto weight = at::ones({2}).requires_grad_();
  torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(0.5));
  TensorDict tensors;
  tensors.insert("weight", weight);
  TrainingRun run{tensors, {&optimizer}};
  CHECK_THROWS_WITH(
      find_lr([] { return at::ones({}); }, run),
      Contains("find_lr: step: expected a loss that falls at some learning rate from 1e-07 to"));
  CHECK_THROWS_WITH(find_lr([] { return at::ones({2}); }, run), Contains("received a tensor of shape [2]"));
  const auto sets = [&] {
    optimizer.param_groups()[0].options().set_lr(0.25);
    return at::ones({});
  };
  CHECK_THROWS_WITH(find_lr(sets, run), Contains("received one that has set it to 0.25"));
  CHECK_THROWS_AS(find_lr([]() -> Tensor { throw std::out_of_range("data"); }, run), std::out_of_range);
  CHECK(optimizer.param_groups()[0].options().get_lr() == 0.5);
  CHECK_THROWS_WITH(find_lr([] { return at::ones({}); }, run, FindLrOptions().steps(3)),
                    Contains("steps: expected a number of at least 10, received 3"));
  CHECK_THROWS_WITH(find_lr([] { return at::ones({}); }, run, FindLrOptions().end(0)),
                    Contains("end: expected a number above start"));
}

TEST_CASE("find_lr restores parameters outside the run's tensors, also if a part refuses its state",
          "[find_lr]") {
  struct Refuses {
    TensorDict state() const { return TensorDict(); }
    void load_state(const TensorDict&) { throw std::out_of_range("refused"); }
  } part;
  auto model = searched_model();
  const auto scale = at::ones({1}).requires_grad_();
  auto params = model->parameters();
  params.push_back(scale);
  optim::AdamW optimizer(params, optim::AdamWOptions(1e-3));
  const auto step = [&] {
    optimizer.zero_grad();
    const Tensor x = at::randn({32, 16});
    Tensor loss = (model->forward(x) * scale - x.sum(1, true)).square().mean();
    loss.backward();
    optimizer.step();
    return loss;
  };
  std::vector<Tensor> before;
  for (const Tensor& p : params) before.push_back(p.detach().clone());
  const auto check = [&] {
    for (size_t i = 0; i < params.size(); ++i) CHECK(at::equal(params[i], before[i]));
    CHECK(!scale.grad().defined());
    CHECK(optimizer.param_groups()[0].options().get_lr() == 1e-3);
  };
  TrainingRun run{training_tensors(*model), {&optimizer}};
  find_lr(step, run, FindLrOptions().start(1e-5).end(1).steps(40));
  check();
  run.parts.emplace("part", part);
  CHECK_THROWS_AS(find_lr(step, run, FindLrOptions().start(1e-5).end(1).steps(40)), std::out_of_range);
  check();
  {
    const auto sums = optimizer.accumulate();
    model->forward(at::randn({32, 16})).square().mean().backward();
  }
  CHECK_THROWS_WITH(find_lr(step, run),
                    Contains("find_lr: run: expected gradients in grad(), received sums of"));
}
