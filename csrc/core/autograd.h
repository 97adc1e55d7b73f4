#pragma once

#include <initializer_list>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/graph_task.h>

#include "core/call.h"

namespace shoestring {

/// Returns true if a call on these tensors has to be recorded for backward.
template <class... Tensors>
bool needs_grad(const Tensors&... tensors) {
  return at::GradMode::is_enabled() && (tensors.requires_grad() || ...);
}

/// Returns true if the optional tensor has a value that requires a gradient.
inline bool wants_grad(const std::optional<at::Tensor>& t) { return t.has_value() && t->requires_grad(); }

/// Converts an undefined tensor to nullopt. Saved tensors of a node become an operator's optional arguments
/// this way.
inline std::optional<at::Tensor> as_optional(const at::Tensor& t) {
  return t.defined() ? std::optional<at::Tensor>(t) : std::nullopt;
}

/// Runs a boxed operator under autocast. Casts those of the named arguments that are floating-point tensors
/// to the autocast dtype, as autocast does for a linear layer.
inline void call_autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::DeviceType device,
                          std::initializer_list<const char*> names) {
  c10::impl::ExcludeDispatchKeyGuard off(at::autocast::get_autocast_dispatch_key_from_device_type(device));
  const size_t first = stack->size() - op.schema().arguments().size();
  for (const char* name : names) {
    c10::IValue& argument = (*stack)[first + *op.schema().argumentIndexWithName(name)];
    if (argument.isNone() || !argument.toTensor().is_floating_point())
      continue;  // no tensor, or a packed weight
    argument =
        at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), argument.toTensor(), device);
  }
  op.callBoxed(stack);
}

/// Creates an autograd node with the kind of smart pointer that this version of PyTorch uses for nodes.
template <class Node, class... Args>
auto make_node(Args&&... args) {
  // PyTorch holds nodes by intrusive_ptr from version 2.15 on at the latest.
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, torch::autograd::Node>) {
    return c10::make_intrusive<Node>(std::forward<Args>(args)...);
  } else {
    return std::make_shared<Node>(std::forward<Args>(args)...);
  }
}

/// Marks the gradients of an operator whose backward is not differentiable. With create_graph=True they get a
/// node that raises an error if they are differentiated. Otherwise they are returned unchanged.
inline torch::autograd::variable_list once_differentiable(const char* op,
                                                          torch::autograd::variable_list gradients) {
  if (!at::GradMode::is_enabled()) return gradients;
  auto refusal = make_node<torch::autograd::DelayedError>(
      std::string(op) + ": the backward pass is not differentiable; use plain PyTorch for double backward",
      static_cast<int64_t>(gradients.size()));
  torch::autograd::variable_list inputs;
  for (auto& g : gradients) inputs.push_back(g.defined() ? g.detach().requires_grad_() : g);
  return (*refusal)(std::move(inputs));
}

/// Returns true if a compiler is recording the operations on t instead of executing them.
inline bool is_traced(const at::Tensor& t) {
  return c10::impl::dispatch_mode_enabled() ||
         t.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
}

/// Returns true if this backward pass is the last use of the tensors that the node saved.
inline bool used_once(const at::Tensor& upstream) {
  return !is_traced(upstream) && !at::GradMode::is_enabled() &&
         !torch::autograd::get_current_graph_task_keep_graph();
}

/// Returns gradient * upstream, where upstream is a scalar tensor. Multiplies in place, without a second
/// tensor of the gradient's size, if the gradient is not needed again. If upstream is 1, the gradient's
/// memory is then not touched.
inline at::Tensor scale_gradient(const at::Tensor& gradient, const at::Tensor& upstream) {
  if (!used_once(upstream)) return gradient.mul(upstream);
  at::AutoDispatchBelowADInplaceOrView below;
  static auto op = find<void(at::Tensor&, const at::Tensor&)>("shoestring::scale_");
  at::Tensor changed = gradient;
  op.call(changed, upstream);
  return changed;
}

/// Sums grad (..., features) over all but the last dimension, which is the gradient of a bias. Returns
/// `dtype`.
inline at::Tensor sum_to_bias(const at::Tensor& grad, at::ScalarType dtype) {
  std::vector<int64_t> dims(grad.dim() - 1);
  std::iota(dims.begin(), dims.end(), 0);
  if (dims.empty()) return grad.to(dtype);
  const auto sum_type = grad.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return grad.sum(dims, /*keepdim=*/false, sum_type).to(dtype);
}

}  // namespace shoestring
