#pragma once

#include <ATen/core/Tensor.h>

namespace shoestring {

/// `fresh`, a tensor that nobody has written to: if it is large and on the CPU, its memory comes in huge
/// pages where the system gives them on request. A new page costs a trap into the kernel, for 4 KiB more than
/// writing them does.
at::Tensor in_huge_pages(at::Tensor fresh);

}  // namespace shoestring
