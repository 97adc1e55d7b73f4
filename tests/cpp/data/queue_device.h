#pragma once

// An asynchronous device for tests, made of threads. Its tensors have the device type PrivateUse1, and lie in
// memory of the host. Each stream is a thread with a queue of work.

#include <ATen/core/Tensor.h>
#include <shoestring/core/export.h>

namespace queue_device {

/// Registers the device with PyTorch, and returns it.
SHOESTRING_API c10::Device install();
/// Makes each copy to the device take this long, as a slow link would.
SHOESTRING_API void set_copy_seconds(double seconds);
/// Returns a tensor to which the current stream copies x, after `seconds` of other work.
SHOESTRING_API at::Tensor compute(const at::Tensor& x, double seconds);
/// Returns the bytes of device memory in use, and how many times device memory was allocated.
SHOESTRING_API int64_t bytes_in_use();
SHOESTRING_API int64_t allocations();
/// Waits for the current stream.
SHOESTRING_API void synchronize();

}  // namespace queue_device
