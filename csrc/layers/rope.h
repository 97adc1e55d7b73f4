#pragma once

// What a call of rope is made of, checked.

#include <optional>
#include <tuple>

#include <ATen/core/Tensor.h>

namespace shoestring::rotary {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

struct Call {
  Tensor q, k;  // in backward their gradients
  Tensor cos, sin;
  std::optional<int64_t> rotary_dim;
  bool interleaved;
  OptionalTensor position_ids, q_weight, k_weight;
  double eps, offset;
};

/// Refuses arguments that do not go together. The values of position_ids are looked at where they are used.
void check(const Call& call);

inline int64_t rotary_dim(const Call& call) { return call.rotary_dim.value_or(call.q.size(-1)); }

/// A tensor for what becomes of x: of its strides, where the elements of a head lie beside each other.
Tensor empty_result(const Tensor& x);
/// A tensor for the gradient by x: the heads of a token lie together, as a projection makes them.
Tensor empty_heads(const Tensor& x);

// In plain PyTorch, for fp64: checks of gradients.
std::tuple<Tensor, Tensor> forward_double(const Call& call);
/// call.q and call.k are gradients; q and k are given with weights.
std::tuple<Tensor, Tensor, Tensor, Tensor> backward_double(const Call& call, const OptionalTensor& q,
                                                           const OptionalTensor& k);

}  // namespace shoestring::rotary
