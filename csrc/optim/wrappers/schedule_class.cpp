// Registers the class Schedule, with which Python evaluates schedules.

#include <map>

#include <ATen/core/Dict.h>
#include <shoestring/optim/schedules.h>
#include <torch/custom_class.h>
#include <torch/library.h>

namespace shoestring::optim {
namespace {

using NumberDict = c10::Dict<std::string, double>;
using WholeDict = c10::Dict<std::string, int64_t>;

ScheduleOptions options_of(const NumberDict& numbers, const WholeDict& wholes,
                           const std::optional<std::string>& shape) {
  ScheduleOptions o;
  const std::map<std::string, std::optional<double>*> of_numbers{{"warmup_start", &o.warmup_start()},
                                                                 {"peak", &o.peak()},
                                                                 {"end", &o.end()},
                                                                 {"start", &o.start()},
                                                                 {"rise", &o.rise()},
                                                                 {"flat", &o.flat()},
                                                                 {"decay", &o.decay()},
                                                                 {"power", &o.power()}};
  const std::map<std::string, std::optional<int64_t>*> of_wholes{
      {"steps", &o.steps()}, {"warmup", &o.warmup()}, {"cycles", &o.cycles()}, {"timescale", &o.timescale()}};
  for (const auto& entry : numbers) *of_numbers.at(entry.key()) = entry.value();
  for (const auto& entry : wholes) *of_wholes.at(entry.key()) = entry.value();
  o.shape() = shape;
  return o;
}

struct BoundSchedule : torch::CustomClassHolder {
  BoundSchedule(const std::string& name, const NumberDict& numbers, const WholeDict& wholes,
                const std::optional<std::string>& shape)
      : schedule(schedules::by_name(name, options_of(numbers, wholes, shape))) {}

  double value(int64_t step) { return schedule(step); }
  int64_t whole(int64_t step, int64_t multiple_of) { return schedule.whole(step, multiple_of); }

  Schedule schedule;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  m.class_<BoundSchedule>("Schedule")
      .def(torch::init<std::string, NumberDict, WholeDict, std::optional<std::string>>())
      .def("value", &BoundSchedule::value)
      .def("whole", &BoundSchedule::whole);
}

}  // namespace shoestring::optim
