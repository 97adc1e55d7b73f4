// Applies schedules to the options of an optimizer's groups.

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include <ATen/Functions.h>
#include <shoestring/optim/schedules.h>

#include "optim/core/libtorch_options.h"
#include "optim/core/state_numbers.h"
#include "optim/rule.h"

namespace shoestring::optim {

using detail::expect;
using detail::number_of;
using torch::optim::OptimizerOptions;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A number among the options of a group, and its range.
struct Number {
  double* value;
  const detail::Allowed* allowed;
};
using NamedNumbers = std::vector<std::pair<std::string, Number>>;

NamedNumbers numbers_of(OptimizerOptions& options) {
  NamedNumbers numbers;
  if (auto* ours = dynamic_cast<LowMemoryOptions*>(&options)) {
    for (const detail::Field& field : detail::Access::fields(*ours)) {
      detail::each_value(field, [&](const char* name, auto& value) {
        if constexpr (std::is_same_v<decltype(value), double&>)
          numbers.push_back({name, {&value, field.allowed != nullptr ? field.allowed : &detail::kFinite}});
      });
    }
    return numbers;
  }
  detail::visit_libtorch_options(options, [&](const char* name, auto& value) {
    if constexpr (std::is_same_v<decltype(value), double&>) {
      numbers.push_back({name, {&value, &detail::kAtLeastZero}});
    } else if constexpr (std::is_same_v<decltype(value), std::tuple<double, double>&>) {
      numbers.push_back({detail::numbered(name, 1), {&std::get<0>(value), &detail::kFraction}});
      numbers.push_back({detail::numbered(name, 2), {&std::get<1>(value), &detail::kFraction}});
    }
  });
  return numbers;
}

Number find(const char* name, OptimizerOptions& options, const std::string& option) {
  std::string names;
  for (const auto& [known, number] : numbers_of(options)) {
    if (known == option) return number;
    names += (names.empty() ? "" : ", ") + known;
  }
  expect(!names.empty(), name, "optimizer",
         "one of shoestring, or LibTorch's Adam, AdamW, SGD, RMSprop or Adagrad", "another class");
  expect(false, name, option.c_str(), "one of the options " + names, "another");
  return {};
}

Number find(const char* name, torch::optim::Optimizer& optimizer, const std::string& option, size_t group) {
  return find(name, optimizer.param_groups()[group].options(), option);
}

int64_t count_of(const char* name, const TensorDict& state, const char* key) {
  const double count = number_of(name, state, key);
  expect(count >= 0 && count == std::trunc(count) && count < 0x1p53, name, key,
         "a whole number of at least 0", count);
  return static_cast<int64_t>(count);
}

}  // namespace

// ---- Scheduler

Scheduler::Scheduler(torch::optim::Optimizer& optimizer, std::map<std::string, PerGroup> schedules)
    : optimizer_(&optimizer), schedules_(std::move(schedules)) {
  const size_t groups = optimizer.param_groups().size();
  for (auto& [option, per_group] : schedules_) {
    expect(per_group.size() == 1 || per_group.size() == groups, "Scheduler", option.c_str(),
           c10::str("one schedule, or one for each of the ", groups, " groups"), per_group.size());
    if (per_group.size() != groups) per_group.resize(groups, per_group.front());
    for (size_t g = 0; g < groups; ++g)
      first_[option].push_back(*find("Scheduler", optimizer, option, g).value);
  }
  step(0);
}

void Scheduler::step(int64_t step) {
  std::vector<std::pair<double*, double>> values;
  for (const auto& [option, per_group] : schedules_) {
    for (size_t g = 0; g < per_group.size(); ++g) {
      const Number number = find("Scheduler", *optimizer_, option, g);
      const double value = per_group[g](step) * (per_group[g].is_absolute() ? 1 : first_.at(option)[g]);
      expect(number.allowed->holds(value), "Scheduler", option.c_str(),
             c10::str("a number ", number.allowed->expected, " in step ", step), value);
      values.emplace_back(number.value, value);
    }
  }
  for (const auto& [target, value] : values) *target = value;
  step_ = step;
}

TensorDict Scheduler::state() const {
  TensorDict state;
  state.insert("step", at::scalar_tensor(step_, at::kLong));
  for (const auto& [option, first] : first_) state.insert("first." + option, at::tensor(first, at::kDouble));
  return state;
}

