#pragma once

// Helpers for optimizer state in 8 or 4 bits, which is divided into blocks of kStateBlock elements. The last
// block may have fewer.

#include <algorithm>

#include <ATen/Parallel.h>
#include <c10/core/SymInt.h>

#include "core/threads.h"
#include "quantization/dynamic_map.h"

namespace shoestring::quantization {

/// Returns the number of blocks needed for `count` elements.
inline c10::SymInt state_blocks(const c10::SymInt& count) {
  return (count + kernels::kStateBlock - 1) / kernels::kStateBlock;
}

/// Divides n elements of state among all threads. Each call body(block, first, count) covers `count`
/// elements, from element `first` on, which is the start of block number `block`. count is a multiple of the
/// block size, except for the call that reaches element n.
template <class Body>
void for_state_blocks(int64_t n, Body body) {
  using kernels::kStateBlock;
  at::parallel_for(0, (n + kStateBlock - 1) / kStateBlock, row_grain(16 * kStateBlock),
                   [&](int64_t block, int64_t last) {
                     body(block, block * kStateBlock, std::min(last * kStateBlock, n) - block * kStateBlock);
                   });
}

}  // namespace shoestring::quantization
