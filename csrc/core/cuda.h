#pragma once

// Helpers for host code that launches CUDA kernels: the current stream and launch errors.

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include "core/cuda_tables.h"

namespace shoestring {

/// Returns the current CUDA stream of the tensor's device.
inline void* stream_of(const at::Tensor& t) {
  return cuda::table<cuda::Runtime>("runtime").current_stream(t.device().index());
}

inline void check_launch(const char* op, const char* error) {
  TORCH_CHECK(error == nullptr, op, ": the CUDA launch failed: ", error);
}

}  // namespace shoestring
