#pragma once

// The interface between LowMemoryOptimizer, the optimizer classes and their operators. Each class provides a
// type of options, a list of the options' fields, and a Rule (its operator and state). The schema of the
// operator, and how it reads and checks its options, follow from them (optim/optimizer.h).

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <variant>
#include <vector>

#include <shoestring/optim/base.h>

namespace shoestring::optim::detail {

using at::Tensor;

/// The allowed range of a numeric option. `holds` checks a number. Error messages append `expected` to "a
/// number".
struct Allowed {
  const char* expected;
  bool (*holds)(double);
};
inline constexpr Allowed kAtLeastZero{"of at least 0", [](double x) { return x >= 0; }};
inline constexpr Allowed kAboveZero{"above 0", [](double x) { return x > 0; }};
inline constexpr Allowed kSteps{"of steps", [](double x) { return x > 0; }};
inline constexpr Allowed kAtMostZero{"of at most 0", [](double x) { return x <= 0; }};
inline constexpr Allowed kAtLeastOne{"of at least 1", [](double x) { return x >= 1; }};
inline constexpr Allowed kFraction{"in [0, 1)", [](double x) { return x >= 0 && x < 1; }};
inline constexpr Allowed kFinite{"that is finite", [](double x) { return x - x == 0; }};
inline constexpr const Allowed& kLrRange = kAtLeastZero;

/// How the optimizer's operator takes an option: as an argument without a default, as an argument whose
/// default is that of the option, or not at all. An option that the operator does not take is only saved and
/// loaded.
enum class Argument { kRequired, kOptional, kNone };

/// One option of an optimizer. It is saved, loaded, checked, and passed to the operator under its name. The
/// elements of a tuple get numbers: eps is passed as eps1 and eps2, betas as beta1 and beta2.
struct Field {
  using Value = std::variant<double*, int64_t*, bool*, std::string*, std::optional<std::string>*,
                             std::optional<int64_t>*, std::vector<double>*, std::tuple<double, double>*,
                             std::tuple<double, double, double>*, std::tuple<std::optional<double>, double>*>;
  const char* name;
  Value value;
  const Allowed* allowed = nullptr;  // allowed range of a numeric option; null allows any value
  Argument argument = Argument::kRequired;
};

/// Returns the name of one element of a tuple option: "beta2" for ("betas", 2), "eps2" for ("eps", 2).
inline std::string numbered(std::string name, int number) {
  if (name == "betas") name.pop_back();
  return name += static_cast<char>('0' + number);
}

/// Calls visit(name, value) for the value of an option, or for each element of a tuple.
template <class Visit>
void each_value(const Field& field, const Visit& visit) {
  const auto one = [&](auto& value) { visit(field.name, value); };
  const auto several = [&](auto&... value) {
    int number = 0;
    (visit(numbered(field.name, ++number).c_str(), value), ...);
  };
  std::visit(
      [&](auto* value) {
        if constexpr (requires { std::tuple_size<std::remove_pointer_t<decltype(value)>>::value; }) {
          std::apply(several, *value);
        } else {
          one(*value);
        }
      },
      field.value);
}

/// Visits the options that the operator takes; see core/arguments.h.
template <class Visitor>
void visit_arguments(const std::vector<Field>& fields, Visitor& visit) {
  for (const Field& field : fields) {
    if (field.argument == Argument::kNone) continue;
    each_value(field, [&](const char* name, auto& value) {
      field.argument == Argument::kRequired ? visit.required(name, value) : visit(name, value);
    });
  }
}

/// Raises errors about the options of an optimizer class, or about the arguments of an operator.
struct Reporter {
  std::string_view name;  // of the class or of the operator
  bool is_operator;

  template <class Received>
  [[noreturn]] void refuse(const std::string& option, const std::string& expected,
                           const Received& received) const {
    TORCH_CHECK(!is_operator, name, ": ", option, ": expected ", expected, ", received ", received);
    TORCH_CHECK_VALUE(false, name, ": ", option, ": expected ", expected, ", received ", received);
  }
  /// Refuses one element of a tuple option, which an operator takes as an argument of its own. `expected`
  /// continues "a number".
  template <class Received>
  [[noreturn]] void refuse_element(const char* option, int number, const char* expected,
                                   const Received& received) const {
    constexpr const char* kOrdinals[] = {"first", "second", "third"};
    if (is_operator) refuse(numbered(option, number), c10::str("a number ", expected), received);
    refuse(option, c10::str("a ", kOrdinals[number - 1], " number ", expected), received);
  }
};

/// Raises an error unless the values of all options are in their allowed ranges.
void check_ranges(const std::vector<Field>& fields, const Reporter& reporter);

/// One moment (running mean) of an update rule: its name, the name of its scales, whether it can be negative,
/// and whether it is long. A long moment changes per step by less than one quantisation level. It is never
/// stored as codes and has no scales.
struct Moment {
  Moment(const char* name, bool is_signed, bool is_long = false)
      : name(name), scale(this->name + "_scale"), is_signed(is_signed), is_long(is_long) {}