void Scheduler::load_state(const TensorDict& state) {
  const int64_t step = count_of("Scheduler", state, "step");
  auto first = first_;
  for (auto& [option, values] : first) {
    const at::Tensor* saved = state.find("first." + option);
    const auto size = static_cast<int64_t>(values.size());
    expect(saved != nullptr && saved->dim() == 1 && saved->numel() == size, "Scheduler", "load_state",
           c10::str("the values of ", option, " of ", size, " groups"), saved == nullptr ? "none" : "others");
    const at::Tensor numbers = saved->to(at::kCPU, at::kDouble).contiguous();
    values.assign(numbers.const_data_ptr<double>(), numbers.const_data_ptr<double>() + size);
  }
  first_ = std::move(first);
  step_ = step;
}

// ---- ReduceOnPlateau

ReduceOnPlateau::ReduceOnPlateau(torch::optim::Optimizer& optimizer, ReduceOnPlateauOptions options)
    : optimizer_(&optimizer), options_(std::move(options)) {
  constexpr const char* kName = "ReduceOnPlateau";
  const ReduceOnPlateauOptions& o = options_;
  expect(o.mode() == "min" || o.mode() == "max", kName, "mode", "min or max", o.mode());
  const bool relative = o.threshold_mode() == "rel";
  expect(relative || o.threshold_mode() == "abs", kName, "threshold_mode", "rel or abs", o.threshold_mode());
  expect(o.factor() >= 0 && o.factor() < 1, kName, "factor", "a number in [0, 1)", o.factor());
  expect(o.patience() >= 0, kName, "patience", "a number of at least 0", o.patience());
  expect(o.cooldown() >= 0, kName, "cooldown", "a number of at least 0", o.cooldown());
  expect(std::isfinite(o.threshold()), kName, "threshold", "a finite number", o.threshold());
  expect(o.eps() >= 0, kName, "eps", "a number of at least 0", o.eps());
  for (const double lr : o.min_lr()) expect(lr >= 0, kName, "min_lr", "a number of at least 0", lr);
  const size_t groups = optimizer.param_groups().size();
  expect(o.min_lr().size() == 1 || o.min_lr().size() == groups, kName, "min_lr",
         c10::str("one number, or one for each of the ", groups, " groups"), o.min_lr().size());
  best_ = o.mode() == "min" ? kInfinity : -kInfinity;
}

bool ReduceOnPlateau::improves(double metric) const {
  const double sign = options_.mode() == "min" ? -1 : 1, threshold = sign * options_.threshold();
  const double needed = options_.threshold_mode() == "rel" ? best_ * (1 + threshold) : best_ + threshold;
  return options_.mode() == "min" ? metric < needed : metric > needed;
}

bool ReduceOnPlateau::step(double metric) {
  expect(!std::isnan(metric), "ReduceOnPlateau", "metric", "a number", metric);
  if (improves(metric)) {
    best_ = metric;
    bad_ = 0;
  } else {
    ++bad_;
  }
  if (cooling_ > 0) {
    --cooling_;
    bad_ = 0;
  }
  if (bad_ <= options_.patience()) return false;
  cooling_ = options_.cooldown();
  bad_ = 0;
  const auto& least = options_.min_lr();
  for (size_t g = 0; g < optimizer_->param_groups().size(); ++g) {
    OptimizerOptions& group = optimizer_->param_groups()[g].options();
    const double lr = group.get_lr(),
                 lower = std::max(lr * options_.factor(), least[least.size() == 1 ? 0 : g]);
    if (lr - lower > options_.eps()) group.set_lr(lower);
  }
  return true;
}

TensorDict ReduceOnPlateau::state() const {
  TensorDict state;
  state.insert("best", at::scalar_tensor(best_, at::kDouble));
  state.insert("num_bad_epochs", at::scalar_tensor(bad_, at::kLong));
  state.insert("cooldown_counter", at::scalar_tensor(cooling_, at::kLong));
  return state;
}

void ReduceOnPlateau::load_state(const TensorDict& state) {
  const double best = number_of("ReduceOnPlateau", state, "best");
  expect(!std::isnan(best), "ReduceOnPlateau", "best", "a number", best);
  const int64_t bad = count_of("ReduceOnPlateau", state, "num_bad_epochs");
  cooling_ = count_of("ReduceOnPlateau", state, "cooldown_counter");
  best_ = best;
  bad_ = bad;
}

}  // namespace shoestring::optim
