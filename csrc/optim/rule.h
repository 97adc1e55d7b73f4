#pragma once

// The interface between LowMemoryOptimizer and the optimizer classes. A class consists of its options, a list
// of the options' fields, and a rule.

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

/// The range of a number. `expected` is appended to "a number" in error messages.
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

/// A field of an options struct. It is saved, loaded, checked, and passed to the operator under its name. The
/// elements of a tuple get a number: eps1, eps2; those of betas are called beta1, beta2.
struct Field {
  using Value = std::variant<double*, int64_t*, bool*, std::string*, std::optional<std::string>*,
                             std::optional<int64_t>*, std::vector<double>*, std::tuple<double, double>*,
                             std::tuple<double, double, double>*, std::tuple<std::optional<double>, double>*>;
  const char* name;
  Value value;
  const Allowed* allowed = nullptr;  // range of a number; null for any value
  // Whether the operator has this argument; if not, the field is only saved and loaded.
  bool of_operator = true;
};

/// One of a rule's running means: its name, whether it can be negative, and whether it is long. A long moment
/// changes per step by less than one quantisation level.
struct Moment {
  const char* name;
  bool is_signed;
  bool is_long = false;
};

/// An fp32 tensor of a parameter that is stored outside the arenas.
struct Extra {
  const char* name;
  std::vector<int64_t> shape;
};

/// An optimizer class: its name, its operator, and the state that the operator needs.
struct Rule {
  const char* name;  // name of the class in errors and files
  // Name of the operator. It is called with the options' fields, the moments, and the arguments of
  // optim/optimizer.h.
  const char* op;
  std::vector<Moment> moments;
  /// Returns the extra tensors of a parameter. Their names are the same for every parameter, since the
  /// operator takes one list per name.
  std::vector<Extra> (*extra_of)(const Tensor& param) = nullptr;
  bool takes_matrices_alone = false;
  // Whether the operator needs whole parameters. Operators with extra_of or takes_matrices_alone always do.
  bool takes_whole_parameters = false;

  std::vector<Extra> extra(const Tensor& param) const {
    return extra_of == nullptr ? std::vector<Extra>() : extra_of(param);
  }
  bool takes_parts() const { return extra_of == nullptr && !takes_matrices_alone && !takes_whole_parameters; }
};

/// Access to the private members of the public classes.
struct Access {
  static const Rule& rule(const LowMemoryOptions& options) { return options.rule(); }
  /// Returns the rule's own fields (fields() returns all). The pointers refer to the options, which only a
  /// load modifies.
  static std::vector<Field> own_fields(const LowMemoryOptions& options) {
    return const_cast<LowMemoryOptions&>(options).fields();
  }
  static std::vector<Field> fields(const LowMemoryOptions& options);
  /// Raises c10::Error if an option is out of range.
  static void check(const LowMemoryOptions& options);
  /// Copies all fields. Both options must have the same class.
  static void assign(torch::optim::OptimizerOptions& to, const torch::optim::OptimizerOptions& from);
  static bool maximize(const LowMemoryOptions& o) { return o.maximize_; }
  static void check_step(const LowMemoryOptions& o) { o.check_step(); }
  static const std::string& state(const LowMemoryOptions& o) { return o.state_; }
  static const std::string& weights(const LowMemoryOptions& o) { return o.weights_; }
  static int64_t min_quantize_size(const LowMemoryOptions& o) { return o.min_quantize_size_; }
  static int64_t seed(const LowMemoryOptions& o) { return o.seed_; }

  static Core& core(const LowMemoryOptimizer& optimizer) { return *optimizer.core_; }
};

/// Returns a field's values as arguments, under the operator's names.
NamedArguments values(const Field& field);

/// Raises unless `good`, with the class, the option, the expected value and the received value.
template <class Received>
void expect(bool good, const char* name, const char* option, const std::string& expected,
            const Received& received) {
  TORCH_CHECK(good, "shoestring::optim::", name, ": ", option, ": expected ", expected, ", received ",
              received);
}

}  // namespace shoestring::optim::detail
