#pragma once

// The interface between LowMemoryOptimizer and the optimizer classes. Each class provides an options type, a
// list of the options' fields, and a Rule (its operator and state).

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include <shoestring/optim/base.h>

#include "core/call.h"

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
inline constexpr Allowed kAtMostZero{"of at most 0", [](double x) { return x <= 0; }};
inline constexpr Allowed kAtLeastOne{"of at least 1", [](double x) { return x >= 1; }};
inline constexpr Allowed kFraction{"in [0, 1)", [](double x) { return x >= 0 && x < 1; }};
inline constexpr Allowed kFinite{"that is finite", [](double x) { return x - x == 0; }};

/// One option of an optimizer. It is saved, loaded, checked, and passed to the operator under its name. The
/// elements of a tuple get numbers: eps is passed as eps1 and eps2, betas as beta1 and beta2.
struct Field {
  using Value = std::variant<double*, int64_t*, bool*, std::string*, std::optional<std::string>*,
                             std::optional<int64_t>*, std::vector<double>*, std::tuple<double, double>*,
                             std::tuple<double, double, double>*, std::tuple<std::optional<double>, double>*>;
  const char* name;
  Value value;
  const Allowed* allowed = nullptr;  // allowed range of a numeric option; null allows any value
  // Whether the optimizer's operator has an argument with the name of this option. If not, the option is only
  // saved and loaded.
  bool of_operator = true;
};

/// One moment (running mean) of an update rule: its name, whether it can be negative, and whether it is long.
/// A long moment changes per step by less than one quantisation level.
struct Moment {
  const char* name;
  bool is_signed;
  bool is_long = false;
};

/// An fp32 tensor of a parameter's state that is stored outside the arenas, such as Adafactor's row means.
struct Extra {
  const char* name;
  std::vector<int64_t> shape;
};

/// An optimizer class: its name, its operator, and the state that the operator needs.
struct Rule {
  const char* name;  // name of the class in errors and files
  // Name of the operator that takes a step. Its arguments are the optimizer's options, the moments, and the
  // arguments that all optimizers share (optim/schema.cpp).
  const char* op;
  std::vector<Moment> moments;
  /// Returns the extra tensors of a parameter's state. Every parameter has extra tensors of the same names,
  /// since the operator takes one list per name.
  std::vector<Extra> (*extra_of)(const Tensor& param) = nullptr;
  bool takes_matrices_alone = false;
  // Whether the operator must get all blocks of a parameter in one call. Not used if extra_of or
  // takes_matrices_alone is set, because such an operator always needs all blocks.
  bool takes_whole_parameters = false;

  std::vector<Extra> extra(const Tensor& param) const {
    return extra_of == nullptr ? std::vector<Extra>() : extra_of(param);
  }
  bool takes_parts() const { return extra_of == nullptr && !takes_matrices_alone && !takes_whole_parameters; }
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
  /// Raises c10::Error if an option is out of range.
  static void check(const LowMemoryOptions& options);
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

/// Returns the values of an option as named arguments of the operator.
NamedArguments values(const Field& field);

/// Returns the values that an option may have, for messages: "two numbers in [0, 1)".
std::string expected_of(const Field& field);

/// Raises an error unless `good` is true. The message contains the class, the option, the expected value and
/// the received value.
template <class Received>
void expect(bool good, const char* name, const char* option, const std::string& expected,
            const Received& received) {
  TORCH_CHECK(good, "shoestring::optim::", name, ": ", option, ": expected ", expected, ", received ",
              received);
}

}  // namespace shoestring::optim::detail
