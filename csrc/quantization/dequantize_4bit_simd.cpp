// Dequantises 4-bit weights on the CPU. For each block, the kernel scales the 16 possible values and rounds
// them to the output's dtype. Register shuffles then look up the value of every code.

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns about its own AVX-512 headers
#endif

#include "quantization/quantize_4bit_table.h"

#include "core/vec_simd.h"
#include "quantization/packed_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

using kernels::Packed;

#if defined(__AVX2__)
// Splits 16 bytes into 32 codes in the order of the elements: codes 0-15 in the first register, 16-31 in the
// second.
SHOESTRING_INLINE void split(const uint8_t* packed, __m128i& first, __m128i& second) {
  const __m128i mask = _mm_set1_epi8(15);
  __m128i bytes = _mm_loadu_si128((const __m128i*)packed);
  __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask), low = _mm_and_si128(bytes, mask);
  first = _mm_unpacklo_epi8(high, low);
  second = _mm_unpackhi_epi8(high, low);
}
#endif

#if defined(__AVX512F__)
struct FloatTable {
  __m512 table;
  explicit SHOESTRING_METHOD FloatTable(const F32 (&scaled)[1]) : table((__m512)scaled[0]) {}
  inline __attribute__((always_inline)) void decode32(const uint8_t* packed, float* out) const {
    __m128i first, second;
    split(packed, first, second);
    _mm512_storeu_ps(out, _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(first), table));
    _mm512_storeu_ps(out + 16, _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(second), table));
  }
};
template <U16 (*Convert)(F32)>
struct HalfTable {
  __m512i table;
  explicit SHOESTRING_METHOD HalfTable(const F32 (&scaled)[1])
      : table(_mm512_broadcast_i64x4((__m256i)Convert(scaled[0]))) {}
  inline __attribute__((always_inline)) void decode32(const uint8_t* packed, uint16_t* out) const {
    __m128i first, second;
    split(packed, first, second);
    __m512i index = _mm512_cvtepu8_epi16(_mm256_set_m128i(second, first));
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(index, table));
  }
};
#elif defined(__AVX2__)
SHOESTRING_INLINE __m256i twice(__m128i x) { return _mm256_broadcastsi128_si256(x); }

// A lookup table of 16 values. It is stored as byte planes: the first bytes of all values, their second bytes
// and so on. One byte shuffle looks up one plane.
struct FloatTable {
  __m256i plane[4];
  explicit SHOESTRING_METHOD FloatTable(const F32 (&scaled)[2]) {
    alignas(32) float values[16];
    for (int k = 0; k < 2; ++k) store(values + 8 * k, scaled[k]);
    const __m128i gather = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m128i q[4];
    for (int k = 0; k < 4; ++k)
      q[k] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)(values + 4 * k)), gather);
    __m128i a = _mm_unpacklo_epi32(q[0], q[1]), b = _mm_unpacklo_epi32(q[2], q[3]);
    __m128i c = _mm_unpackhi_epi32(q[0], q[1]), d = _mm_unpackhi_epi32(q[2], q[3]);
    plane[0] = twice(_mm_unpacklo_epi64(a, b));
    plane[1] = twice(_mm_unpackhi_epi64(a, b));
    plane[2] = twice(_mm_unpacklo_epi64(c, d));
    plane[3] = twice(_mm_unpackhi_epi64(c, d));
  }
  inline __attribute__((always_inline)) void decode32(const uint8_t* packed, float* out) const {
    __m128i first, second;
    split(packed, first, second);
    const __m256i index = _mm256_set_m128i(second, first);
    __m256i b[4];
    for (int k = 0; k < 4; ++k) b[k] = _mm256_shuffle_epi8(plane[k], index);
    const __m256i low[2] = {_mm256_unpacklo_epi8(b[0], b[1]), _mm256_unpackhi_epi8(b[0], b[1])};
    const __m256i high[2] = {_mm256_unpacklo_epi8(b[2], b[3]), _mm256_unpackhi_epi8(b[2], b[3])};
    for (int k = 0; k < 2; ++k) {  // each 128-bit half of a register holds four neighbouring elements
      __m256i even = _mm256_unpacklo_epi16(low[k], high[k]), odd = _mm256_unpackhi_epi16(low[k], high[k]);
      _mm256_storeu_si256((__m256i*)(out + 8 * k), _mm256_permute2x128_si256(even, odd, 0x20));
      _mm256_storeu_si256((__m256i*)(out + 16 + 8 * k), _mm256_permute2x128_si256(even, odd, 0x31));
    }
  }
};
template <U16 (*Convert)(F32)>
struct HalfTable {
  __m256i plane[2];
  explicit SHOESTRING_METHOD HalfTable(const F32 (&scaled)[2]) {
    const __m128i first = (__m128i)Convert(scaled[0]), second = (__m128i)Convert(scaled[1]);
    const __m128i gather = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    __m128i a = _mm_shuffle_epi8(first, gather), b = _mm_shuffle_epi8(second, gather);
    plane[0] = twice(_mm_unpacklo_epi64(a, b));
    plane[1] = twice(_mm_unpackhi_epi64(a, b));
  }
  inline __attribute__((always_inline)) void decode32(const uint8_t* packed, uint16_t* out) const {
    __m128i first, second;
    split(packed, first, second);
    const __m256i index = _mm256_set_m128i(second, first);
    __m256i b0 = _mm256_shuffle_epi8(plane[0], index), b1 = _mm256_shuffle_epi8(plane[1], index);
    __m256i even = _mm256_unpacklo_epi8(b0, b1), odd = _mm256_unpackhi_epi8(b0, b1);
    _mm256_storeu_si256((__m256i*)out, _mm256_permute2x128_si256(even, odd, 0x20));
    _mm256_storeu_si256((__m256i*)(out + 16), _mm256_permute2x128_si256(even, odd, 0x31));
  }
};
#else
template <class T, class Vector, Vector (*Convert)(F32)>
struct PlainTable {
  T values[16];
  explicit PlainTable(const F32 (&scaled)[4]) {
    for (int k = 0; k < 4; ++k) {
      const Vector v = Convert(scaled[k]);
      __builtin_memcpy(values + 4 * k, &v, sizeof v);
    }
  }
  void decode32(const uint8_t* packed, T* out) const {
    for (int k = 0; k < 16; ++k) {
      out[2 * k] = values[packed[k] >> 4];
      out[2 * k + 1] = values[packed[k] & 15];
    }
  }
};
F32 same(F32 x) { return x; }
using FloatTable = PlainTable<float, F32, same>;
template <U16 (*Convert)(F32)>
using HalfTable = PlainTable<uint16_t, U16, Convert>;
#endif