  std::string name, scale;
  bool is_signed, is_long;
  // is_optional: whether the operator accepts None. is_kept: whether these options have the moment.
  bool is_optional = false, is_kept = true;
};

/// An fp32 tensor of a parameter's state that is stored outside the arenas, such as Adafactor's row means,
/// and its shape.
struct Extra {
  const char* name;
  std::vector<int64_t> (*shape_of)(const Tensor& param);
  // Whether the tensor, unless it is empty, has an element for each one of the parameter. Processes that
  // split the parameter split it, too. Each of them has any other tensor in whole.
  bool is_elementwise = false;
};

/// An optimizer class: its name, its operator, and the state that the operator needs.
struct Rule {
  const char* name;  // name of the class in errors and files
  // Name of the operator that takes a step. Its arguments are the optimizer's options, the moments, and the
  // arguments that all optimizers share (optim/schema.cpp).
  const char* op;
  std::vector<Moment> moments{};
  // The extra tensors of every parameter's state. The operator takes one list per name.
  std::vector<Extra> extras{};
  bool takes_matrices_alone = false;
  // Whether the operator must get all blocks of a parameter in one call. Not used if there are extra tensors
  // or takes_matrices_alone is set, because such an operator always needs all blocks. It communicates if
  // processes have split a parameter (split_params.h).
  bool takes_whole_parameters = false;

  bool takes_parts() const { return extras.empty() && !takes_matrices_alone && !takes_whole_parameters; }
};

/// Gives the implementation access to private members of the public optimizer classes.
struct Access {
  static const Rule& rule(const LowMemoryOptions& options) { return options.rule(); }
  /// Returns the options that only this optimizer class has. (fields() also returns the options that all
  /// classes share.) The pointers refer to `options`; only loading a saved state writes through them.
  static std::vector<Field> own_fields(const LowMemoryOptions& options) {
    return const_cast<LowMemoryOptions&>(options).fields();
  }
  static std::vector<Field> fields(const LowMemoryOptions& options);
  /// Raises c10::ValueError if an option is out of range. `name` begins the message.
  static void check(const LowMemoryOptions& options, std::string_view name);
  /// Raises an error if options do not fit together.
  static void check_together(const LowMemoryOptions& options, const Reporter& reporter) {
    options.check(reporter);
  }
  /// Copies the values of all options. `to` and `from` must have the same class.
  static void assign(torch::optim::OptimizerOptions& to, const torch::optim::OptimizerOptions& from);
  static bool maximize(const LowMemoryOptions& o) { return o.maximize_; }
  static void check_step(const LowMemoryOptions& o) { o.check_step(); }
  static const std::string& state_format(const LowMemoryOptions& o) { return o.state_format_; }
  static const std::string& weight_rounding(const LowMemoryOptions& o) { return o.weight_rounding_; }
  static int64_t min_quantize_size(const LowMemoryOptions& o) { return o.min_quantize_size_; }
  static int64_t seed(const LowMemoryOptions& o) { return o.seed_; }
  static Tensor& lr_tensor(LowMemoryOptions& o) { return o.lr_tensor_; }
  static const Tensor& lr_tensor(const LowMemoryOptions& o) { return o.lr_tensor_; }

  static Core& core(const LowMemoryOptimizer& optimizer) { return *optimizer.core_; }
};

/// Returns the values that an option may have, for messages: "two numbers in [0, 1)".
std::string expected_of(const Field& field);

/// Raises c10::ValueError, which is a ValueError in Python, unless `good` is true. The message contains the
/// class, the option, the expected value and the received value.
template <class Received>
void expect(bool good, std::string_view name, std::string_view option, std::string_view expected,
            const Received& received) {
  TORCH_CHECK_VALUE(good, name, ": ", option, ": expected ", expected, ", received ", received);
}

}  // namespace shoestring::optim::detail
