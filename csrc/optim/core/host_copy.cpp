#include "optim/core/host_copy.h"

#include <exception>

#include <ATen/core/grad_mode.h>

#include "offload/host_memory.h"

namespace shoestring::optim::detail {

using at::Tensor;

namespace {

Tensor on_host(const Tensor& tensor) {
  offload::HostMemory memory("HostCopy", tensor.device());
  Tensor host = memory.empty(tensor.sizes(), tensor.scalar_type());
  host.copy_(tensor.detach(), /*non_blocking=*/true);
  return host;
}

}  // namespace

HostCopy::HostCopy(const std::vector<Tensor>& tensors, std::vector<torch::optim::Optimizer*> optimizers,
                   std::vector<torch::nn::Module*> modules) {
  const at::NoGradGuard no_grad;
  for (const Tensor& t : tensors) tensors_.emplace_back(t, on_host(t));
  for (auto* module : modules) {
    TensorDict& buffers = buffers_.emplace_back(module, TensorDict()).second;
    for (const auto& item : module->named_buffers()) {
      if (!item.value().defined()) continue;
      buffers.insert(item.key(), item.value());
      tensors_.emplace_back(item.value(), on_host(item.value()));
    }
  }
  for (auto* optimizer : optimizers) {
    const Stored stored = store(*optimizer);
    Stored& copy = states_.emplace_back(optimizer, Stored{TensorDict(), stored.metadata, true}).second;
    for (const auto& item : stored.tensors) copy.tensors.insert(item.key(), on_host(item.value()));
  }
}

void HostCopy::restore(const std::string& what) const {
  std::vector<std::function<void()>> steps;
  for (const auto& [optimizer, state] : states_)
    steps.emplace_back(
        [&optimizer = *optimizer, &state = state, &what] { detail::restore(optimizer, state, what); });
  for (const auto& [tensor, host] : tensors_)
    steps.emplace_back(
        [&tensor = tensor, &host = host] { Tensor(tensor).copy_(host, /*non_blocking=*/true); });
  for (const auto& [module, before] : buffers_) {
    for (const auto& item : module->named_buffers()) {
      const Tensor* buffer = before.find(item.key());
      if (buffer == nullptr || !item.value().defined() || item.value().is_same(*buffer)) continue;
      steps.emplace_back([now = item.value(), buffer = *buffer]() mutable { now.set_data(buffer); });
    }
  }
  call_all(steps);
}

void call_all(const std::vector<std::function<void()>>& steps) {
  const at::NoGradGuard no_grad;
  std::exception_ptr first;
  for (const auto& step : steps) {
    try {
      step();
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace shoestring::optim::detail
