#pragma once

// What the readers of 4-bit tensors share.

#include "cpu/vec.h"
#include "kernels/quantize_4bit.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

// The product is rounded before the sum, as in bitsandbytes: no fused multiply-add.
SHOESTRING_INLINE float scale_of(const kernels::Packed& p, int64_t block) {
  if (p.absmax != nullptr) return p.absmax[block];
  float product = p.nested[1 + p.codes[block]] * p.nested[257 + (block >> 8)];
#if defined(__GNUC__) && !defined(__clang__)
  product = __builtin_assoc_barrier(product);
#else
  volatile float rounded = product;
  product = rounded;
#endif
  return product + p.nested[0];
}

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
