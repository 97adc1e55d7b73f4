#include <type_traits>

#include <torch/serialize/archive.h>

#include "optim/arena.h"
#include "optim/rule.h"

namespace shoestring::optim {
namespace detail {
namespace {

// Returns the argument name of one element of a tuple option: "beta2" for ("betas", 2), "eps2" for ("eps",
// 2).
std::string numbered(const std::string& name, int number) {
  return (name == "betas" ? "beta" : name) + std::to_string(number);
}

template <class T>
NamedArguments values_of(const std::string& name, const T& value) {
  return {{name, c10::IValue(value)}};
}

template <class... T>
NamedArguments values_of(const std::string& name, const std::tuple<T...>& several) {
  NamedArguments all;
  int number = 0;
  std::apply(
      [&](const T&... value) { (all.emplace_back(numbered(name, ++number), c10::IValue(value)), ...); },
      several);
  return all;
}

template <class T>
void read_option(torch::serialize::InputArchive& archive, const std::string& name, T& value) {
  c10::IValue read;
  archive.read(name, read);
  value = read.to<T>();
}

template <class... T>
void read_option(torch::serialize::InputArchive& archive, const std::string& name,
                 std::tuple<T...>& several) {
  int number = 0;
  std::apply([&](T&... value) { (read_option(archive, numbered(name, ++number), value), ...); }, several);
}

void numbers_of(std::vector<double>& all, double x) { all.push_back(x); }
void numbers_of(std::vector<double>&, const std::string&) {}
void numbers_of(std::vector<double>&, const std::optional<std::string>&) {}
void numbers_of(std::vector<double>& all, const std::vector<double>& several) {
  all.insert(all.end(), several.begin(), several.end());
}
template <class T>
void numbers_of(std::vector<double>& all, const std::optional<T>& x) {
  if (x) all.push_back(static_cast<double>(*x));
}
template <class... T>
void numbers_of(std::vector<double>& all, const std::tuple<T...>& several) {
  std::apply([&](const T&... x) { (numbers_of(all, x), ...); }, several);
}

const char* type_name(const double*) { return "a number"; }
const char* type_name(const int64_t*) { return "a whole number"; }
const char* type_name(const bool*) { return "True or False"; }
const char* type_name(const std::string*) { return "a string"; }
const char* type_name(const std::vector<double>*) { return "numbers"; }
template <class T>
const char* type_name(const std::optional<T>*) {
  return std::is_same_v<T, std::string> ? "a string" : "a number";
}
template <class... T>
const char* type_name(const std::tuple<T...>*) {
  return sizeof...(T) == 2 ? "two numbers" : "three numbers";
}

void check_numbers(const char* rule, const Field& field) {
  std::vector<double> numbers;
  std::visit([&](const auto* value) { numbers_of(numbers, *value); }, field.value);
  std::string received;
  bool good = true;
  for (const double x : numbers) {
    received += c10::str(received.empty() ? "" : " and ", x);
    good &= field.allowed->holds(x);
  }
  expect(good, rule, field.name, expected_of(field), received);
}

template <size_t n>
void check_choice(const char* rule, const char* option, const char* const (&choices)[n],
                  const std::string& received) {
  std::string expected;
  bool found = false;
  for (const char* choice : choices) {
    expected += c10::str(expected.empty() ? "" : " or ", "\"", choice, "\"");
    found |= received == choice;
  }
  expect(found, rule, option, expected, "\"" + received + "\"");
}

}  // namespace

std::string expected_of(const Field& field) {
  const std::string type = std::visit([](const auto* value) { return type_name(value); }, field.value);
  return field.allowed == nullptr ? type : type + " " + field.allowed->expected;
}

NamedArguments values(const Field& field) {
  return std::visit([&](const auto* value) { return values_of(field.name, *value); }, field.value);
}

std::vector<Field> Access::fields(const LowMemoryOptions& options) {
  auto& o = const_cast<LowMemoryOptions&>(options);
  std::vector<Field> all{{"lr", &o.lr_, &kAtLeastZero},
                         {"maximize", &o.maximize_},
                         {"state_format", &o.state_format_},
                         {"weight_rounding", &o.weight_rounding_},
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
  check_choice(rule, "state_format", kStates, options.state_format_);
  check_choice(rule, "weight_rounding", kRoundings, options.weight_rounding_);
  options.check();
}

void Access::assign(torch::optim::OptimizerOptions& to, const torch::optim::OptimizerOptions& from) {
  const auto ours = fields(static_cast<LowMemoryOptions&>(to));
  const auto theirs = fields(static_cast<const LowMemoryOptions&>(from));
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
  for (const auto& field : detail::Access::fields(*this)) {
    std::visit([&](auto* value) { detail::read_option(archive, field.name, *value); }, field.value);
  }
}

}  // namespace shoestring::optim
