#pragma once

// Blocks of weights and gradients of any type, as fp32 and back.

#include "core/element_simd.h"
#include "core/philox_simd.h"
#include "optim/optimizer_table.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

using kernels::ElementType;
using kernels::kStateBlock;
static_assert(kernels::kRandomBlock == kStateBlock, "random_block makes the bits of a block");

// bf16, up with the probability of what is cut off: `random` has 16 bits an element. NaN stays NaN.
// In the upper halves; what is below them is of no account.
SHOESTRING_INLINE U32 rounded_bf16(F32 x, const uint16_t* random) {
  U32 bits = as_bits(x);
  return x == x ? bits + __builtin_convertvector(load_as<U16>(random), U32) : bits | 0x400000u;
}
SHOESTRING_INLINE U16 to_bf16(F32 x, const uint16_t* random) {
  return __builtin_convertvector(rounded_bf16(x, random) >> 16, U16);
}

// An fp32 as a rounded bf16 and what, added to its bits in the upper half, makes the fp32 again.
SHOESTRING_INLINE F32 join(U16 weight, U16 remainder) {
  U32 low = __builtin_convertvector(remainder, U32);
  return as_float((__builtin_convertvector(weight, U32) << 16) + (low ^ 0x8000u) -
                  0x8000u);  // which extends the sign
}
SHOESTRING_INLINE void split(F32 x, uint16_t* weight, uint16_t* remainder) {
  U32 bits = x == x ? as_bits(x) : U32{} + 0x7fc00000u;  // another NaN could round to a number
  U16 high = __builtin_convertvector((bits + 0x8000u) >> 16, U16),
      low = __builtin_convertvector(bits & 0xffffu, U16);
  __builtin_memcpy(weight, &high, sizeof high);
  __builtin_memcpy(remainder, &low, sizeof low);
}

// to[0, kStateBlock) from `count` elements, zeros behind them; or plus what is there.
template <class Element, bool kAdd>
void load_elements(const void* from, int64_t count, float* to) {
  using T = typename Element::Type;
  T padded[kStateBlock];
  const T* p = static_cast<const T*>(from);
  if (count < kStateBlock) {
    __builtin_memset(padded, 0, sizeof padded);
    __builtin_memcpy(padded, p, count * sizeof(T));
    p = padded;
  }
  for (int64_t i = 0; i < kStateBlock; i += kLanes) {
    F32 x = Element::load(p + i);
    store(to + i, kAdd ? load(to + i) + x : x);
  }
}
template <bool kAdd = false>
void load_elements(ElementType type, const void* from, int64_t count, float* to) {
  switch (type) {
    case ElementType::kFloat:
      return load_elements<Float, kAdd>(from, count, to);
    case ElementType::kBFloat16:
      return load_elements<BFloat16, kAdd>(from, count, to);
    case ElementType::kHalf:
      return load_elements<Half, kAdd>(from, count, to);
  }
}

inline int64_t size_of(ElementType type) { return type == ElementType::kFloat ? 4 : 2; }
template <class T>
T* element(T* base, ElementType type, int64_t i) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return static_cast<Byte*>(base) + i * size_of(type);
}

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
