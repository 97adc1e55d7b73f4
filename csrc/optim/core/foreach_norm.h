#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace shoestring::optim::ops {

/// Returns the L2 norm of each of n >= 1 tensors as fp32 (n,). The tensors are fp32, bf16 or fp16, mixed as
/// needed, and on one device. On the CPU each tensor is read once, in its own dtype. The number of threads
/// and the other tensors do not change a tensor's norm by a single bit.
at::Tensor foreach_norm(at::TensorList tensors);

}  // namespace shoestring::optim::ops
