#pragma once

// The checked arguments of a rope call.

#include <optional>
#include <tuple>

#include <ATen/core/Tensor.h>

namespace shoestring::layers {

constexpr const char* kRopeOp = "rope";

struct RopeCall {
  at::Tensor q, k;  // queries and keys; in backward, the gradients of the results
  at::Tensor cos, sin;
  std::optional<int64_t> rotary_dim;
  bool interleaved;
  std::optional<at::Tensor> position_ids, q_weight, k_weight;
  double eps, offset;
};

/// Raises for arguments that do not fit together. The values of position_ids are checked later, where they
/// are used.
void check_rope(const RopeCall& call);

inline int64_t rotary_dim_of(const RopeCall& call) { return call.rotary_dim.value_or(call.q.size(-1)); }

/// Returns an empty tensor for the rotated x. It has x's strides if the elements of a head are contiguous.
at::Tensor empty_rotated(const at::Tensor& x);
/// Returns an empty tensor for the gradient of x. The heads of a token are contiguous, as a projection writes
/// them.
at::Tensor empty_rotary_heads(const at::Tensor& x);

// Computes rope in fp64 with PyTorch's operators, for gradient checks.
std::tuple<at::Tensor, at::Tensor> rope_forward_double(const RopeCall& call);
/// Computes the gradients of rope in fp64. call.q and call.k are the gradients of the results. q and k are
/// given if there are weights.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> rope_backward_double(
    const RopeCall& call, const std::optional<at::Tensor>& q, const std::optional<at::Tensor>& k);

}  // namespace shoestring::layers
