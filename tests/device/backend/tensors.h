#pragma once

// Tensors of the device, as their operations and as kernels see them.

#include <ATen/core/Tensor.h>

#include "detector.h"

namespace simdev {

bool is_on_device(const at::Tensor& t);

/// Returns the bytes from the first to the last element of a tensor.
Range range_of(const at::Tensor& t, bool is_write);

/// Returns a CPU tensor over the memory of a device tensor or a pinned tensor, for operations only. It does
/// not keep the memory alive.
at::Tensor for_kernel(const at::Tensor& t);

/// Does the same with the tensor's whole storage below it, for operators that return views.
at::Tensor for_view(const at::Tensor& t);

/// Returns a new tensor of the device with the sizes, strides and dtype of `like`.
at::Tensor empty_as(const at::Tensor& like, c10::Device device);

}  // namespace simdev
