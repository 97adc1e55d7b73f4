#include <torch/serialize/archive.h>

#include "optim/arena.h"
#include "optim/rule.h"

namespace shoestring::optim {
namespace detail {
namespace {

// betas -> beta2
std::string numbered(const std::string& name, int number) {
  return name.substr(0, name.size() - 1) + std::to_string(number);
}

template <class T>
NamedArguments values_of(const std::string& name, const T* value) {
  return {{name, c10::IValue(*value)}};
}

NamedArguments values_of(const std::string& name, const std::tuple<double, double>* pair) {
  return {{numbered(name, 1), std::get<0>(*pair)}, {numbered(name, 2), std::get<1>(*pair)}};
}

c10::IValue read(torch::serialize::InputArchive& archive, const std::string& name) {
  c10::IValue value;
  archive.read(name, value);
  return value;
}

template <class T>
void read_field(torch::serialize::InputArchive& archive, const std::string& name, T* value) {
  *value = read(archive, name).to<T>();
}

void read_field(torch::serialize::InputArchive& archive, const std::string& name, std::tuple<double, double>* pair) {
  *pair = {read(archive, numbered(name, 1)).toDouble(), read(archive, numbered(name, 2)).toDouble()};
}

void check_numbers(const char* rule, const Field& field) {
  if (const auto* one = std::get_if<double*>(&field.value)) {
    expect(field.allowed->holds(**one), rule, field.name, c10::str("a number ", field.allowed->expected), **one);
  } else if (const auto* two = std::get_if<std::tuple<double, double>*>(&field.value)) {
    const auto [a, b] = **two;
    expect(field.allowed->holds(a) && field.allowed->holds(b), rule, field.name,
           c10::str("two numbers ", field.allowed->expected), c10::str(a, " and ", b));
  } else {
    const int64_t n = *std::get<int64_t*>(field.value);
    expect(field.allowed->holds(static_cast<double>(n)), rule, field.name,
           c10::str("a whole number ", field.allowed->expected), n);
  }
}

template <size_t n>
void check_choice(const char* rule, const char* option, const char* const (&choices)[n], const std::string& received) {
  std::string expected;
  bool found = false;
  for (const char* choice : choices) {
    expected += c10::str(expected.empty() ? "" : " or ", "\"", choice, "\"");
    found |= received == choice;
  }
  expect(found, rule, option, expected, "\"" + received + "\"");
}

}  // namespace

NamedArguments values(const Field& field) {
  return std::visit([&](const auto* value) { return values_of(field.name, value); }, field.value);
}

std::vector<Field> Access::fields(const LowMemoryOptions& options) {
  auto& o = const_cast<LowMemoryOptions&>(options);
  std::vector<Field> all{{"lr", &o.lr_, &kAtLeastZero},
                         {"maximize", &o.maximize_},
                         {"state", &o.state_},
                         {"weights", &o.weights_},
                         {"min_quantize_size", &o.min_quantize_size_, &kAtLeastZero},
                         {"seed", &o.seed_}};
  for (const Field& field : o.fields()) all.push_back(field);
  return all;
}

void Access::check(const LowMemoryOptions& options) {
  const char* rule = options.rule().name;
  for (const Field& field : fields(options)) {
    if (field.allowed != nullptr) check_numbers(rule, field);
  }
  check_choice(rule, "state", kStates, options.state_);
  check_choice(rule, "weights", kWeights, options.weights_);
  options.check();
}

void Access::assign(torch::optim::OptimizerOptions& to, const torch::optim::OptimizerOptions& from) {
  const auto ours = fields(static_cast<LowMemoryOptions&>(to)), theirs = fields(static_cast<const LowMemoryOptions&>(from));
  for (size_t i = 0; i < ours.size(); ++i) {
    std::visit([&](auto* value) { *value = *std::get<decltype(value)>(theirs[i].value); }, ours[i].value);
  }
}

}  // namespace detail

void LowMemoryOptions::serialize(torch::serialize::OutputArchive& archive) const {
  for (const auto& field : detail::Access::fields(*this)) {
    for (const auto& [name, value] : detail::values(field)) archive.write(name, value);
  }
}

void LowMemoryOptions::serialize(torch::serialize::InputArchive& archive) {
  // The first archives do not have these.
  weights_ = "plain";
  min_quantize_size_ = seed_ = 0;
  c10::IValue weights;
  const bool first = !archive.try_read("weights", weights);
  for (const auto& field : detail::Access::fields(*this)) {
    const std::string name = field.name;
    if (first && (name == "weights" || name == "min_quantize_size" || name == "seed")) continue;
    std::visit([&](auto* value) { detail::read_field(archive, name, value); }, field.value);
  }
}

}  // namespace shoestring::optim
