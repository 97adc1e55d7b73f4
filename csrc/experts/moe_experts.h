#pragma once

// The arguments of moe_experts and of its backward, and its gate.

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include "core/arguments.h"
#include "core/tensors.h"
#include "experts/moe_gate_table.h"
#include "quantization/packed.h"

namespace shoestring::experts {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kMoeExpertsOp = "moe_experts";

/// How experts compute, beside their tensors.
struct ExpertOptions {
  std::string activation = "silu";
  std::optional<double> limit{};
  bool interleaved = false;  // whether gate_up has gates at even features
  bool transposed = false;   // whether the weights have shape (experts, in_features, out_features)

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit("activation", self.activation);
    visit("limit", self.limit);
    visit("interleaved", self.interleaved);
    visit("transposed", self.transposed);
  }
  kernels::Gate gate() const;
};

/// The scales of quantised stacks. A stack without `absmax` is dense.
struct ExpertScales {
  OptionalTensor gate_up_absmax{}, gate_up_nested{}, down_absmax{}, down_nested{};
  std::string quant_type = "nf4";
  int64_t block_size = 64;                   // of 4-bit codes; int8 has a scale for each row
  std::optional<int64_t> hidden_features{};  // given with codes of gate_up, which may be flat

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit("gate_up_absmax", self.gate_up_absmax);
    visit("gate_up_nested", self.gate_up_nested);
    visit("down_absmax", self.down_absmax);
    visit("down_nested", self.down_nested);
    visit("quant_type", self.quant_type);
    visit("block_size", self.block_size);
    visit("hidden_features", self.hidden_features);
  }
  /// Returns the elements that share a scale, for rows of a length.
  c10::SymInt block(const c10::SymInt& row) const { return quant_type == "int8" ? row : block_size; }
};

/// The low-rank updates of the stacks: the weight of an expert is W + scaling * B A. With dropout, A reads
/// rows of which elements are dropped: those of a token are the same for all its experts.
struct ExpertUpdates {
  OptionalTensor gate_up_a{}, gate_up_b{}, down_a{}, down_b{};
  double scaling = 1, dropout = 0;
  OptionalTensor seed{};

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit("gate_up_a", self.gate_up_a);
    visit("gate_up_b", self.gate_up_b);
    visit("down_a", self.down_a);
    visit("down_b", self.down_b);
    visit("scaling", self.scaling);
    visit("dropout", self.dropout);
    visit("seed", self.seed);
  }

  /// Returns the rows, which are the input of A, or their gradients with the mask of gate_up or down.
  Tensor dropped(Backend backend, const Tensor& rows, bool is_down) const;
};

struct ExpertSizes {
  c10::SymInt experts, features, hidden;
};

/// Returns the sizes of a layer whose arguments are checked.
ExpertSizes sizes_of(const Tensor& x, const Tensor& gate_up, const ExpertScales& scales, bool transposed);

/// The results of moe_sort: order, inverse and offsets.
using ExpertSlots = std::tuple<Tensor, Tensor, Tensor>;

struct ExpertArguments {
  Tensor x{}, index{}, weight{}, gate_up{}, down{};
  OptionalTensor gate_up_bias{}, down_bias{};
  ExpertOptions options{};
  ExpertScales scales{};
  ExpertUpdates updates{};
  std::optional<at::ScalarType> dtype{};  // the dtype of the products and of the result; that of x without it

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit("x", self.x);
    visit("index", self.index);
    visit("weight", self.weight);
    visit("gate_up", self.gate_up);
    visit("down", self.down);
    visit.keywords();
    visit("gate_up_bias", self.gate_up_bias);
    visit("down_bias", self.down_bias);
    ExpertOptions::fields(self.options, visit);
    ExpertScales::fields(self.scales, visit);
    ExpertUpdates::fields(self.updates, visit);
    visit("dtype", self.dtype);
  }
  at::ScalarType type() const { return dtype.value_or(x.scalar_type()); }
  ExpertSizes sizes() const { return sizes_of(x, gate_up, scales, options.transposed); }
  /// Raises unless the arguments fit.
  void check() const;
  /// Sorts the slots by their experts.
  ExpertSlots sorted() const;

 private:
  using Shape = std::vector<c10::SymInt>;
  using Size = c10::SymInt;

  void like_x(const std::string& name, const Tensor& t) const;
  Shape stack_shape(const Size& experts, const Size& out, const Size& in) const;
  void check_gate_up() const;
  void check_codes(const std::string& name, const Tensor& codes, const OptionalTensor& absmax,
                   const OptionalTensor& nested, const Size& experts, const Size& out, const Size& in) const;
  void check_update(const std::string& name, const OptionalTensor& a, const OptionalTensor& b,
                    const Size& experts, const Size& in, const Size& out) const;
};

