#include "catch.h"

#include <algorithm>

#include <torch/csrc/autograd/generated/variable_factories.h>
#include <torch/nn/modules.h>

#include <shoestring/optim.h>
#include <shoestring/runs/training.h>

#include "folder.h"

using at::Tensor;
using Catch::Contains;
using shoestring::optim::AdamW;
using shoestring::optim::AdamWOptions;
using shoestring::optim::Unfreezing;

namespace {

torch::nn::Sequential unfreezing_model() {
  at::manual_seed(2);
  return torch::nn::Sequential(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4), torch::nn::Linear(4, 2));
}

const std::map<std::string, int64_t> kUnfreezingSchedule{{"2.*", 0}, {"1.weight", 2}, {"[01].*", 3}};

void unfreezing_step(torch::nn::Sequential& model, AdamW& optimizer, Unfreezing& unfreezing) {
  at::manual_seed(100 + unfreezing.current_step());
  optimizer.zero_grad();
  model->forward(torch::randn({8, 4})).square().sum().backward();
  optimizer.step();
  unfreezing.step();
}

}  // namespace

TEST_CASE("Unfreezing trains parameters from their step on", "[unfreezing]") {
  auto model = unfreezing_model();
  for (const Tensor& p : model->parameters()) p.mutable_grad() = torch::ones_like(p);
  Unfreezing unfreezing(*model, kUnfreezingSchedule);
  using Names = std::vector<std::string>;
  CHECK(unfreezing.trained(0) == Names{"2.weight", "2.bias"});
  CHECK(unfreezing.trained(2) == Names{"1.weight", "2.weight", "2.bias"});
  CHECK(unfreezing.trained(3).size() == 6);
  for (const int64_t step : {0, 1, 2, 3, 0}) {
    unfreezing.step(step);
    CHECK(unfreezing.current_step() == step);
    const Names trained = unfreezing.trained(step);
    for (const auto& p : model->named_parameters()) {
      const bool is_trained = std::find(trained.begin(), trained.end(), p.key()) != trained.end();
      CHECK(p.value().requires_grad() == is_trained);
      if (!is_trained) CHECK_FALSE(p.value().grad().defined());
    }
  }
  CHECK(model[2]->as<torch::nn::Linear>()->weight.grad().defined());
}

TEST_CASE("Unfreezing resumes bit for bit from a file, and frozen weights do not move", "[unfreezing]") {
  const Folder folder;
  const std::string path = folder / "run.safetensors";
  auto model = unfreezing_model(), resumed = unfreezing_model();
  const Tensor first = model->parameters()[0].detach().clone();
  AdamW optimizer(model->parameters(), AdamWOptions(0.1)), again(resumed->parameters(), AdamWOptions(0.1));
  Unfreezing unfreezing(*model, kUnfreezingSchedule), other(*resumed, kUnfreezingSchedule);
  for (int i = 0; i < 3; ++i) unfreezing_step(model, optimizer, unfreezing);
  CHECK(at::equal(model->parameters()[0], first));
  shoestring::TrainingRun run{
      shoestring::training_tensors(*model, true), {&optimizer}, {{"freeze", unfreezing}}};
  save_training(path, run);
  shoestring::TrainingRun back{shoestring::training_tensors(*resumed, true), {&again}, {{"freeze", other}}};
  load_training(path, back);
  CHECK(other.current_step() == 3);
  for (int i = 0; i < 3; ++i) {
    unfreezing_step(model, optimizer, unfreezing);
    unfreezing_step(resumed, again, other);
  }
  CHECK_FALSE(at::equal(model->parameters()[0], first));
  for (size_t i = 0; i < 6; ++i) CHECK(at::equal(model->parameters()[i], resumed->parameters()[i]));
}

TEST_CASE("Unfreezing refuses patterns that match nothing, and negative steps", "[unfreezing]") {
  auto model = unfreezing_model();
  CHECK_THROWS_WITH(
      Unfreezing(*model, {{"*", 5}, {"3.*", 0}}),
      Contains("Unfreezing: schedule: expected a pattern that matches a parameter, received \"3.*\""));
  CHECK_THROWS_AS(Unfreezing(*model, {{"*", -1}}), c10::ValueError);
  CHECK(model->parameters()[0].requires_grad());
  Unfreezing unfreezing(*model, {{"*", 5}});
  CHECK_THROWS_AS(unfreezing.step(-1), c10::ValueError);
  CHECK_THROWS(unfreezing.load_state(shoestring::TensorDict()));
}
