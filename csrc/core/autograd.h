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

/// True where a call on these tensors has to be recorded for backward.
template <class... Tensors>
bool needs_grad(const Tensors&... tensors) {
  return at::GradMode::is_enabled() && (tensors.requires_grad() || ...);
}

/// True for an optional tensor that is there and requires a gradient.
inline bool wants_grad(const std::optional<at::Tensor>& t) { return t.has_value() && t->requires_grad(); }

/// An undefined tensor as none: how a node's saved tensors become an operator's arguments.
inline std::optional<at::Tensor> as_optional(const at::Tensor& t) {
  return t.defined() ? std::optional<at::Tensor>(t) : std::nullopt;
}

/// For a boxed operator under autocast: calls it with those of the named arguments that are floating tensors
/// in the autocast dtype, as a linear layer would be called.
inline void call_autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::DeviceType device,
                          std::initializer_list<const char*> names) {
  c10::impl::ExcludeDispatchKeyGuard off(at::autocast::get_autocast_dispatch_key_from_device_type(device));
  const size_t first = stack->size() - op.schema().arguments().size();
  for (const char* name : names) {
    c10::IValue& argument = (*stack)[first + *op.schema().argumentIndexWithName(name)];
    if (argument.isNone() || !argument.toTensor().is_floating_point()) continue;  // none, or packed
    argument =
        at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), argument.toTensor(), device);
  }
  op.callBoxed(stack);
}

/// A node of a graph, by the kind of pointer that this PyTorch holds nodes by.
template <class Node, class... Args>
auto make_node(Args&&... args) {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target,
                                  torch::autograd::Node>) {  // from 2.15 on at the latest
    return c10::make_intrusive<Node>(std::forward<Args>(args)...);
  } else {
    return std::make_shared<Node>(std::forward<Args>(args)...);
  }
}

/// The gradients of an operator whose backward is not differentiable: as they are, but under
/// create_graph=True they carry a node that says so when somebody differentiates them.
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

/// True where a compiler records what happens to t rather than doing it.
inline bool is_traced(const at::Tensor& t) {
  return c10::impl::dispatch_mode_enabled() ||
         t.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
}

/// In backward: true where what the node saved is not needed after it.
inline bool used_once(const at::Tensor& upstream) {
  return !is_traced(upstream) && !at::GradMode::is_enabled() &&
         !torch::autograd::get_current_graph_task_keep_graph();
}

/// gradient * upstream, upstream a scalar tensor. In place, and without a second tensor of the gradient's
/// size, where the gradient is used this once; its memory is then not touched where upstream is 1.
inline at::Tensor scale_gradient(const at::Tensor& gradient, const at::Tensor& upstream) {
  if (!used_once(upstream)) return gradient.mul(upstream);
  at::AutoDispatchBelowADInplaceOrView below;
  static auto op = find<void(at::Tensor&, const at::Tensor&)>("shoestring::scale_");
  at::Tensor changed = gradient;
  op.call(changed, upstream);
  return changed;
}

/// grad (..., features) summed over all but the last dimension: the gradient of a bias of type `dtype`.
inline at::Tensor sum_to_bias(const at::Tensor& grad, at::ScalarType dtype) {
  std::vector<int64_t> dims(grad.dim() - 1);
  std::iota(dims.begin(), dims.end(), 0);
  if (dims.empty()) return grad.to(dtype);
  const auto sum_type = grad.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return grad.sum(dims, /*keepdim=*/false, sum_type).to(dtype);
}

}  // namespace shoestring
