#pragma once

#include <ATen/core/Tensor.h>

#include "offload/host_memory.h"
#include "optim/stored.h"

namespace shoestring::optim::detail {

/// Returns a copy of a tensor in host memory, which is pinned for a GPU. The copy is complete when the
/// current stream is.
inline at::Tensor on_host(const at::Tensor& tensor) {
  offload::HostMemory memory("on_host", tensor.device());
  at::Tensor host = memory.empty(tensor.sizes(), tensor.scalar_type());
  host.copy_(tensor.detach(), /*non_blocking=*/true);
  return host;
}

/// Returns a copy of an optimizer's state in host memory.
inline Stored on_host(const Stored& stored) {
  Stored copy{TensorDict(), stored.metadata};
  for (const auto& item : stored.tensors) copy.tensors.insert(item.key(), on_host(item.value()));
  return copy;
}

}  // namespace shoestring::optim::detail
