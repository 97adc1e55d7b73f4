#pragma once

// SIMD registers as vector types of the compiler, so that arithmetic, comparison and `mask ? a : b` are
// language operators. Everything is in the capability's own namespace. Otherwise the linker could merge a
// function compiled for AVX-512 into code for a machine with only AVX2. For this reason, *_simd.cpp files use
// no templates of the standard library either.

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 has false warnings in intrinsics
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
constexpr int kLanes = kBytes / 4;  // number of fp32 lanes in a register

typedef float F32 __attribute__((vector_size(kBytes)));
typedef int32_t I32 __attribute__((vector_size(kBytes)));
typedef uint32_t U32 __attribute__((vector_size(kBytes)));
// register that holds a 16-bit element for each fp32 lane
typedef uint16_t U16 __attribute__((vector_size(kBytes / 2)));
// register that holds a byte for each fp32 lane
typedef uint8_t U8 __attribute__((vector_size(kBytes / 4)));

#define SHOESTRING_INLINE static inline __attribute__((always_inline))
#define SHOESTRING_METHOD inline __attribute__((always_inline))

// The intrinsics compile to a broadcast, which a load executes. GCC compiles F32{} + x to an addition and a
// shuffle, which take the execution ports of FMA on Intel's CPUs.
#if defined(__AVX512F__)
SHOESTRING_INLINE F32 splat(float x) { return _mm512_set1_ps(x); }
#elif defined(__AVX2__)
SHOESTRING_INLINE F32 splat(float x) { return _mm256_set1_ps(x); }
#else
SHOESTRING_INLINE F32 splat(float x) { return F32{} + x; }
#endif

SHOESTRING_INLINE F32 as_float(U32 x) { return (F32)x; }
SHOESTRING_INLINE U32 as_bits(F32 x) { return (U32)x; }

template <class V, class T>
SHOESTRING_INLINE V load_as(const T* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}

SHOESTRING_INLINE F32 load(const float* p) { return load_as<F32>(p); }
SHOESTRING_INLINE void store(float* p, F32 v) { __builtin_memcpy(p, &v, sizeof v); }

// Load or store the first n lanes of a register. Loading sets the other lanes to `fill`.
SHOESTRING_INLINE F32 load(const float* p, int64_t n, float fill) {
  F32 v = splat(fill);
  __builtin_memcpy(&v, p, n * sizeof(float));
  return v;
}
SHOESTRING_INLINE void store(float* p, F32 v, int64_t n) { __builtin_memcpy(p, &v, n * sizeof(float)); }

// Maximum and minimum of each lane. If a or b is NaN, the result is b.
#if defined(__AVX512F__)
SHOESTRING_INLINE F32 max(F32 a, F32 b) { return _mm512_max_ps(a, b); }
SHOESTRING_INLINE F32 min(F32 a, F32 b) { return _mm512_min_ps(a, b); }
#elif defined(__AVX2__)
SHOESTRING_INLINE F32 max(F32 a, F32 b) { return _mm256_max_ps(a, b); }
SHOESTRING_INLINE F32 min(F32 a, F32 b) { return _mm256_min_ps(a, b); }
#else
SHOESTRING_INLINE F32 max(F32 a, F32 b) { return a > b ? a : b; }
SHOESTRING_INLINE F32 min(F32 a, F32 b) { return a < b ? a : b; }
#endif
SHOESTRING_INLINE F32 abs(F32 x) { return as_float(as_bits(x) & 0x7fffffffu); }

