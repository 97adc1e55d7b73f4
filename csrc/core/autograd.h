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

/// Returns whether autograd must record an operator with these input tensors.
template <class... Tensors>
bool needs_grad(const Tensors&... tensors) {
  return at::GradMode::is_enabled() && (tensors.requires_grad() || ...);
}

/// Returns whether t holds a tensor that requires a gradient.
inline bool wants_grad(const std::optional<at::Tensor>& t) { return t.has_value() && t->requires_grad(); }

/// Converts an undefined tensor to nullopt. Backward functions use it to pass saved tensors as optional
/// arguments of an operator.
inline std::optional<at::Tensor> as_optional(const at::Tensor& t) {
  return t.defined() ? std::optional<at::Tensor>(t) : std::nullopt;
}

/// Runs a boxed operator under autocast. Casts each argument in `names` that is a floating-point tensor to
/// the autocast dtype, as autocast does for a linear layer.
inline void call_autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::DeviceType device,
                          std::initializer_list<const char*> names) {
  c10::impl::ExcludeDispatchKeyGuard off(at::autocast::get_autocast_dispatch_key_from_device_type(device));
  const size_t first = stack->size() - op.schema().arguments().size();
  for (const char* name : names) {
    c10::IValue& argument = (*stack)[first + *op.schema().argumentIndexWithName(name)];
    if (argument.isNone() || !argument.toTensor().is_floating_point())
      continue;  // None and the integer codes of a quantised weight are not cast
    argument =
        at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), argument.toTensor(), device);
  }
  op.callBoxed(stack);
}

/// Creates an autograd node. Returns it in the type of smart pointer by which the installed PyTorch version
/// owns nodes.
template <class Node, class... Args>
auto make_node(Args&&... args) {
  // At the latest from version 2.15 on, PyTorch owns autograd nodes by intrusive_ptr, earlier by shared_ptr.
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, torch::autograd::Node>) {
    return c10::make_intrusive<Node>(std::forward<Args>(args)...);
  } else {
    return std::make_shared<Node>(std::forward<Args>(args)...);
  }
}

/// Called at the end of an operator's backward if backward itself cannot be differentiated. With
/// create_graph=True, gives the gradients an autograd node that raises an error in double backward. Otherwise
/// returns the gradients unchanged.
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

/// Returns whether a tracer such as torch.compile records the operations on t instead of executing them.
inline bool is_traced(const at::Tensor& t) {
  return c10::impl::dispatch_mode_enabled() ||
         t.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
}

/// Returns whether the current backward pass may overwrite the tensors that an autograd node saved, because
/// they are not used again. upstream: gradient of the node's output.
inline bool used_once(const at::Tensor& upstream) {
  return !is_traced(upstream) && !at::GradMode::is_enabled() &&
         !torch::autograd::get_current_graph_task_keep_graph();
}

/// Returns whether backward may overwrite the saved tensor t: only the node that saved t and the caller's
/// list of saved tensors refer to it, and no other tensor shares its memory. A tensor that hooks of saved
/// tensors return never qualifies, because it shares its memory with the tensor of the hook.
inline bool only_saved(const at::Tensor& t) {
  if (is_traced(t) || !t.has_storage() || !t.is_contiguous() || t.storage().use_count() != 1) return false;
  // A tensor that Python has seen is also referred to by its Python object, which then must have no other
  // reference than the one by which the tensor keeps it.
  const auto* python = t.unsafeGetTensorImpl()->pyobj_slot();
  return t.use_count() == 2 || (t.use_count() == 3 && python->has_unique_reference());
}

/// Returns gradient * upstream for a scalar tensor `upstream`, the gradient of the loss. Multiplies in place
/// if the saved `gradient` is not used again, which avoids another tensor of its size. If upstream is 1, the
/// memory of the gradient is not even read.
inline at::Tensor scale_gradient(const at::Tensor& gradient, const at::Tensor& upstream) {
  if (!used_once(upstream)) return gradient.mul(upstream);
  at::AutoDispatchBelowADInplaceOrView below;
  static auto op = find<void(at::Tensor&, const at::Tensor&)>("shoestring::_scale_");
  at::Tensor changed = gradient;
  op.call(changed, upstream);
  return changed;
}

/// Returns the gradient of a bias: the sum of grad (..., features) over all dimensions except the last,
/// converted to `dtype`.
inline at::Tensor sum_to_bias(const at::Tensor& grad, at::ScalarType dtype) {
  std::vector<int64_t> dims(grad.dim() - 1);
  std::iota(dims.begin(), dims.end(), 0);
  if (dims.empty()) return grad.to(dtype);
  if (grad.is_cpu() && grad.scalar_type() != at::kDouble && !at::GradMode::is_enabled()) {
    at::AutoDispatchBelowADInplaceOrView below;
    static auto op = find<at::Tensor(const at::Tensor&)>("shoestring::_column_sums");
    return op.call(grad).to(dtype);
  }
  const auto sum_type = grad.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return grad.sum(dims, /*keepdim=*/false, sum_type).to(dtype);
}

}  // namespace shoestring
