#pragma once

#include <optional>
#include <vector>

#include <ATen/autocast_mode.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

namespace shoestring::gemm {

constexpr const char* kLinearOp = "linear";
constexpr const char* kLinearGroupOp = "linear_group";
constexpr const char* kLinearGroupBackwardOp = "_linear_group_backward";

using OptionalTensors = c10::List<std::optional<at::Tensor>>;

using LinearSignature = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                                   const std::optional<at::Tensor>&, std::optional<at::ScalarType>, int64_t);
using LinearGroupSignature = std::vector<at::Tensor>(const at::Tensor&, at::TensorList,
                                                     const OptionalTensors&, std::optional<at::ScalarType>,
                                                     int64_t);
using LinearGroupBackwardSignature = std::vector<at::Tensor>(const OptionalTensors&,
                                                             const std::optional<at::Tensor>&, at::TensorList,
                                                             at::ScalarType, at::ScalarType, int64_t,
                                                             c10::List<bool>);

/// One value for x and one for each weight of linear_group. _linear_group_backward takes a mask of these
/// inputs and returns their gradients as flat lists, x first.
template <class T>
struct LinearInputs {
  explicit LinearInputs(size_t count) : weights(count) {}

  template <class List>
  static LinearInputs from(const List& list) {
    LinearInputs inputs(list.size() - 1);
    inputs.x = list[0];
    for (size_t i = 0; i < inputs.weights.size(); ++i) inputs.weights[i] = list[1 + i];
    return inputs;
  }
  template <class List>
  void append_to(List& list) const {
    list.push_back(x);
    for (const auto& weight : weights) list.push_back(weight);
  }

  T x{};
  std::vector<T> weights;
};
using LinearMask = LinearInputs<bool>;
using LinearGradients = LinearInputs<at::Tensor>;

/// Returns the dtype of the products of a linear layer under autocast: the dtype that the caller gives, or
/// the autocast dtype. x and the weights keep their dtypes: the operator rounds them. Products of fp64 stay
/// fp64.
template <c10::DeviceType device>
std::optional<at::ScalarType> autocast_type(const at::Tensor& x, std::optional<at::ScalarType> dtype) {
  const bool castable = x.is_floating_point() && x.scalar_type() != at::kDouble;
  return dtype.has_value() || !castable ? dtype : at::autocast::get_autocast_dtype(device);
}

}  // namespace shoestring::gemm
