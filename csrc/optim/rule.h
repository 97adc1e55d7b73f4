#pragma once

// Between LowMemoryOptimizer and the classes over it: a class is its options, one list of their fields, and a
// rule.

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

/// What a number may be; `expected` follows "a number".
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

/// A field of an options struct: saved and loaded, checked, and handed to the operator under this name. Those
/// of a tuple have their number behind: eps1, and of betas beta1.
struct Field {
  using Value = std::variant<double*, int64_t*, bool*, std::string*, std::optional<std::string>*,
                             std::optional<int64_t>*, std::vector<double>*, std::tuple<double, double>*,
                             std::tuple<double, double, double>*, std::tuple<std::optional<double>, double>*>;
  const char* name;
  Value value;
  const Allowed* allowed = nullptr;  // for numbers
  bool of_operator = true;           // else saved and loaded alone
};

/// One of a rule's running means, whether it may be negative, and whether it is long: changes in a step by
/// less than codes are apart.
struct Moment {
  const char* name;
  bool is_signed;
  bool is_long = false;
};

/// An fp32 tensor of a parameter beside its moments.
struct Extra {
  const char* name;
  std::vector<int64_t> shape;
};

struct Rule {
  const char* name;  // of the class, in errors and files
  const char* op;    // called with the fields of the options, the moments, and what optim/optimizer.h reads
  std::vector<Moment> moments;
  /// The same names for every parameter: the operator has a list of each.
  std::vector<Extra> (*extra_of)(const Tensor& param) = nullptr;
  bool takes_matrices_alone = false;
  bool takes_whole_parameters = false;  // the operator; one with the last two does, too

  std::vector<Extra> extra(const Tensor& param) const {
    return extra_of == nullptr ? std::vector<Extra>() : extra_of(param);
  }
  bool takes_parts() const { return extra_of == nullptr && !takes_matrices_alone && !takes_whole_parameters; }
};

/// What the public classes keep to themselves.
struct Access {
  static const Rule& rule(const LowMemoryOptions& options) { return options.rule(); }
  /// The rule's fields alone, or all. They point into the options, which only a load writes to.
  static std::vector<Field> own_fields(const LowMemoryOptions& options) {
    return const_cast<LowMemoryOptions&>(options).fields();
  }
  static std::vector<Field> fields(const LowMemoryOptions& options);
  /// Raises c10::Error where an option does not fit.
  static void check(const LowMemoryOptions& options);
  /// Copies all fields; both are of one class.
  static void assign(torch::optim::OptimizerOptions& to, const torch::optim::OptimizerOptions& from);
  static bool maximize(const LowMemoryOptions& o) { return o.maximize_; }
  static void check_step(const LowMemoryOptions& o) { o.check_step(); }
  static const std::string& state(const LowMemoryOptions& o) { return o.state_; }
  static const std::string& weights(const LowMemoryOptions& o) { return o.weights_; }
  static int64_t min_quantize_size(const LowMemoryOptions& o) { return o.min_quantize_size_; }
  static int64_t seed(const LowMemoryOptions& o) { return o.seed_; }

  static Core& core(const LowMemoryOptimizer& optimizer) { return *optimizer.core_; }
};

/// A field's values under the names of the operator's arguments.
NamedArguments values(const Field& field);

/// An error as all of these are: the class, the option, what was expected and what came.
template <class Received>
void expect(bool good, const char* name, const char* option, const std::string& expected,
            const Received& received) {
  TORCH_CHECK(good, "shoestring::optim::", name, ": ", option, ": expected ", expected, ", received ",
              received);
}

}  // namespace shoestring::optim::detail
