// Quantises the rows of a matrix to int8 on the CPU. Each row is read twice: from memory for its largest
// magnitude, and from the cache for its codes.

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns about its own AVX-512 headers
#endif

#include "quantization/quantize_int8_table.h"

#include "core/vec_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

constexpr int kRegisters = 4;
constexpr int kStep = kRegisters * kLanes;

SHOESTRING_INLINE F32 read(const float* x) { return load(x); }
// A 16-bit number with a type of its own, so that the overloads of read() can tell bf16 from fp16.
template <F32 (*Convert)(U16)>
struct Half {
  uint16_t bits;
};
F32 convert_bf16(U16 x) { return from_bf16(x); }
F32 convert_fp16(U16 x) { return from_fp16(x); }
template <F32 (*Convert)(U16)>
SHOESTRING_INLINE F32 read(const Half<Convert>* x) {
  return Convert(load_as<U16>(x));
}

// Rounds each lane to the nearest integer, ties to even.
SHOESTRING_INLINE I32 round_to_int(F32 x) {
#if defined(__AVX512F__)
  return (I32)_mm512_cvtps_epi32(x);
#elif defined(__AVX2__)
  return (I32)_mm256_cvtps_epi32(x);
#else
  I32 i;
  for (int lane = 0; lane < kLanes; ++lane) i[lane] = static_cast<int32_t>(__builtin_rintf(x[lane]));
  return i;
#endif
}

// Stores kStep integers, each from -128 to 127, as int8 codes.
SHOESTRING_INLINE void store_int8(int8_t* codes, const I32 (&v)[kRegisters]) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  // The AVX2 pack instructions work within 128-bit halves, so a permutation restores the order of the groups
  // of four bytes.
  const __m256i low = _mm256_packs_epi32((__m256i)v[0], (__m256i)v[1]);
  const __m256i high = _mm256_packs_epi32((__m256i)v[2], (__m256i)v[3]);
  const __m256i bytes =
      _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), bytes);
#else
  for (int r = 0; r < kRegisters; ++r) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes) + r, _mm512_cvtepi32_epi8((__m512i)v[r]));
#else
    for (int lane = 0; lane < kLanes; ++lane) codes[r * kLanes + lane] = static_cast<int8_t>(v[r][lane]);
#endif
  }
#endif
}

// Calls body(from, i, n) for each step of kStep numbers of a row. The step begins at x[i], and its first n
// numbers belong to the row. `from` points to x[i] or, in the last step, to a copy that is padded with zeros.
template <class T, class Body>
SHOESTRING_INLINE void for_each_step(const T* x, int64_t columns, Body body) {
  int64_t i = 0;
  for (; i + kStep <= columns; i += kStep) body(x + i, i, kStep);
  if (i == columns) return;
  T rest[kStep] = {};
  __builtin_memcpy(rest, x + i, (columns - i) * sizeof(T));
  body(rest, i, columns - i);
}

// Returns the largest magnitude of a row, or NaN if the row contains one. The bits of magnitudes are compared
// as integers, where NaN is the largest.
template <class T>
SHOESTRING_INLINE float largest_magnitude(const T* x, int64_t columns) {
  I32 best[kRegisters] = {};
  for_each_step(x, columns, [&](const T* from, int64_t, int64_t) {
    for (int r = 0; r < kRegisters; ++r) {
      const I32 bits = (I32)(as_bits(read(from + r * kLanes)) & 0x7fffffffu);
      best[r] = bits > best[r] ? bits : best[r];
    }
  });
  int32_t top = 0;
  for (const I32& b : best) {
    for (int lane = 0; lane < kLanes; ++lane) top = b[lane] > top ? b[lane] : top;
  }
  float result;
  __builtin_memcpy(&result, &top, sizeof result);
  return result;
}

template <class T>
SHOESTRING_INLINE void quantize(const T* x, int64_t rows, int64_t columns, int8_t* codes, float* absmax) {
  for (int64_t row = 0; row < rows; ++row, x += columns, codes += columns) {
    const float top = largest_magnitude(x, columns);
    absmax[row] = top;
    const float scale = 1 / top * 127;  // division and multiplication round separately, as in bitsandbytes
    // All codes of a row are 0 if its scale is not usable: all elements are zero or nearly zero, or one is
    // infinite or NaN.
    if (!(scale > 0 && scale < __builtin_inff())) {
      __builtin_memset(codes, 0, columns);
      continue;
    }
    for_each_step(x, columns, [&](const T* from, int64_t i, int64_t n) {
      I32 v[kRegisters];
      for (int r = 0; r < kRegisters; ++r) v[r] = round_to_int(read(from + r * kLanes) * scale);
      if (n == kStep) return store_int8(codes + i, v);
      int8_t last[kStep];
      store_int8(last, v);
      __builtin_memcpy(codes + i, last, n);
    });
  }
}

void quantize_float(const float* x, int64_t rows, int64_t columns, int8_t* codes, float* absmax) {
  quantize(x, rows, columns, codes, absmax);
}
void quantize_bf16(const uint16_t* x, int64_t rows, int64_t columns, int8_t* codes, float* absmax) {
  quantize(reinterpret_cast<const Half<convert_bf16>*>(x), rows, columns, codes, absmax);
}
void quantize_fp16(const uint16_t* x, int64_t rows, int64_t columns, int8_t* codes, float* absmax) {
  quantize(reinterpret_cast<const Half<convert_fp16>*>(x), rows, columns, codes, absmax);
}

}  // namespace

extern const kernels::QuantizeInt8Table quantize_int8;
const kernels::QuantizeInt8Table quantize_int8{quantize_float, quantize_bf16, quantize_fp16};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
