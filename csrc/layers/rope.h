#pragma once

// What a call of rope is made of, checked.

#include <optional>
#include <tuple>

#include <ATen/core/Tensor.h>

namespace shoestring::layers {

constexpr const char* kRopeOp = "rope";

struct RopeCall {
  at::Tensor q, k;  // in backward their gradients
  at::Tensor cos, sin;
  std::optional<int64_t> rotary_dim;
  bool interleaved;
  std::optional<at::Tensor> position_ids, q_weight, k_weight;
  double eps, offset;
};

/// Refuses arguments that do not go together. The values of position_ids are looked at where they are used.
void check_rope(const RopeCall& call);

inline int64_t rotary_dim_of(const RopeCall& call) { return call.rotary_dim.value_or(call.q.size(-1)); }

/// A tensor for what becomes of x: of its strides, where the elements of a head lie beside each other.
at::Tensor empty_rotated(const at::Tensor& x);
/// A tensor for the gradient by x: the heads of a token lie together, as a projection makes them.
at::Tensor empty_rotary_heads(const at::Tensor& x);

// In plain PyTorch, for fp64: checks of gradients.
std::tuple<at::Tensor, at::Tensor> rope_forward_double(const RopeCall& call);
/// call.q and call.k are gradients; q and k are given with weights.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> rope_backward_double(
    const RopeCall& call, const std::optional<at::Tensor>& q, const std::optional<at::Tensor>& k);

}  // namespace shoestring::layers
