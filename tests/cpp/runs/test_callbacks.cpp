#include "catch.h"

#include <memory>

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <shoestring/optim.h>
#include <shoestring/runs/callbacks.h>

#include "folder.h"

namespace callbacks = shoestring::callbacks;
using callbacks::Callback;
using callbacks::Callbacks;
using callbacks::OnStep;
using Catch::Contains;
using shoestring::TensorDict;

namespace {

/// Records its calls, ends the run after some steps, and counts in a state.
class Recorder : public Callback {
 public:
  explicit Recorder(int64_t last = 100) : last_(last) {}
  void on_start(callbacks::Run&) override { calls += "s"; }
  void on_step(callbacks::Run& run) override {
    calls += "x";
    ++count;
    run.should_stop = run.step >= last_;
  }
  void on_metrics(callbacks::Run& run) override { calls += run.metrics.begin()->first; }
  void on_end(callbacks::Run&) override { calls += "e"; }
  TensorDict state() const override {
    TensorDict state;
    state.insert("count", at::scalar_tensor(count, at::kLong));
    return state;
  }
  void load_state(const TensorDict& state) override { count = state["count"].item<int64_t>(); }

  std::string calls;
  int64_t count = 0;

 private:
  int64_t last_;
};

}  // namespace

TEST_CASE("Callbacks see a run from its start to its end", "[callbacks]") {
  const auto recorder = std::make_shared<Recorder>(3);
  int64_t calls = 0, rare = 0;
  Callbacks all;
  all.add("recorder", recorder);
  all.add("each", OnStep([&] { ++calls; }));
  all.add("rare", OnStep([&] { ++rare; }, 2));
  callbacks::Run run;
  all.on_start(run);
  while (!run.should_stop) {
    ++run.step;
    all.on_step(run);
  }
  run.metrics = {{"m", 0.5}};
  all.on_metrics(run);
  all.on_end(run);
  CHECK(recorder->calls == "sxxxme");
  CHECK(calls == 3);
  CHECK(rare == 1);
}

TEST_CASE("The states of callbacks are part of the file of a run", "[callbacks]") {
  const Folder folder;
  const std::string path = folder / "run.safetensors";
  const auto make = [&](torch::nn::Linear& model, torch::optim::SGD& optimizer) {
    namespace schedules = shoestring::optim::schedules;
    auto scheduler = std::make_shared<shoestring::optim::Scheduler>(
        optimizer, std::map<std::string, shoestring::optim::Scheduler::PerGroup>{
                       {"lr", schedules::cosine(shoestring::optim::ScheduleOptions(10))}});
    auto averages = std::make_shared<shoestring::optim::Averages>(*model);
    auto recorder = std::make_shared<Recorder>();
    Callbacks all;
    all.add("rate", OnStep([scheduler] { scheduler->step(); }, *scheduler));
    all.add("averages", OnStep([averages] { averages->update(); }, *averages));
    all.add("recorder", recorder);
    return std::tuple(std::move(all), scheduler, averages, recorder);
  };
  at::manual_seed(1);
  torch::nn::Linear model(3, 2), other(3, 2);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.5));
  torch::optim::SGD second(other->parameters(), torch::optim::SGDOptions(0.5));
  auto [all, scheduler, averages, recorder] = make(model, optimizer);
  auto [resumed, later, later_averages, later_recorder] = make(other, second);
  callbacks::Run run{model.get(), {&optimizer}};
  for (int64_t i = 0; i < 4; ++i) {
    optimizer.zero_grad();
    model(at::ones({1, 3})).sum().backward();
    optimizer.step();
    ++run.step;
    all.on_step(run);
  }
  shoestring::TrainingRun saved{shoestring::training_tensors(*model), {&optimizer}, {{"callbacks", all}}};
  shoestring::save_training(path, saved);
  shoestring::TrainingRun loaded{shoestring::training_tensors(*other), {&second}, {{"callbacks", resumed}}};
  shoestring::load_training(path, loaded);
  CHECK(later->current_step() == 4);
  CHECK(later_recorder->count == 4);
  CHECK(at::equal(later_averages->state()["average.weight"], averages->state()["average.weight"]));

  auto state = all.state();
  state.insert("other.count", at::zeros({}));
  later_recorder->count = 0;
  CHECK_THROWS_WITH(
      resumed.load_state(state),
      Contains("Callbacks: load_state: expected the state of one of 3 callbacks, received one of other"));
  CHECK(later_recorder->count == 0);
}

TEST_CASE("Callbacks refuse wrong arguments", "[callbacks]") {
  Callbacks all;
  all.add("one", OnStep([] {}));
  CHECK_THROWS_WITH(all.add("one", OnStep([] {})),
                    Contains("Callbacks: name: expected a new name without a dot, received \"one\""));
  CHECK_THROWS_WITH(all.add("a.b", OnStep([] {})), Contains("received \"a.b\""));
  CHECK_THROWS_WITH(all.add("null", std::shared_ptr<Recorder>()), Contains("null: expected a callback"));
  CHECK_THROWS_WITH(OnStep([] {}, 0), Contains("OnStep: every: expected a number of at least 1, received 0"));
}
