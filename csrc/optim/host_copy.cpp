#include "optim/host_copy.h"

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

HostCopy::HostCopy(const std::vector<Tensor>& tensors, std::vector<torch::optim::Optimizer*> optimizers) {
  const at::NoGradGuard no_grad;
  for (const Tensor& t : tensors) tensors_.emplace_back(t, on_host(t));
  for (auto* optimizer : optimizers) {
    const Stored stored = store(*optimizer);
    Stored& copy = states_.emplace_back(optimizer, Stored{TensorDict(), stored.metadata, true}).second;
    for (const auto& item : stored.tensors) copy.tensors.insert(item.key(), on_host(item.value()));
  }
}

void HostCopy::restore(const std::string& what) const {
  const at::NoGradGuard no_grad;
  for (const auto& [optimizer, state] : states_) detail::restore(*optimizer, state, what);
  for (const auto& [tensor, host] : tensors_) Tensor(tensor).copy_(host, /*non_blocking=*/true);
}

}  // namespace shoestring::optim::detail