#if defined(__AVX512F__)
SHOESTRING_INLINE F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
SHOESTRING_INLINE F32 sqrt(F32 x) { return _mm512_sqrt_ps(x); }
SHOESTRING_INLINE bool any(I32 mask) { return _mm512_movepi32_mask((__m512i)mask) != 0; }
SHOESTRING_INLINE I32 widen(const uint8_t* p) {
  return (I32)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
#elif defined(__AVX2__)
SHOESTRING_INLINE F32 fma(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }
SHOESTRING_INLINE F32 sqrt(F32 x) { return _mm256_sqrt_ps(x); }
SHOESTRING_INLINE bool any(I32 mask) { return _mm256_movemask_ps((__m256)mask) != 0; }
SHOESTRING_INLINE I32 widen(const uint8_t* p) {
  return (I32)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
#else
// Without an FMA instruction, fma() rounds the product and then the sum.
SHOESTRING_INLINE F32 fma(F32 a, F32 b, F32 c) { return a * b + c; }
SHOESTRING_INLINE F32 sqrt(F32 x) {
  for (int i = 0; i < kLanes; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
}
SHOESTRING_INLINE bool any(I32 mask) {
  int32_t all = 0;
  for (int i = 0; i < kLanes; ++i) all |= mask[i];
  return all != 0;
}
SHOESTRING_INLINE I32 widen(const uint8_t* p) { return __builtin_convertvector(load_as<U8>(p), I32); }
#endif

// lookup() returns for each lane the entry of an fp32 table with eight entries that the lane's lowest three
// bits select. The table stays in a register if the CPU can shuffle a register by index.
#if defined(__AVX512F__)
typedef F32 Table8;
SHOESTRING_INLINE Table8 load_table8(const float* p) { return _mm512_broadcast_f32x8(_mm256_loadu_ps(p)); }
SHOESTRING_INLINE F32 lookup(Table8 t, U32 i) { return _mm512_permutexvar_ps((__m512i)i, t); }
#elif defined(__AVX2__)
typedef F32 Table8;
SHOESTRING_INLINE Table8 load_table8(const float* p) { return _mm256_loadu_ps(p); }
SHOESTRING_INLINE F32 lookup(Table8 t, U32 i) { return _mm256_permutevar8x32_ps(t, (__m256i)i); }
#else
typedef const float* Table8;
SHOESTRING_INLINE Table8 load_table8(const float* p) { return p; }
SHOESTRING_INLINE F32 lookup(Table8 t, U32 i) {
  F32 v;
  for (int lane = 0; lane < kLanes; ++lane) v[lane] = t[i[lane] & 7u];
  return v;
}
#endif

// Returns -x in lanes where the sign bit of `sign` is set, else x. With AVX2, the result is 0 where all bits
// of `sign` are 0.
SHOESTRING_INLINE I32 copy_sign(I32 x, F32 sign) {
#if defined(__AVX512F__)
  return (I32)_mm512_mask_sub_epi32((__m512i)x, _mm512_movepi32_mask((__m512i)sign), (__m512i)I32{},
                                    (__m512i)x);
#elif defined(__AVX2__)
  return (I32)_mm256_sign_epi32((__m256i)x, (__m256i)sign);
#else
  I32 mask = (I32)as_bits(sign) >> 31;
  return (x ^ mask) - mask;
#endif
}

// Returns x + 1 in lanes where a > b, else x. With AVX-512, the comparison's mask selects the lanes directly.
SHOESTRING_INLINE I32 add_where_greater(I32 x, F32 a, F32 b) {
#if defined(__AVX512F__)
  const __mmask16 greater = _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ);
  return (I32)_mm512_mask_add_epi32((__m512i)x, greater, (__m512i)x, _mm512_set1_epi32(1));
#else
  return x - (a > b);
#endif
}

// Returns the minimum of the unsigned 16-bit halves of each lane.
SHOESTRING_INLINE U32 min_halves(U32 a, U32 b) {
#if defined(__AVX512F__)
  return (U32)_mm512_min_epu16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (U32)_mm256_min_epu16((__m256i)a, (__m256i)b);
#else
  typedef uint16_t Halves __attribute__((vector_size(kBytes)));
  return (U32)((Halves)a < (Halves)b ? (Halves)a : (Halves)b);
#endif
}

// Adds `bias` to each integer in four registers, and stores the sums as bytes, one register after the other.
// The sums must be in [0, 255].
SHOESTRING_INLINE void store_bytes(uint8_t* p, I32 a, I32 b, I32 c, I32 d, int bias) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  // AVX2's pack instructions work within 128-bit halves of a register. The permutation restores the order of
  // the groups of four bytes.
  const __m256i offset = _mm256_set1_epi16(static_cast<int16_t>(bias));
  __m256i low = _mm256_add_epi16(_mm256_packs_epi32((__m256i)a, (__m256i)b), offset);
  __m256i high = _mm256_add_epi16(_mm256_packs_epi32((__m256i)c, (__m256i)d), offset);
  __m256i bytes = _mm256_packus_epi16(low, high);
  bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bytes);
#else
  const I32 v[4] = {a + bias, b + bias, c + bias, d + bias};
  for (int i = 0; i < 4; ++i) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p) + i, _mm512_cvtepi32_epi8((__m512i)v[i]));
#else
    U8 bytes = __builtin_convertvector(v[i], U8);
    __builtin_memcpy(p + i * kLanes, &bytes, sizeof bytes);
#endif
  }
#endif
}

// Conversions between bf16 and fp32. A bf16 number is the upper half of an fp32 number. Rounding is to
// nearest, ties to even; NaN stays NaN.
#if defined(__AVX512F__)
SHOESTRING_INLINE F32 from_bf16(U16 x) { return as_float((U32)_mm512_cvtepu16_epi32((__m256i)x) << 16); }
#elif defined(__AVX2__)
SHOESTRING_INLINE F32 from_bf16(U16 x) { return as_float((U32)_mm256_cvtepu16_epi32((__m128i)x) << 16); }
#else
SHOESTRING_INLINE F32 from_bf16(U16 x) { return as_float(__builtin_convertvector(x, U32) << 16); }
#endif
// round_upper_half() and rounded_bf16() return the rounded bf16 number in the upper half of each lane; the
// lower half is undefined. round_upper_half() may turn a NaN whose lower half is not zero into a number.
SHOESTRING_INLINE U32 round_upper_half(F32 x) {
  const U32 bits = as_bits(x), above = bits + 0x7fffu;
#if defined(__AVX512F__)
  const __mmask16 odd = _mm512_test_epi32_mask((__m512i)bits, _mm512_set1_epi32(0x10000));
  return (U32)_mm512_mask_add_epi32((__m512i)above, odd, (__m512i)above, _mm512_set1_epi32(1));
#else
  return above + ((bits >> 16) & 1u);
#endif
}
SHOESTRING_INLINE U32 rounded_bf16(F32 x) { return x == x ? round_upper_half(x) : as_bits(x) | 0x400000u; }
SHOESTRING_INLINE U16 to_bf16(F32 x) { return __builtin_convertvector(rounded_bf16(x) >> 16, U16); }

