#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace shoestring::optim::ops {

/// The L2 norm of each of n tensors, fp32 (n,): at least one, all on one device, fp32, bf16 or fp16 in any
/// mixture. On the CPU each is read once, in its own type; a norm's bits do not depend on threads, nor on the
/// other tensors.
at::Tensor foreach_norm(at::TensorList tensors);

}  // namespace shoestring::optim::ops
