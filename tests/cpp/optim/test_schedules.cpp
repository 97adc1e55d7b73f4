// Tests Scheduler and ReduceOnPlateau with our optimizers and LibTorch's.
// tests/python/optim/test_schedules.py compares the schedules, which both languages share, with PyTorch's.

#include "catch.h"

#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/optim/sgd.h>

#include <shoestring/optim.h>

using Catch::Contains;
using namespace shoestring::optim;
namespace libtorch = torch::optim;

namespace {

std::vector<at::Tensor> weight() { return {at::ones({2}).requires_grad_()}; }

Schedule ramp() { return schedules::linear(ScheduleOptions(10).end(0.5).warmup(4).warmup_start(0)); }

}  // namespace

TEST_CASE("a schedule rises, falls and stays") {
  const Schedule schedule = ramp();
  CHECK(schedule(0) == 0);
  CHECK(schedule(2) == 0.5);
  CHECK(schedule(4) == 1);
  CHECK(schedule(7) == 0.75);
  CHECK(schedule(10) == 0.5);
  CHECK(schedule(1'000'000'000'000) == 0.5);
  CHECK_FALSE(schedule.is_absolute());
  const Schedule batch = schedules::constant(ScheduleOptions().warmup(8).warmup_start(0.125).peak(512));
  CHECK(batch.is_absolute());
  CHECK(batch.whole(0, 64) == 64);
  CHECK(batch.whole(3, 64) == 192);
  CHECK(batch.whole(8, 64) == 512);
  CHECK(Schedule([](int64_t step) { return 1.0 / static_cast<double>(step + 1); })(3) == 0.25);
  CHECK_THROWS_WITH(schedules::linear({}), Contains("linear: steps: expected the number of steps"));
  CHECK_THROWS_WITH(schedules::constant(ScheduleOptions(3)), Contains("constant: steps: expected no value"));
  CHECK_THROWS_WITH(schedules::by_name("step", {}), Contains("expected one of constant, cosine"));
  CHECK_THROWS_WITH(schedule(-1), Contains("step: expected a number of at least 0, received -1"));
}

TEST_CASE("Scheduler sets options of our optimizers") {
  AdamW optimizer(weight(), AdamWOptions(0.1).weight_decay(0.2));
  Scheduler scheduler(optimizer, {{"lr", ramp()},
                                  {"weight_decay", schedules::constant(ScheduleOptions().peak(0.5))},
                                  {"beta2", schedules::linear(ScheduleOptions(10).peak(0.8).end(1.1))}});
  auto& options = static_cast<AdamWOptions&>(optimizer.param_groups()[0].options());
  CHECK(options.lr() == 0);
  scheduler.step(4);
  CHECK(options.lr() == 0.1);
  CHECK(options.weight_decay() == 0.5);
  CHECK(std::get<1>(options.betas()) == Approx(0.8 * 1.04));
  // Nothing changes if a value is out of range: beta2 would be 1 at step 25 of this schedule.
  Scheduler high(optimizer,
                 {{"lr", ramp()}, {"beta2", Schedule([](int64_t step) { return step < 3 ? 1.0 : 2.0; })}});
  high.step(2);
  const double lr = options.lr(), beta = std::get<1>(options.betas());
  CHECK_THROWS_WITH(high.step(3), Contains("Scheduler: beta2: expected a number in [0, 1) in step 3"));
  CHECK(options.lr() == lr);
  CHECK(std::get<1>(options.betas()) == beta);
  CHECK(high.current_step() == 2);
  CHECK_THROWS_WITH((Scheduler(optimizer, {{"rate", ramp()}})),
                    Contains("Scheduler: rate: expected one of the options lr, "));
  CHECK_THROWS_WITH((Scheduler(optimizer, {{"lr", std::vector<Schedule>{ramp(), ramp()}}})),
                    Contains("lr: expected one schedule, or one for each of the 1 groups, received 2"));
}

