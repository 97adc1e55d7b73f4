#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace shoestring {

/// The L2 norm of all elements of `grads` together, fp32 (): at least one tensor, all on one device, fp32, bf16 or fp16
/// in any mixture. On the CPU each is read once, in its own type, and any number of threads gives the same bits.
at::Tensor total_norm(at::TensorList grads);

}  // namespace shoestring
