// Multiplies a quantised weight by a few tokens on the CPU. The cost is that of reading the weight's bytes,
// so codes are decoded into registers and multiplied there. The sum over a block is multiplied by the block's
// scale. For int4, scale and offset are applied to the table of 16 values instead, which makes the product a
// tenth slower. The upper half of a byte is the code of an even element, the lower half that of an odd one.
// The elements of each token of x are therefore stored with the even elements first, so that codes need no
// reordering.

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns about its own AVX-512 headers
#endif

#include "quantization/quantized_matvec_table.h"

#include "core/vec_simd.h"
#include "quantization/packed_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

using kernels::kMatvecTokens;
using kernels::Packed;
using kernels::PackedInt8;

// Looks up one of 16 values by the low four bits of each lane of the index.
#if defined(__AVX512F__)
struct Table16 {
  __m512 table;
  explicit SHOESTRING_METHOD Table16(const F32 (&values)[1]) : table(values[0]) {}
  SHOESTRING_METHOD F32 operator()(I32 i) const { return _mm512_permutexvar_ps((__m512i)i, table); }
};
#elif defined(__AVX2__)
struct Table16 {
  __m256 low, high;
  explicit SHOESTRING_METHOD Table16(const F32 (&values)[2]) : low(values[0]), high(values[1]) {}
  SHOESTRING_METHOD F32 operator()(I32 i) const {
    const __m256i index = (__m256i)i;
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index), _mm256_permutevar8x32_ps(high, index),
                            _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
  }
};
#else
struct Table16 {
  float values[16];
  explicit Table16(const F32 (&v)[4]) { __builtin_memcpy(values, v, sizeof values); }
  SHOESTRING_METHOD F32 operator()(I32 i) const {
    F32 v;
    for (int lane = 0; lane < kLanes; ++lane) v[lane] = values[i[lane] & 15];
    return v;
  }
};
#endif

template <int kTokens, bool kOffset>
void multiply_blocks(const Packed& p, int64_t first, int64_t last, int64_t columns, const float* x, float* y,
                     int64_t stride) {
  F32 code[kTableParts], values[kTableParts];
  for (int k = 0; k < kTableParts; ++k) code[k] = load(p.codebook->value + k * kLanes);
  Table16 table(code);
  const int64_t half = columns / 2, blocks = columns / p.block_size;
  for (int64_t row = first; row < last; ++row) {
    const uint8_t* codes = p.packed + row * half;
    const float *even = x, *odd = x + half;
    F32 total[kTokens] = {};
    for (int64_t block = 0; block < blocks; ++block) {
      if constexpr (kOffset) {
        scaled_values(p, code, row * blocks + block, values);
        table = Table16(values);
      }
      F32 evens[kTokens] = {}, odds[kTokens] = {};
      for (int64_t i = 0; i < p.block_size / 2; i += kLanes) {
        const I32 pair = widen(codes + i);
        const F32 upper = table(pair >> 4), lower = table(pair);
#pragma GCC unroll 4
        for (int t = 0; t < kTokens; ++t) {
          evens[t] = fma(upper, load(even + t * columns + i), evens[t]);
          odds[t] = fma(lower, load(odd + t * columns + i), odds[t]);
        }
      }
      const F32 scale = splat(kOffset ? 1 : scale_of(p, row * blocks + block));
      for (int t = 0; t < kTokens; ++t) total[t] = fma(evens[t] + odds[t], scale, total[t]);
      codes += p.block_size / 2;
      even += p.block_size / 2;
      odd += p.block_size / 2;
    }
    for (int t = 0; t < kTokens; ++t) y[t * stride + row] = horizontal_sum(total[t]);
  }
}

template <int kTokens>
void multiply_4bit(const Packed& p, int64_t first, int64_t last, int64_t columns, const float* x, float* y,
                   int64_t stride) {
  p.offset != nullptr ? multiply_blocks<kTokens, true>(p, first, last, columns, x, y, stride)
                      : multiply_blocks<kTokens, false>(p, first, last, columns, x, y, stride);
}

template <int kTokens>
void multiply_int8(const PackedInt8& p, int64_t first, int64_t last, int64_t columns, const float* x,
                   float* y, int64_t stride) {
  for (int64_t row = first; row < last; ++row) {
    const int8_t* codes = p.codes + row * columns;
    F32 sum[2][kTokens] = {};
    int64_t i = 0;
    for (; i + 2 * kLanes <= columns; i += 2 * kLanes) {
      for (int k = 0; k < 2; ++k) {
        const F32 w = to_float(codes + i + k * kLanes);
#pragma GCC unroll 4
        for (int t = 0; t < kTokens; ++t)
          sum[k][t] = fma(w, load(x + t * columns + i + k * kLanes), sum[k][t]);
      }
    }
    const float scale = p.absmax[row] * kernels::kInverse127;
    for (int t = 0; t < kTokens; ++t) {
      float total = horizontal_sum(sum[0][t] + sum[1][t]);
      for (int64_t j = i; j < columns; ++j) total += static_cast<float>(codes[j]) * x[t * columns + j];
      y[t * stride + row] = total * scale;
    }
  }
}

#define SHOESTRING_BY_TOKENS(NAME, View)                                                                 \
  void NAME(const View& p, int64_t first, int64_t last, int64_t columns, const float* x, int64_t tokens, \
            float* y, int64_t stride) {                                                                  \
    switch (tokens) {                                                                                    \
      case 1:                                                                                            \
        return NAME<1>(p, first, last, columns, x, y, stride);                                           \
      case 2:                                                                                            \
        return NAME<2>(p, first, last, columns, x, y, stride);                                           \
      case 3:                                                                                            \
        return NAME<3>(p, first, last, columns, x, y, stride);                                           \
      default:                                                                                           \
        return NAME<4>(p, first, last, columns, x, y, stride);                                           \
    }                                                                                                    \
  }
SHOESTRING_BY_TOKENS(multiply_4bit, Packed)
SHOESTRING_BY_TOKENS(multiply_int8, PackedInt8)
#undef SHOESTRING_BY_TOKENS

}  // namespace

extern const kernels::QuantizedMatvecTable quantized_matvec;
const kernels::QuantizedMatvecTable quantized_matvec{multiply_4bit, multiply_int8};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
