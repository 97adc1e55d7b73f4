#pragma once

#include <ATen/core/Tensor.h>

namespace shoestring {

/// Requests huge pages for the memory of `fresh`, a CPU tensor to which nothing has been written yet, and
/// returns the tensor. Huge pages save page faults: the fault at the first write to a 4 KiB page takes longer
/// than writing the page. Returns tensors smaller than 4 MiB and tensors on other devices unchanged.
at::Tensor in_huge_pages(at::Tensor fresh);

}  // namespace shoestring
