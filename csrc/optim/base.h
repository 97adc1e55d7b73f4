#pragma once

// Between LowMemoryOptimizer and the classes over it: a class is its options, its parameters' state, and a rule.

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <torch/optim/serialize.h>

#include <shoestring/optim.h>

#include "ops/call.h"

namespace shoestring::optim::detail {

using at::Tensor;
using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

/// A parameter's state by name: the step, then each moment and its scales (undefined for fp32 state).
template <class T>
using Parts = std::vector<std::pair<const char*, T*>>;

/// The operator that a rule calls, and the arguments that others do not have.
struct Operator {
  const char* name;
  NamedArguments arguments;
};

struct Rule {
  const char* name;  // of the class, in errors and archives
  constexpr explicit Rule(const char* name) : name(name) {}

  virtual void check(const OptimizerOptions& options) const = 0;
  virtual const std::string& state(const OptimizerOptions& options) const = 0;
  /// With lr, weight_decay and maximize among the arguments.
  virtual Operator operator_of(const OptimizerOptions& options) const = 0;
  virtual std::unique_ptr<OptimizerParamState> new_state() const = 0;
  virtual Parts<Tensor> parts(OptimizerParamState& state) const = 0;
  virtual void save(OutputArchive& archive, const Optimizer& optimizer) const = 0;
  virtual void load(InputArchive& archive, Optimizer& optimizer) const = 0;

 protected:
  ~Rule() = default;  // rules are constants
};

/// For options with lr, weight_decay and state beside the rule's own.
template <class Options, class State>
struct TypedRule : Rule {
  using Rule::Rule;
  virtual void check_own(const Options& options) const = 0;
  virtual Operator operator_own(const Options& options) const = 0;

  void check(const OptimizerOptions& any) const final {
    const auto* options = dynamic_cast<const Options*>(&any);
    TORCH_CHECK(options != nullptr, "shoestring::optim::", name, ": options: expected shoestring::optim::", name,
                "Options in every group, received those of another optimizer");
    at_least_zero("lr", options->lr());
    at_least_zero("weight_decay", options->weight_decay());
    check_own(*options);
    TORCH_CHECK(options->state() == "8bit" || options->state() == "fp32", "shoestring::optim::", name,
                ": state: expected \"8bit\" or \"fp32\", received \"", options->state(), "\"");
  }
  const std::string& state(const OptimizerOptions& any) const final { return static_cast<const Options&>(any).state(); }
  Operator operator_of(const OptimizerOptions& any) const final {
    const auto& options = static_cast<const Options&>(any);
    Operator op = operator_own(options);
    op.arguments.insert(op.arguments.end(), {{"lr", options.lr()},
                                             {"weight_decay", options.weight_decay()},
                                             {"maximize", options.maximize()}});
    return op;
  }
  std::unique_ptr<OptimizerParamState> new_state() const final { return std::make_unique<State>(); }
  void save(OutputArchive& archive, const Optimizer& o) const final {
    torch::optim::serialize<State, Options>(archive, o);
  }
  void load(InputArchive& archive, Optimizer& o) const final { torch::optim::serialize<State, Options>(archive, o); }

 protected:
  ~TypedRule() = default;
  void at_least_zero(const char* option, double number) const {
    TORCH_CHECK(number >= 0, "shoestring::optim::", name, ": ", option, ": expected a number of at least 0, received ",
                number);
  }
  void fractions(const std::tuple<double, double>& betas) const {
    const auto [beta1, beta2] = betas;
    TORCH_CHECK(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1, "shoestring::optim::", name,
                ": betas: expected two numbers in [0, 1), received ", beta1, " and ", beta2);
  }
};

void save_parts(OutputArchive& archive, const Parts<const Tensor>& parts);
void load_parts(InputArchive& archive, const Parts<Tensor>& parts);

inline c10::IValue read(InputArchive& archive, const char* name) {
  c10::IValue value;
  archive.read(name, value);
  return value;
}

}  // namespace shoestring::optim::detail