// Stores the upper 16 bits of each lane of register a, then those of register b.
SHOESTRING_INLINE void store_upper_halves(uint16_t* p, U32 a, U32 b) {
#if defined(__AVX512F__)
  __m512i odd;
  {
    alignas(64) uint16_t i[32];
    for (int k = 0; k < 32; ++k) i[k] = static_cast<uint16_t>(2 * k + 1);
    __builtin_memcpy(&odd, i, sizeof i);
  }
  _mm512_storeu_si512(p, _mm512_permutex2var_epi16((__m512i)a, odd, (__m512i)b));
#elif defined(__AVX2__)
  // The pack instruction works within 128-bit halves of a register. The permutation below restores the order.
  __m256i both = _mm256_packus_epi32((__m256i)(a >> 16), (__m256i)(b >> 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(both, 0xd8));
#else
  U16 x = __builtin_convertvector(a >> 16, U16), y = __builtin_convertvector(b >> 16, U16);
  __builtin_memcpy(p, &x, sizeof x);
  __builtin_memcpy(p + kLanes, &y, sizeof y);
#endif
}

#if defined(__AVX512F__)
SHOESTRING_INLINE F32 from_fp16(U16 x) { return (F32)_mm512_cvtph_ps((__m256i)x); }
SHOESTRING_INLINE U16 to_fp16(F32 x) {
  return (U16)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif defined(__AVX2__)
SHOESTRING_INLINE F32 from_fp16(U16 x) { return (F32)_mm256_cvtph_ps((__m128i)x); }
SHOESTRING_INLINE U16 to_fp16(F32 x) {
  return (U16)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#else
// Shifts the exponent and mantissa of an fp16 number to their place in an fp32 number. Multiplying by 2^112
// then corrects the exponent's bias and normalises subnormal numbers.
SHOESTRING_INLINE F32 from_fp16(U16 x) {
  U32 h = __builtin_convertvector(x, U32);
  F32 magnitude = as_float((h & 0x7fffu) << 13) * 0x1p112f;
  U32 special = (h & 0x7c00u) == 0x7c00u ? ((h & 0x3ffu) << 13) | 0x7f800000u : as_bits(magnitude);
  return as_float(special | ((h & 0x8000u) << 16));
}
SHOESTRING_INLINE U16 to_fp16(F32 x) {
  U32 sign = (as_bits(x) >> 16) & 0x8000u;
  U32 bits = as_bits(x) & 0x7fffffffu;
  U32 normal = (bits - (112u << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  // For a magnitude below 2^-14, adding 0.5 rounds it to a subnormal fp16 number, in the low bits of the
  // mantissa.
  U32 small = as_bits(as_float(bits) + 0.5f) - 0x3f000000u;
  U32 half = bits < 0x38800000u ? small : normal;
  half = bits >= 0x477ff000u ? U32{} + 0x7c00u : half;
  half = bits > 0x7f800000u ? U32{} + 0x7e00u : half;
  return __builtin_convertvector(half | sign, U16);
}
#endif

SHOESTRING_INLINE float horizontal_sum(F32 v) {
  I32 lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2) v += __builtin_shuffle(v, lane ^ half);
  return v[0];
}
SHOESTRING_INLINE float horizontal_max(F32 v) {
  float lanes[kLanes];
  store(lanes, v);
  float best = lanes[0];
  for (int i = 1; i < kLanes; ++i) best = lanes[i] > best ? lanes[i] : best;
  return best;
}

// Returns the address of p[i] for a prefetch, which may lie outside the array. The address is computed as an
// integer, because pointer arithmetic is undefined there.
template <class T>
SHOESTRING_INLINE const void* address(const T* p, int64_t i) {
  return reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(p) +
                                       static_cast<uintptr_t>(i) * sizeof(T));
}

// Prefetches the memory of n elements, `ahead` elements after p, for which a pass over memory would otherwise
// wait.
template <bool kWrite = false, class T>
SHOESTRING_INLINE void ask_for(const T* p, int64_t ahead, int64_t n) {
#pragma GCC unroll 4
  for (int64_t i = 0; i < n; i += 64 / static_cast<int64_t>(sizeof(T)))
    __builtin_prefetch(address(p, ahead + i), kWrite, 2);
}

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
