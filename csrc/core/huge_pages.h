#pragma once

#include <ATen/core/Tensor.h>

namespace shoestring {

/// Requests huge pages for the memory of `fresh`, a CPU tensor of at least 4 MiB that nobody has written to
/// yet, and returns it. Other tensors are returned unchanged. Each new 4 KiB page costs a page fault, which
/// takes longer than writing the page.
at::Tensor in_huge_pages(at::Tensor fresh);

}  // namespace shoestring
