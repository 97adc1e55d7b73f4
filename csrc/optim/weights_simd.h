#pragma once

// Loads blocks of weights and gradients of any dtype as fp32, and rounds fp32 weights to bf16.

#include "core/element_simd.h"
#include "core/philox_simd.h"
#include "optim/optimizer_table.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

using kernels::ElementType;
using kernels::kStateBlock;
static_assert(kernels::kRandomBlock == kStateBlock, "random_block makes the bits of a block");

// Rounds fp32 to bf16 at random: away from zero with a probability equal to the fraction that is cut off.
// `random` holds 16 random bits per element. The result is in the upper 16 bits of each 32-bit word; the
// lower 16 bits are undefined. NaN stays NaN.
SHOESTRING_INLINE U32 rounded_bf16(F32 x, const uint16_t* random) {
  U32 bits = as_bits(x);
  return x == x ? bits + __builtin_convertvector(load_as<U16>(random), U32) : bits | 0x400000u;
}
SHOESTRING_INLINE U16 to_bf16(F32 x, const uint16_t* random) {
  return __builtin_convertvector(rounded_bf16(x, random) >> 16, U16);
}

// join() combines a bf16 weight and its 16-bit remainder into an fp32, and split() does the reverse. The
// weight is the fp32 rounded to bf16. The remainder is signed: added to the bits of the weight, it restores
// the fp32.
SHOESTRING_INLINE F32 join(U16 weight, U16 remainder) {
  U32 low = __builtin_convertvector(remainder, U32);
  // `^ 0x8000` and `- 0x8000` extend the sign of the 16-bit remainder.
  return as_float((__builtin_convertvector(weight, U32) << 16) + (low ^ 0x8000u) - 0x8000u);
}
SHOESTRING_INLINE void split(F32 x, uint16_t* weight, uint16_t* remainder) {
  // Every NaN becomes 0x7fc00000, because rounding the bits of another NaN could give a number.
  U32 bits = x == x ? as_bits(x) : U32{} + 0x7fc00000u;
  U16 high = __builtin_convertvector((bits + 0x8000u) >> 16, U16),
      low = __builtin_convertvector(bits & 0xffffu, U16);
  __builtin_memcpy(weight, &high, sizeof high);
  __builtin_memcpy(remainder, &low, sizeof low);
}

// Loads `count` elements as fp32 into to[0, kStateBlock), padded with zeros. With kAdd, adds the elements to
// `to` instead of overwriting it.
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
