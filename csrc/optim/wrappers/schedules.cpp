#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include <shoestring/optim/schedules.h>

#include "optim/rule.h"

namespace shoestring::optim {

using detail::expect;

namespace {

void expect_step(const char* name, int64_t step) {
  expect(step >= 0, name, "step", "a number of at least 0", step);
}

}  // namespace

Schedule::Schedule(std::function<double(int64_t)> value, bool absolute)
    : value_(std::move(value)), absolute_(absolute) {}

double Schedule::operator()(int64_t step) const {
  expect_step("Schedule", step);
  return value_(step);
}

int64_t Schedule::whole(int64_t step, int64_t multiple_of) const {
  expect(multiple_of >= 1, "Schedule", "multiple_of", "a number of at least 1", multiple_of);
  const double value = (*this)(step);
  expect(std::isfinite(value) && value < 0x1p62, "Schedule", "whole", "a value below 2^62", value);
  // A value that is a multiple in exact arithmetic may be computed as slightly less.
  const double multiples = std::floor(value / static_cast<double>(multiple_of) * (1 + 1e-12));
  return std::max<int64_t>(1, static_cast<int64_t>(multiples)) * multiple_of;
}

namespace schedules {
namespace {

// Reads the options of one kind of schedule, and refuses those that the kind does not take.
class Reader {
 public:
  Reader(const char* name, const ScheduleOptions& options) : name_(name), options_(options) {}

  template <class T>
  T take(const char* option, const std::optional<T>& given, T otherwise) {
    taken_.emplace_back(option);
    return given.value_or(otherwise);
  }
  template <class T, class Holds>
  T take(const char* option, const std::optional<T>& given, T otherwise, const char* expected, Holds holds) {
    const T value = take(option, given, otherwise);
    expect(holds(value), name_, option, expected, value);
    return value;
  }
  int64_t steps() {
    expect(options_.steps().has_value(), name_, "steps", "the number of steps of the training", "none");
    return take("steps", options_.steps(), int64_t{0}, "a number of at least 1",
                [](int64_t n) { return n >= 1; });
  }
  double fraction(const char* option, const std::optional<double>& given, double otherwise) {
    return take(option, given, otherwise, "a number of at least 0",
                [](double x) { return x >= 0 && std::isfinite(x); });
  }
  double share(const char* option, const std::optional<double>& given, double otherwise) {
    return take(option, given, otherwise, "a number in [0, 1]", [](double x) { return x >= 0 && x <= 1; });
  }
  std::string shape(const char* otherwise, const std::vector<std::string>& shapes) {
    const std::string chosen = take("shape", options_.shape(), std::string(otherwise));
    std::string expected;
    for (const std::string& shape : shapes) expected += (expected.empty() ? "" : " or ") + shape;
    expect(std::find(shapes.begin(), shapes.end(), chosen) != shapes.end(), name_, "shape", expected, chosen);
    return chosen;
  }
  // Raises if an option is set that take() was not called for.
  void finish() const {
    const auto refuse = [&](const char* option, const auto& given) {
      const bool taken = std::find(taken_.begin(), taken_.end(), option) != taken_.end();
      expect(taken || !given.has_value(), name_, option, "no value, since this schedule does not take it",
             "one");
    };
    refuse("steps", options_.steps());
    refuse("warmup", options_.warmup());
    refuse("warmup_start", options_.warmup_start());
    refuse("end", options_.end());
    refuse("start", options_.start());
    refuse("rise", options_.rise());
    refuse("flat", options_.flat());
    refuse("decay", options_.decay());
    refuse("shape", options_.shape());
    refuse("power", options_.power());
    refuse("cycles", options_.cycles());
    refuse("timescale", options_.timescale());
  }

 private:
  const char* name_;
  const ScheduleOptions& options_;
  std::vector<std::string> taken_;
};

// The steps of a schedule: a warm-up, and the steps after it.
struct Steps {
  int64_t warmup, after;
  double start;

