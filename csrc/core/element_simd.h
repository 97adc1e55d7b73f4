#pragma once

// Element types in memory (fp32, bf16 and fp16), with conversions to and from fp32 registers. A `Pair` holds
// two registers of elements in the order that is cheapest to load; elementwise code can use a Pair without
// reordering. as_pair() converts two registers from memory order to a Pair, and in_order() converts back.

#include "core/vec_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

struct Pair {
  F32 first, second;
};

// Replaces a NaN by one whose lower 16 bits are zero, because BFloat16::store_pair() rounds such a NaN to a
// bf16 NaN.
SHOESTRING_INLINE F32 plain_nan(F32 x) { return x == x ? x : splat(__builtin_nanf("")); }

struct Float {
  using Type = float;
  static SHOESTRING_METHOD Pair load_pair(const float* p) { return {load(p), load(p + kLanes)}; }
  static SHOESTRING_METHOD void store_pair(float* p, Pair x) { store(p, x.first, x.second); }
  static SHOESTRING_METHOD Pair as_pair(Pair x) { return x; }
  static SHOESTRING_METHOD Pair in_order(Pair x) { return x; }
  static SHOESTRING_METHOD F32 widen(F32 x) { return x; }
  static SHOESTRING_METHOD F32 load(const float* p) { return load_as<F32>(p); }
  static SHOESTRING_METHOD void store(float* p, F32 x, F32 y) {
    __builtin_memcpy(p, &x, sizeof x);
    __builtin_memcpy(p + kLanes, &y, sizeof y);
  }
};
struct BFloat16 {
  using Type = uint16_t;
  static SHOESTRING_METHOD Pair load_pair(const uint16_t* p) {
    const U32 both = load_as<U32>(p);
    return {as_float(both << 16), as_float(both & 0xffff0000u)};
  }
  // Rounds a Pair to bf16 and stores it. The values must be computed from bf16 elements. A NaN that comes
  // from a bf16 element has zeros in its lower 16 bits, so rounding cannot carry into its upper 16 bits.
  // Other NaNs could become numbers.
  static SHOESTRING_METHOD void store_pair(uint16_t* p, Pair x) {
    const U32 both = (round_upper_half(x.first) >> 16) | (round_upper_half(x.second) & 0xffff0000u);
    __builtin_memcpy(p, &both, sizeof both);
  }
  static SHOESTRING_METHOD Pair as_pair(Pair x) {
    I32 even;
    for (int i = 0; i < kLanes; ++i) even[i] = 2 * i;
    return {__builtin_shuffle(x.first, x.second, even), __builtin_shuffle(x.first, x.second, even + 1)};
  }
  static SHOESTRING_METHOD Pair in_order(Pair x) {
    I32 both;
    for (int i = 0; i < kLanes; ++i) both[i] = i / 2 + i % 2 * kLanes;
    return {__builtin_shuffle(x.first, x.second, both),
            __builtin_shuffle(x.first, x.second, both + kLanes / 2)};
  }
  static SHOESTRING_METHOD F32 widen(U16 x) { return from_bf16(x); }
  static SHOESTRING_METHOD F32 load(const uint16_t* p) { return widen(load_as<U16>(p)); }
  static SHOESTRING_METHOD void store(uint16_t* p, F32 x, F32 y) {
    store_upper_halves(p, rounded_bf16(x), rounded_bf16(y));
  }
};
struct Half {
  using Type = uint16_t;
  static SHOESTRING_METHOD Pair load_pair(const uint16_t* p) { return {load(p), load(p + kLanes)}; }
  static SHOESTRING_METHOD void store_pair(uint16_t* p, Pair x) { store(p, x.first, x.second); }
  static SHOESTRING_METHOD Pair as_pair(Pair x) { return x; }
  static SHOESTRING_METHOD Pair in_order(Pair x) { return x; }
  static SHOESTRING_METHOD F32 widen(U16 x) { return from_fp16(x); }
  static SHOESTRING_METHOD F32 load(const uint16_t* p) { return widen(load_as<U16>(p)); }
  static SHOESTRING_METHOD void store(uint16_t* p, F32 x, F32 y) {
    const U16 both[2] = {to_fp16(x), to_fp16(y)};
    __builtin_memcpy(p, both, sizeof both);
  }
};

// load_rest() loads the first n elements, n < kLanes, into a register and sets its other lanes to zero. n may
// be 0 or negative.
#if defined(__AVX512F__)
SHOESTRING_INLINE uint32_t first_lanes(int64_t n) { return n > 0 ? (1u << n) - 1 : 0; }
SHOESTRING_INLINE F32 masked_load(const float* p, int64_t n) {
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>(first_lanes(n)), p);
}
SHOESTRING_INLINE U16 masked_load(const uint16_t* p, int64_t n) {
  return (U16)_mm256_maskz_loadu_epi16(static_cast<__mmask16>(first_lanes(n)), p);
}
template <class E>
SHOESTRING_INLINE F32 load_rest(const typename E::Type* p, int64_t n) {
  return E::widen(masked_load(p, n));
}
#else
// This function is not inlined, because inlined copies made up most of the machine code of rms_norm and
// layer_norm.
template <class E>
__attribute__((noinline)) F32 load_rest(const typename E::Type* p, int64_t n) {
  typename E::Type some[kLanes] = {};
  if (n > 0) __builtin_memcpy(some, p, n * sizeof some[0]);
  return E::load(some);
}
#endif

// Loads the first n elements into a register and sets its other lanes to zero. n may be 0, and may exceed the
// number of lanes.
template <class E>
SHOESTRING_INLINE F32 load_some(const typename E::Type* p, int64_t n) {
  return n >= kLanes ? E::load(p) : load_rest<E>(p, n);
}

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