template <class Table, class T>
SHOESTRING_INLINE void dequantize(const Packed& p, int64_t begin, int64_t end, T* out) {
  F32 code[kTableParts];
  for (int k = 0; k < kTableParts; ++k) code[k] = load(p.codebook->value + k * kLanes);
  int64_t block = begin / p.block_size, stop = (block + 1) * p.block_size;
  for (int64_t i = begin; i < end; ++block, stop += p.block_size) {
    if (stop > end) stop = end;
    F32 scaled[kTableParts];
    scaled_values(p, code, block, scaled);
    const Table table(scaled);
    if (i % 2 != 0) {  // the requested range begins at the second element of a byte
      T pair[32];
      uint8_t byte[16] = {p.packed[i / 2]};
      table.decode32(byte, pair);
      *out++ = pair[1];
      ++i;
    }
    for (; i + 32 <= stop; i += 32, out += 32) table.decode32(p.packed + i / 2, out);
    if (i < stop) {
      T rest[32];
      uint8_t bytes[16] = {};
      __builtin_memcpy(bytes, p.packed + i / 2, (stop - i + 1) / 2);
      table.decode32(bytes, rest);
      __builtin_memcpy(out, rest, (stop - i) * sizeof(T));
      out += stop - i;
      i = stop;
    }
  }
}

void dequantize_float(const Packed& p, int64_t begin, int64_t end, float* out) {
  dequantize<FloatTable>(p, begin, end, out);
}
SHOESTRING_INLINE U16 round_bf16(F32 x) { return to_bf16(x); }
SHOESTRING_INLINE U16 round_fp16(F32 x) { return to_fp16(x); }
void dequantize_bf16(const Packed& p, int64_t begin, int64_t end, uint16_t* out) {
  dequantize<HalfTable<round_bf16>>(p, begin, end, out);
}
void dequantize_fp16(const Packed& p, int64_t begin, int64_t end, uint16_t* out) {
  dequantize<HalfTable<round_fp16>>(p, begin, end, out);
}

}  // namespace

extern const kernels::Dequantize4bitTable dequantize_4bit;
const kernels::Dequantize4bitTable dequantize_4bit{dequantize_float, dequantize_bf16, dequantize_fp16};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
