// Tests save_training and load_training. tests/python/runs/test_training_file.py continues runs in the other
// language.

#include "catch.h"

#include <algorithm>
#include <fstream>
#include <sstream>

#include <ATen/ATen.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>

#include <shoestring/optim.h>
#include <shoestring/runs/training.h>

#include "folder.h"

using Catch::Contains;
using namespace shoestring;

namespace {

struct Run {
  Run()
      : model(torch::nn::Linear(8, 16), torch::nn::BatchNorm1d(16), torch::nn::Dropout(0.3),
              torch::nn::Linear(16, 2)),
        lion({model[0]->as<torch::nn::Linear>()->weight}, optim::LionOptions(1e-2).state_format("4bit")),
        adam({model[3]->as<torch::nn::Linear>()->weight, model[3]->as<torch::nn::Linear>()->bias},
             torch::optim::AdamOptions(1e-2).amsgrad(true)),
        scheduler(lion, {{"lr", optim::schedules::cosine(20)}}) {}

  double train(int steps) {
    at::Tensor loss;
    for (int i = 0; i < steps; ++i) {
      lion.zero_grad();
      adam.zero_grad();
      loss = model->forward(at::randn({32, 8})).square().mean();
      scaler.scale(loss).backward();
      scaler.step(lion);
      scaler.step(adam);
      scaler.update();
      scheduler.step();
    }
    return loss.item<double>();
  }
  TrainingRun all() {
    return {training_tensors(*model), {&lion, &adam}, {{"schedule", scheduler}, {"scaler", scaler}}};
  }
  std::vector<at::Tensor> tensors() {
    std::vector<at::Tensor> found;
    for (const auto& item : training_tensors(*model)) found.push_back(item.value().detach().clone());
    found.push_back(at::tensor(lion.param_groups()[0].options().get_lr(), at::kDouble));
    for (const auto& item : scaler.state()) found.push_back(item.value());
    return found;
  }

  torch::nn::Sequential model;
  optim::Lion lion;
  torch::optim::Adam adam;
  optim::Scheduler scheduler;
  optim::GradScaler scaler{optim::GradScalerOptions().init_scale(256).growth_interval(3)};
};

bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i)
    if (!at::equal(a[i], b[i])) return false;
  return true;
}

std::string bytes_of(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

}  // namespace

TEST_CASE("a restored run continues bit for bit") {
  const Folder folder;
  const std::string path = folder / "run";
  at::manual_seed(3);
  Run straight;
  straight.train(4);
  auto saved = straight.all();
  saved.step = 4;
  saved.position = {{"epoch", 1}, {"row", 1'000'000'000'000}};
  saved.facts = {{"data", "\"quoted\" \xc3\xa9"}};
  save_training(path, saved);
  const double expected = straight.train(5);

  Run resumed;
  resumed.train(2);
  auto run = resumed.all();
  run.facts = saved.facts;
  load_training(path, run);
  CHECK(run.step == 4);
  CHECK(run.position == saved.position);
  CHECK(resumed.train(5) == expected);
  CHECK(same(resumed.tensors(), straight.tensors()));
}

TEST_CASE("a file that does not fit changes nothing") {
  const Folder folder;
  const std::string path = folder / "run";
  Run first;
  first.train(2);
  auto saved = first.all();
  saved.facts = {{"data", "abc"}};
  save_training(path, saved);

  Run second;
  second.train(1);
  const auto before = second.tensors();
  const auto refused = [&](TrainingRun run, const std::string& message) {
    CHECK_THROWS_WITH(load_training(path, run), Contains(message));
    CHECK(same(second.tensors(), before));
    CHECK(run.step == 0);
  };
  auto run = second.all();
  run.facts = {{"data", "abd"}};
  refused(run, "expected data abd, received abc: the file belongs to another run");
  run = second.all();
  run.tensors.erase("0.weight");
  refused(run, "expected the tensors of this model, received model.0.weight");
  run = second.all();
  run.tensors["0.weight"] = at::zeros({3, 3});
  refused(run, "expected model.0.weight of shape [3, 3] and Float, received [16, 8] and Float");
  run = second.all();
  run.parts.erase("scaler");
  refused(run, "expected the parts of this run, received scaler");
  run = second.all();
  run.parts.emplace("more", second.scaler);
  refused(run, "expected the part more, received none");
  run = second.all();
  run.optimizers.pop_back();
  refused(run, "expected 1 optimizers, received 2");
  // The first optimizer and all parts before the one that refuses are restored to what they were.
  run = second.all();
  std::swap(run.optimizers[0], run.optimizers[1]);
  refused(run, "expected optimizer torch.Adam, received Lion");
  run = second.all();
  run.optimizers[1] = run.optimizers[0];
  refused(run, "expected optimizer Lion, received torch.Adam");
  optim::ReduceOnPlateau plateau(second.lion);
  run = second.all();
  run.parts.erase("scaler");
  run.parts.emplace("scaler", plateau);
  refused(run, "expected a tensor with one element called best");

  const std::string bytes = bytes_of(path);
  for (size_t at = 9; at < bytes.size(); at += bytes.size() / 37) {
    std::string damaged = bytes;
    damaged[at] = static_cast<char>(damaged[at] ^ 4);
    std::ofstream(path, std::ios::binary) << damaged;
    run = second.all();
    CHECK_THROWS_AS(load_training(path, run), c10::Error);
    CHECK(same(second.tensors(), before));
  }
}

namespace {

// A part whose state shares its memory, and that refuses a state as often as `refusals` says.
struct Sharing {
  TensorDict state() const {
    TensorDict state;
    state.insert("value", value);
    return state;
  }
  void load_state(const TensorDict& state) {
    value.copy_(state["value"]);
    TORCH_CHECK_VALUE(refusals-- <= 0, "refused");
  }
  at::Tensor value = at::ones({3});
  int refusals = 0;
};

}  // namespace

