#pragma once

// Helpers for host code that launches CUDA kernels: the current stream and launch errors.

#include <typeinfo>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include "core/cuda_tables.h"

namespace shoestring {

namespace cuda {

/// Returns the table that provide() registered under `name`, or null if there is none.
SHOESTRING_API const void* find_provided(const char* name, const std::type_info& type);

/// Returns the runtime functions of a device, or null if its backend provides none. libshoestring_cuda
/// provides those of CUDA as "runtime"; without it, CUDA devices raise an error. A backend of PyTorch's type
/// PrivateUse1 provides its own as "runtime_" followed by the name of the backend.
const Runtime* find_runtime(c10::Device device);

}  // namespace cuda

/// Returns the current stream of the tensor's device.
inline void* stream_of(const at::Tensor& t) {
  const cuda::Runtime* runtime = cuda::find_runtime(t.device());
  TORCH_CHECK(runtime != nullptr,
              "expected a backend that provides shoestring's runtime functions, received ", t.device());
  return runtime->current_stream(t.device().index());
}

/// Raises if a launcher has returned an error message.
inline void check_launch(const char* op, const char* error) {
  TORCH_CHECK(error == nullptr, op, ": the CUDA launch failed: ", error);
}

}  // namespace shoestring