  // Returns the share of the steps after the warm-up that lie before `step`.
  double share(int64_t step) const {
    return after > 0 ? std::min(1.0, static_cast<double>(step - warmup) / static_cast<double>(after)) : 1.0;
  }
};

int64_t warmup_of(Reader& reader, const ScheduleOptions& o) {
  return reader.take("warmup", o.warmup(), int64_t{0}, "a number of at least 0",
                     [](int64_t n) { return n >= 0; });
}

double start_of(Reader& reader, const ScheduleOptions& o, int64_t warmup) {
  return reader.fraction("warmup_start", o.warmup_start(), 1.0 / static_cast<double>(warmup + 1));
}

Steps steps_of(const char* name, Reader& reader, const ScheduleOptions& o) {
  const int64_t steps = reader.steps(), warmup = warmup_of(reader, o);
  expect(warmup <= steps, name, "warmup", c10::str("at most the ", steps, " steps"), warmup);
  return {warmup, steps - warmup, start_of(reader, o, warmup)};
}

// Finishes reading, and returns the schedule: the warm-up, then peak * factor(step).
template <class Factor>
Schedule make(const char* name, Reader& reader, const ScheduleOptions& o, Steps steps, Factor factor) {
  reader.finish();
  const double peak = o.peak().value_or(1);
  expect(std::isfinite(peak), name, "peak", "a finite number", peak);
  return {[=](int64_t step) {
            if (step >= steps.warmup) return peak * factor(step);
            const double share = static_cast<double>(step) / static_cast<double>(steps.warmup);
            return peak * (steps.start + (1 - steps.start) * share);
          },
          o.peak().has_value()};
}

// Returns the factor that falls from 1 to `end` while `left` falls from 1 to 0.
double between(double end, double left) { return end + (1 - end) * left; }
double cosine_of(double share) { return (1 + std::cos(std::numbers::pi * share)) / 2; }

}  // namespace

Schedule constant(const ScheduleOptions& o) {
  Reader reader("constant", o);
  const int64_t warmup = warmup_of(reader, o);
  return make("constant", reader, o, {warmup, 0, start_of(reader, o, warmup)}, [](int64_t) { return 1.0; });
}

Schedule linear(const ScheduleOptions& o) {
  Reader reader("linear", o);
  const Steps steps = steps_of("linear", reader, o);
  const double end = reader.fraction("end", o.end(), 0);
  return make("linear", reader, o, steps, [=](int64_t step) { return between(end, 1 - steps.share(step)); });
}

Schedule cosine(const ScheduleOptions& o) {
  Reader reader("cosine", o);
  const Steps steps = steps_of("cosine", reader, o);
  const double end = reader.fraction("end", o.end(), 0);
  const int64_t cycles = reader.take("cycles", o.cycles(), int64_t{1}, "a number from 1 to 1,000,000",
                                     [](int64_t n) { return n >= 1 && n <= 1'000'000; });
  return make("cosine", reader, o, steps, [=](int64_t step) {
    const int64_t done = step - steps.warmup;
    if (done >= steps.after) return end;
    // In whole numbers, so that a cycle begins exactly at its first step.
    const int64_t within = static_cast<int64_t>(static_cast<__int128>(done) * cycles % steps.after);
    return between(end, cosine_of(static_cast<double>(within) / static_cast<double>(steps.after)));
  });
}

Schedule one_cycle(const ScheduleOptions& o) {
  Reader reader("one_cycle", o);
  const double last = static_cast<double>(reader.steps()) - 1;
  const double start = reader.fraction("start", o.start(), 1.0 / 25),
               end = reader.fraction("end", o.end(), 4e-6);
  const double top = std::max(0.0, reader.share("rise", o.rise(), 0.3) * (last + 1) - 1);
  const bool straight = reader.shape("cosine", {"cosine", "linear"}) == "linear";
  return make("one_cycle", reader, o, {0, 0, 1}, [=](int64_t number) {
    const double step = std::min(static_cast<double>(number), last);
    const auto from = [&](double first, double second, double share) {
      return first + (second - first) * (straight ? share : 1 - cosine_of(share));
    };
    if (step <= top && top > 0) return from(start, 1, step / top);
    return from(1, end, last > top ? (step - top) / (last - top) : 1);
  });
}

Schedule flat_cos(const ScheduleOptions& o) {
  Reader reader("flat_cos", o);
  const Steps steps = steps_of("flat_cos", reader, o);
  const double end = reader.fraction("end", o.end(), 0), flat = reader.share("flat", o.flat(), 0.72);
  return make("flat_cos", reader, o, steps, [=](int64_t step) {
    const double share = steps.share(step);
    return share <= flat && flat < 1 ? 1.0
                                     : between(end, cosine_of(flat < 1 ? (share - flat) / (1 - flat) : 0));
  });
}

Schedule wsd(const ScheduleOptions& o) {
  Reader reader("wsd", o);
  const Steps steps = steps_of("wsd", reader, o);
  const double end = reader.fraction("end", o.end(), 0);
  const double decay =
      reader.take("decay", o.decay(), 0.2, "a number in (0, 1]", [](double x) { return x > 0 && x <= 1; });
  const std::string shape = reader.shape("linear", {"linear", "cosine", "sqrt"});
  return make("wsd", reader, o, steps, [=](int64_t step) {
    const double left = std::min(1.0, (1 - steps.share(step)) / decay);
    if (shape == "cosine") return between(end, cosine_of(1 - left));
    return between(end, shape == "sqrt" ? 1 - std::sqrt(1 - left) : left);
  });
}

Schedule inverse_sqrt(const ScheduleOptions& o) {
  Reader reader("inverse_sqrt", o);
  const int64_t warmup = warmup_of(reader, o);
  const auto scale =
      static_cast<double>(reader.take("timescale", o.timescale(), warmup > 0 ? warmup : int64_t{10'000},
                                      "a number of at least 1", [](int64_t n) { return n >= 1; }));
  return make("inverse_sqrt", reader, o, {warmup, 0, start_of(reader, o, warmup)}, [=](int64_t step) {
    return 1 / std::sqrt((static_cast<double>(step - warmup) + scale) / scale);
  });
}

Schedule polynomial(const ScheduleOptions& o) {
  Reader reader("polynomial", o);
  const Steps steps = steps_of("polynomial", reader, o);
  const double end = reader.fraction("end", o.end(), 0);
  const double power = reader.fraction("power", o.power(), 1);
  return make("polynomial", reader, o, steps,
              [=](int64_t step) { return between(end, std::pow(1 - steps.share(step), power)); });
}

Schedule by_name(const std::string& name, const ScheduleOptions& options) {
  static const std::map<std::string, Schedule (*)(const ScheduleOptions&)> kSchedules{
      {"constant", constant},         {"linear", linear},        {"cosine", cosine},
      {"one_cycle", one_cycle},       {"flat_cos", flat_cos},    {"wsd", wsd},
      {"inverse_sqrt", inverse_sqrt}, {"polynomial", polynomial}};
  const auto schedule = kSchedules.find(name);
  std::string names;
  for (const auto& entry : kSchedules) names += (names.empty() ? "" : ", ") + entry.first;
  expect(schedule != kSchedules.end(), "schedules", "name", "one of " + names, name);
  return schedule->second(options);
}

}  // namespace schedules
}  // namespace shoestring::optim
