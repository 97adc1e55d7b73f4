#include <type_traits>

#include <torch/serialize/archive.h>

#include "optim/core/arena.h"
#include "optim/rule.h"

namespace shoestring::optim {
namespace detail {
namespace {

// Calls visit(x) for each number of an option.
void each_number(const std::string&, const auto&) {}
void each_number(bool, const auto&) {}
void each_number(double x, const auto& visit) { visit(x); }
void each_number(int64_t x, const auto& visit) { visit(static_cast<double>(x)); }
void each_number(const std::vector<double>& several, const auto& visit) {
  for (const double x : several) visit(x);
}
template <class T>
void each_number(const std::optional<T>& x, const auto& visit) {
  if (x) each_number(*x, visit);
}

const char* type_name(const double*) { return "a number"; }
const char* type_name(const int64_t*) { return "a whole number"; }
const char* type_name(const bool*) { return "True or False"; }
const char* type_name(const std::string*) { return "a string"; }
const char* type_name(const std::vector<double>*) { return "numbers"; }
template <class T>
const char* type_name(const std::optional<T>*) {
  return std::is_same_v<T, std::string> ? "None or a string" : "None or a number";
}
template <class... T>
const char* type_name(const std::tuple<T...>*) {
  return sizeof...(T) == 2 ? "two numbers" : "three numbers";
}

std::string expected_of(const char* type, const Allowed* allowed) {
  return allowed == nullptr ? type : c10::str(type, " ", allowed->expected);
}

// An operator takes each element of a tuple as an argument of its own.
[[noreturn]] void refuse(const Field& field, const Reporter& reporter) {
  std::string received;
  each_value(field, [&](const char* name, const auto& value) {
    each_number(value, [&](double x) {
      if (reporter.is_operator && !field.allowed->holds(x))
        reporter.refuse(name, expected_of(type_name(&value), field.allowed), x);
      received += c10::str(received.empty() ? "" : " and ", x);
    });
  });
  reporter.refuse(field.name, expected_of(field), received);
}

template <size_t n>
void check_choice(std::string_view name, const char* option, const char* const (&choices)[n],
                  const std::string& received) {
  std::string expected;
  bool is_choice = false;
  for (const char* choice : choices) {
    expected += c10::str(expected.empty() ? "" : " or ", "\"", choice, "\"");
    is_choice |= received == choice;
  }
  expect(is_choice, name, option, expected, "\"" + received + "\"");
}

}  // namespace

std::string expected_of(const Field& field) {
  return expected_of(std::visit([](const auto* value) { return type_name(value); }, field.value),
                     field.allowed);
}

void check_ranges(const std::vector<Field>& fields, const Reporter& reporter) {
  for (const Field& field : fields) {
    if (field.allowed == nullptr) continue;
    bool good = true;
    const auto check = [&](double x) { good &= field.allowed->holds(x); };
    each_value(field, [&](const char*, const auto& value) { each_number(value, check); });
    if (!good) refuse(field, reporter);
  }
}

std::vector<Field> Access::fields(const LowMemoryOptions& options) {
  auto& o = const_cast<LowMemoryOptions&>(options);
  std::vector<Field> all{{"lr", &o.lr_, &kLrRange},
                         {"maximize", &o.maximize_},
                         {"state_format", &o.state_format_},
                         {"weight_rounding", &o.weight_rounding_},
                         {"min_quantize_size", &o.min_quantize_size_, &kAtLeastZero},
                         {"seed", &o.seed_}};
  for (const Field& field : o.fields()) all.push_back(field);
  return all;
}

void Access::check(const LowMemoryOptions& options, std::string_view name) {
  const Reporter reporter{name, /*is_operator=*/false};
  check_ranges(fields(options), reporter);
  check_choice(name, "state_format", kStates, options.state_format_);
  check_choice(name, "weight_rounding", kRoundings, options.weight_rounding_);
  options.check(reporter);
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
    detail::each_value(field,
                       [&](const char* name, const auto& value) { archive.write(name, c10::IValue(value)); });
  }
}

void LowMemoryOptions::serialize(torch::serialize::InputArchive& archive) {
  for (const auto& field : detail::Access::fields(*this)) {
    detail::each_value(field, [&](const char* name, auto& value) {
      c10::IValue read;
      archive.read(name, read);
      value = read.to<std::remove_reference_t<decltype(value)>>();
    });
  }
}

}  // namespace shoestring::optim