/// The token of each slot, in the order of moe_sort, and its weight, in the dtype of sums.
struct ExpertTokens {
  ExpertTokens(const Tensor& order, const Tensor& weight, at::ScalarType sums);
  Tensor rows, scale;
};

/// The results of forward that backward needs: the input of the gates (slots, 2 features), and moe_sort's
/// order and offsets.
struct ExpertResults {
  Tensor out{}, hidden{}, order{}, offsets{};

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit("out", self.out);
    visit("hidden", self.hidden);
    visit("order", self.order);
    visit("offsets", self.offsets);
  }
};

/// One value for each argument that has a gradient.
constexpr size_t kExpertGradients = 10;
enum ExpertGradient : size_t {
  kGradX,
  kGradWeight,
  kGradGateUp,
  kGradDown,
  kGradGateUpBias,
  kGradDownBias,
  kGradGateUpA,
  kGradGateUpB,
  kGradDownA,
  kGradDownB
};

/// The codes of a quantised stack, `experts` matrices (rows, columns). A dense stack has no reader.
struct ExpertCodes {
  template <class Arguments>  // ExpertArguments or ExpertBackward
  ExpertCodes(Backend backend, const Arguments& from, bool is_down)
      : ExpertCodes(backend, is_down ? from.down : from.gate_up, from.scales,
                    sizes_of(from.x, from.gate_up, from.scales, from.options.transposed), is_down,
                    from.options.transposed) {}
  ExpertCodes(Backend backend, const Tensor& codes, const ExpertScales& scales, const ExpertSizes& sizes,
              bool is_down, bool transposed);

  int64_t experts, rows, columns;
  std::optional<quantization::PackedReader> reader{};
};

struct ExpertBackward {
  Tensor grad{}, x{}, weight{}, gate_up{}, down{}, hidden{}, order{}, offsets{};
  OptionalTensor down_bias{};
  ExpertOptions options{};
  ExpertScales scales{};
  ExpertUpdates updates{};
  std::array<bool, kExpertGradients> output_mask{};

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    visit("grad", self.grad);
    visit("x", self.x);
    visit("weight", self.weight);
    visit("gate_up", self.gate_up);
    visit("down", self.down);
    visit("hidden", self.hidden);
    visit("order", self.order);
    visit("offsets", self.offsets);
    visit("down_bias", self.down_bias);
    ExpertOptions::fields(self.options, visit);
    ExpertScales::fields(self.scales, visit);
    ExpertUpdates::fields(self.updates, visit);
    visit.required("output_mask", self.output_mask);
  }
};

/// The gradients that are selected; the others are empty tensors. Those of the stacks and of their updates
/// have their dtypes, and those of the biases the dtype of sums.
struct ExpertGradients {
  std::array<Tensor, kExpertGradients> all{};

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor& visit) {
    constexpr std::array kNames = {
        "grad_x",         "grad_weight",    "grad_gate_up",   "grad_down",   "grad_gate_up_bias",
        "grad_down_bias", "grad_gate_up_a", "grad_gate_up_b", "grad_down_a", "grad_down_b"};
    for (size_t i = 0; i < kExpertGradients; ++i) visit(kNames[i], self.all[i]);
  }
};

/// The operators moe_experts and _moe_experts of a device, for boxed(). kAll: all results, for backward.
template <ExpertResults (*run)(const ExpertArguments&), bool kAll>
void expert_forward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const auto arguments = read_fields<ExpertArguments>(*stack);
  const c10::OptionalDeviceGuard guard(arguments.x.device());
  const ExpertResults results = run(arguments);
  torch::jit::drop(*stack, count_of<ExpertArguments>());
  kAll ? push_fields(*stack, results) : torch::jit::push(*stack, results.out);
}

/// The operator _moe_experts_backward of a device, for boxed().
template <ExpertGradients (*run)(const ExpertBackward&)>
void expert_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const auto arguments = read_fields<ExpertBackward>(*stack);
  const c10::OptionalDeviceGuard guard(arguments.x.device());
  ExpertGradients gradients = run(arguments);
  fill_gradients(gradients.all, arguments.x);
  torch::jit::drop(*stack, count_of<ExpertBackward>());
  push_fields(*stack, gradients);
}

}  // namespace shoestring::experts