TEST_CASE("a refusal of one part leaves the others as they were") {
  const Folder folder;
  const std::string path = folder / "run";
  Sharing first, last;
  const auto with_parts = [&](Run& run) {
    auto all = run.all();
    all.parts.emplace("a", first);
    all.parts.emplace("z", last);
    return all;
  };
  Run saved;
  saved.train(2);
  first.value.fill_(5);
  save_training(path, with_parts(saved));
  first.value.fill_(1);
  for (const int refusals : {1, 2}) {
    Run run;
    run.train(1);
    const auto before = run.tensors();
    first.value.fill_(1);
    last.refusals = refusals;
    auto all = with_parts(run);
    CHECK_THROWS_WITH(
        load_training(path, all),
        Contains(refusals == 1 ? "refused" : "Everything is as it was but the part z (refused)"));
    CHECK(same(run.tensors(), before));
    CHECK(at::equal(first.value, at::ones({3})));
  }
}

TEST_CASE("parts whose names begin each other are refused, and a weight without its own memory") {
  const Folder folder;
  Run run;
  auto all = run.all();
  all.parts.emplace("scaler.a", run.scaler);
  CHECK_THROWS_WITH(save_training(folder / "run", all),
                    Contains("none begins another, received scaler and scaler.a. Rename one"));
  CHECK_THROWS_WITH(load_training(folder / "run", all), Contains("none begins another"));
  all = run.all();
  all.step = -1;
  CHECK_THROWS_WITH(save_training(folder / "run", all), Contains("step: expected a number of at least 0"));
  CHECK(folder.files().empty());
  all = run.all();
  all.tensors.insert("wide", at::zeros({1}).expand(3));
  save_training(folder / "run", all);
  CHECK_THROWS_WITH(load_training(folder / "run", all), Contains("received an expanded tensor"));
}

TEST_CASE("the state of a parameter is found by its name") {
  const Folder folder;
  const std::string path = folder / "run";
  const auto run_of = [](torch::nn::Module& model, torch::optim::Optimizer& optimizer) {
    return TrainingRun{training_tensors(model), {&optimizer}};
  };
  const auto check = [&](const auto& make, const char* state) {
    at::manual_seed(1);
    torch::nn::Sequential model(torch::nn::Linear(8, 8), torch::nn::Linear(8, 8));
    auto params = model->parameters();
    auto optimizer = make(params);
    for (int i = 0; i < 2; ++i) {
      optimizer.zero_grad();
      model->forward(at::randn({4, 8})).square().sum().backward();
      optimizer.step();
    }
    save_training(path, run_of(*model, optimizer));
    std::reverse(params.begin(), params.end());
    auto other = make(params);
    auto run = run_of(*model, other);
    load_training(path, run);
    save_training(path + ".again", run);
    const SafetensorsFile saved(path), again(path + ".again");
    for (int i = 0; i < 4; ++i) {
      const auto name = [&](int index) { return c10::str("optimizer.0.0.", index, ".", state); };
      CHECK(at::equal(saved.load(name(i)), again.load(name(3 - i))));
    }
    // A parameter of another name is not taken for this one.
    auto second = make(model[1]->parameters());
    auto run_of_second = run_of(*model, second);
    auto first = make(model[0]->parameters());
    save_training(path, run_of(*model, first));
    CHECK_THROWS_WITH(
        load_training(path, run_of_second),
        Contains("expected a state of the parameter \"1.weight\", received one of \"0.weight\""));
  };
  check([](const auto& params) { return optim::AdamW(params, optim::AdamWOptions(1e-2)); }, "exp_avg");
  check([](const auto& params) { return torch::optim::Adam(params, torch::optim::AdamOptions(1e-2)); },
        "exp_avg");
}

TEST_CASE("save_training refuses an optimizer without a state for files") {
  const Folder folder;
  Run run;
  torch::optim::Adagrad adagrad(run.model->parameters());
  auto all = run.all();
  all.optimizers = {&adagrad};
  CHECK_THROWS_WITH(save_training(folder / "run", all),
                    Contains("optimizer: expected an optimizer of shoestring"));
  CHECK(folder.files().empty());
}

TEST_CASE("save_training refuses to leave out weights that were trained and frozen") {
  const Folder folder;
  Run run;
  run.train(1);
  run.model[3]->as<torch::nn::Linear>()->bias.set_requires_grad(false);
  run.lion.param_groups()[0].params()[0].set_requires_grad(false);
  auto all = run.all();
  CHECK_THROWS_WITH(save_training(folder / "run", all),
                    Contains("received none for parameter 0 of group 0, which is frozen now"));
  CHECK(folder.files().empty());
  all.tensors = training_tensors(*run.model, /*frozen=*/true);
  save_training(folder / "run", all);
  const auto saved = run.tensors();
  run.train(1);
  load_training(folder / "run", all);
  CHECK(same(run.tensors(), saved));
}

TEST_CASE("training_tensors has what training changes") {
  torch::nn::Sequential model(torch::nn::Linear(2, 3), torch::nn::BatchNorm1d(3));
  model[0]->as<torch::nn::Linear>()->weight.set_requires_grad(false);
  CHECK(training_tensors(*model).keys() == std::vector<std::string>{"0.bias", "1.weight", "1.bias",
                                                                    "1.running_mean", "1.running_var",
                                                                    "1.num_batches_tracked"});
  CHECK(training_tensors(*model, /*frozen=*/true).size() == 7);
}