TEST_CASE("Scheduler sets options of LibTorch's optimizers") {
  libtorch::AdamW adamw(weight(), libtorch::AdamWOptions(0.1));
  libtorch::Adam adam(weight(), libtorch::AdamOptions(0.1));
  libtorch::SGD sgd(weight(), libtorch::SGDOptions(0.1).momentum(0.8));
  libtorch::RMSprop rmsprop(weight(), libtorch::RMSpropOptions(0.1).momentum(0.8));
  libtorch::Adagrad adagrad(weight(), libtorch::AdagradOptions(0.1));
  for (libtorch::Optimizer* optimizer :
       std::vector<libtorch::Optimizer*>{&adamw, &adam, &sgd, &rmsprop, &adagrad}) {
    Scheduler(*optimizer, {{"lr", ramp()}}).step(2);
    CHECK(optimizer->param_groups()[0].options().get_lr() == 0.05);
  }
  Scheduler(sgd, {{"momentum", ramp()}}).step(7);
  CHECK(static_cast<libtorch::SGDOptions&>(sgd.param_groups()[0].options()).momentum() == Approx(0.6));
  Scheduler(adam, {{"beta1", schedules::constant(ScheduleOptions().peak(0.85))}});
  CHECK(std::get<0>(static_cast<libtorch::AdamOptions&>(adam.param_groups()[0].options()).betas()) == 0.85);
}

TEST_CASE("Scheduler has a state") {
  const auto groups = [] {
    auto first = std::make_unique<AdamWOptions>(0.1), second = std::make_unique<AdamWOptions>(0.4);
    return std::vector<libtorch::OptimizerParamGroup>{{weight(), std::move(first)},
                                                      {weight(), std::move(second)}};
  };
  AdamW optimizer(groups()), other(groups());
  Scheduler scheduler(optimizer, {{"lr", std::vector<Schedule>{ramp(), schedules::cosine(10)}}});
  scheduler.step(3);
  for (auto& group : other.param_groups()) group.options().set_lr(7);  // as after loading another state
  Scheduler resumed(other, {{"lr", std::vector<Schedule>{ramp(), schedules::cosine(10)}}});
  resumed.load_state(scheduler.state());
  CHECK(resumed.current_step() == 3);
  scheduler.step();
  resumed.step();
  for (size_t g = 0; g < 2; ++g)
    CHECK(other.param_groups()[g].options().get_lr() == optimizer.param_groups()[g].options().get_lr());
  CHECK_THROWS_WITH(resumed.load_state(shoestring::TensorDict()),
                    Contains("load_state: expected a tensor with one element called step"));
  CHECK(resumed.current_step() == 4);
}

TEST_CASE("ReduceOnPlateau agrees with LibTorch's") {
  libtorch::SGD a(weight(), libtorch::SGDOptions(0.5)), b(weight(), libtorch::SGDOptions(0.5));
  ReduceOnPlateau ours(
      a, ReduceOnPlateauOptions().factor(0.5).patience(2).cooldown(3).threshold(0.125).min_lr({0.01}));
  libtorch::ReduceLROnPlateauScheduler theirs(b, libtorch::ReduceLROnPlateauScheduler::min, 0.5F, 2, 0.125,
                                              libtorch::ReduceLROnPlateauScheduler::rel, 3, {0.01F});
  at::manual_seed(5);
  for (int step = 0; step < 200; ++step) {
    const float metric = at::rand({}).item<float>() + 0.25F;
    ours.step(metric);
    theirs.step(metric);
    REQUIRE(a.param_groups()[0].options().get_lr() ==
            Approx(b.param_groups()[0].options().get_lr()).epsilon(1e-6));
  }
  CHECK(a.param_groups()[0].options().get_lr() < 0.02);
  const auto before = ours.state();
  CHECK_THROWS_WITH(ours.step(std::numeric_limits<double>::quiet_NaN()),
                    Contains("ReduceOnPlateau: metric: expected a number, received nan"));
  CHECK(ours.state()["best"].item<double>() == before["best"].item<double>());
  CHECK_THROWS_WITH(ReduceOnPlateau(a, ReduceOnPlateauOptions().factor(1)),
                    Contains("factor: expected a number in"));
}
