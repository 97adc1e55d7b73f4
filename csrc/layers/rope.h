#pragma once

// The checked arguments of the operator rope.

#include <optional>
#include <tuple>

#include <ATen/core/Tensor.h>

namespace shoestring::layers {

constexpr const char* kRopeOp = "rope";

struct RopeCall {
  at::Tensor q, k;  // queries and keys; in backward, the gradients of the rotated queries and keys
  at::Tensor cos, sin;
  std::optional<int64_t> rotary_dim;
  bool interleaved;
  std::optional<at::Tensor> position_ids, q_weight, k_weight;
  double eps, offset;
};

/// Raises if the arguments of rope do not fit together. The values of position_ids are checked later, when
/// they are used.
void check_rope(const RopeCall& call);

/// Returns the number of elements of a head that are rotated: all of them unless rotary_dim is given.
inline int64_t rotary_dim_of(const RopeCall& call) { return call.rotary_dim.value_or(call.q.size(-1)); }

/// Returns an uninitialised tensor for the rotated x. It has x's strides if the elements within a head of x
/// are contiguous, else it is contiguous.
at::Tensor empty_rotated(const at::Tensor& x);
/// Returns an uninitialised tensor for the gradient of x. The heads of a token are adjacent in memory, as in
/// the output of a projection layer.
at::Tensor empty_rotary_heads(const at::Tensor& x);

// Computes rope in fp64 with PyTorch's operators, for gradient checks.
std::tuple<at::Tensor, at::Tensor> rope_forward_double(const RopeCall& call);
/// Computes the gradients of rope in fp64 with PyTorch's operators. call.q and call.k are the gradients of
/// the rotated q and k. q and k must be given if there are weights.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> rope_backward_double(
    const RopeCall& call, const std::optional<at::Tensor>& q, const std::optional<at::Tensor>& k);

}  // namespace shoestring::layers
