// The 15 midpoints are searched in four steps without a branch: the 1, 2, 4 and 8 midpoints that a step can meet lie in
// one register, which the steps before index.

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own AVX-512 headers
#endif

#include "kernels/quantize_4bit.h"

#include "cpu/vec.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

using kernels::Codebook;

constexpr int64_t kLargestBlock = 4096;

#if defined(__AVX2__)
struct Search {
  F32 level[4];
  explicit Search(const Codebook& book) {
    for (int step = 0; step < 4; ++step) {
      float entries[kLanes] = {};
      for (int i = 0; i < (1 << step); ++i) entries[i] = book.midpoint[(16 >> step) * i + (8 >> step) - 1];
      level[step] = load(entries);
    }
  }
  // The number of midpoints below x; 15 for NaN.
  inline __attribute__((always_inline)) I32 operator()(F32 x) const {
    I32 index = (I32)(x <= splat(level[0][0])) + 1;
    for (int step = 1; step < 4; ++step) {
#if defined(__AVX512F__)
      F32 t = (F32)_mm512_permutexvar_ps((__m512i)index, (__m512)level[step]);
#else
      F32 t = (F32)_mm256_permutevar8x32_ps((__m256)level[step], (__m256i)index);
#endif
      index = index + index + 1 + (I32)(x <= t);
    }
    return index;
  }
};
#else
struct Search {
  const float* midpoint;
  explicit Search(const Codebook& book) : midpoint(book.midpoint) {}
  I32 operator()(F32 x) const {
    I32 index = I32{} + 15;
    for (int i = 0; i < 15; ++i) index += (I32)(x <= splat(midpoint[i]));
    return index;
  }
};
#endif

// 32 values to 16 bytes.
SHOESTRING_INLINE void encode32(const float* x, float inverse, const Search& search, uint8_t* packed) {
#if defined(__AVX512F__)
  for (int half = 0; half < 2; ++half) {
    __m512i i = (__m512i)search(load(x + 16 * half) * inverse);
    __m512i pairs = _mm512_or_si512(_mm512_slli_epi64(i, 4), _mm512_srli_epi64(i, 32));
    _mm_storel_epi64((__m128i*)(packed + 8 * half), _mm512_cvtepi64_epi8(pairs));
  }
#elif defined(__AVX2__)
  const __m256i weight = _mm256_set1_epi32(16 | 1 << 16);  // a pair's first element goes into the upper four bits
  __m256i i[4];
  for (int k = 0; k < 4; ++k) i[k] = (__m256i)search(load(x + 8 * k) * inverse);
  __m256i a = _mm256_madd_epi16(_mm256_packs_epi32(i[0], i[1]), weight);
  __m256i b = _mm256_madd_epi16(_mm256_packs_epi32(i[2], i[3]), weight);
  __m256i words = _mm256_packs_epi32(a, b);
  __m256i bytes = _mm256_packus_epi16(words, words);
  _mm_storeu_si128((__m128i*)packed,
                   _mm_unpacklo_epi16(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
#else
  int32_t index[32];
  for (int k = 0; k < 32; k += kLanes) {
    I32 i = search(load(x + k) * inverse);
    __builtin_memcpy(index + k, &i, sizeof i);
  }
  for (int k = 0; k < 16; ++k) packed[k] = (uint8_t)(index[2 * k] << 4 | index[2 * k + 1]);
#endif
}

// The largest magnitude; NaN where there is one, since its bits are the largest. n is a multiple of 32.
SHOESTRING_INLINE float largest_magnitude(const float* x, int64_t n) {
  I32 best{};
  for (int64_t i = 0; i < n; i += kLanes) {
    I32 bits = (I32)(as_bits(load(x + i)) & 0x7fffffffu);
    best = bits > best ? bits : best;
  }
  int32_t top = 0;
  for (int i = 0; i < kLanes; ++i) top = best[i] > top ? best[i] : top;
  float result;
  __builtin_memcpy(&result, &top, sizeof result);
  return result;
}

SHOESTRING_INLINE void widen(const float* from, int64_t n, float* to) { __builtin_memcpy(to, from, n * sizeof(float)); }
template <F32 (*Convert)(U16)>
SHOESTRING_INLINE void widen16(const uint16_t* from, int64_t n, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, Convert(load_as<U16>(from + i)));
  if (i < n) {
    U16 rest{};
    __builtin_memcpy(&rest, from + i, (n - i) * sizeof(uint16_t));
    store(to + i, Convert(rest), n - i);
  }
}
F32 convert_bf16(U16 x) { return from_bf16(x); }
F32 convert_fp16(U16 x) { return from_fp16(x); }

// A scale below this would have an infinite reciprocal. The value is bitsandbytes', whose bytes these are.
constexpr float kSmallestScale = 1e-38f;

template <class T, class Widen>
SHOESTRING_INLINE void quantize(const T* x, int64_t count, int64_t block_size, const Codebook& book, uint8_t* packed,
                                float* absmax, Widen to_float) {
  const Search search(book);
  alignas(64) float buffer[kLargestBlock];
  const int64_t bytes = (count + 1) / 2;
  uint8_t* const packed_begin = packed;
  for (int64_t begin = 0; begin < count; begin += block_size) {
    const int64_t n = count - begin < block_size ? count - begin : block_size;
    const float* block = buffer;
    if constexpr (sizeof(T) == sizeof(float)) {
      if (n == block_size) block = x + begin;
    }
    if (block == buffer) to_float(x + begin, n, buffer);
    if (n == block_size) {
      const float scale = largest_magnitude(block, n);
      *absmax++ = scale;
      const float inverse = 1 / (scale < kSmallestScale ? kSmallestScale : scale);
      for (int64_t i = 0; i < n; i += 32) encode32(block + i, inverse, search, packed + i / 2);
      packed += n / 2;
    } else {
      // The last block, where it is short: divided, and its scale never below the smallest, as bitsandbytes does.
      for (int64_t i = n; i % 32 != 0; ++i) buffer[i] = 0;
      const int64_t padded = (n + 31) / 32 * 32;
      float scale = largest_magnitude(buffer, padded);
      if (scale < kSmallestScale) scale = kSmallestScale;
      *absmax++ = scale;
      for (int64_t i = 0; i < n; ++i) buffer[i] = buffer[i] / scale;
      for (int64_t i = 0; i < padded; i += 32) {
        uint8_t last[16];
        encode32(buffer + i, 1, search, last);
        const int64_t left = (n + 1) / 2 - i / 2;
        __builtin_memcpy(packed + i / 2, last, left < 16 ? left : 16);
      }
    }
  }
  if (book.order[0] == 0) return;  // NF4: the intervals are numbered as the codes are
  for (int64_t i = 0; i < bytes; ++i) {
    const uint8_t b = packed_begin[i];
    packed_begin[i] = (uint8_t)(book.order[b >> 4] << 4 | book.order[b & 15]);
  }
}

void quantize_float(const float* x, int64_t count, int64_t block_size, const Codebook& book, uint8_t* packed,
                    float* absmax) {
  quantize(x, count, block_size, book, packed, absmax, [](auto... a) { widen(a...); });
}
void quantize_bf16(const uint16_t* x, int64_t count, int64_t block_size, const Codebook& book, uint8_t* packed,
                   float* absmax) {
  quantize(x, count, block_size, book, packed, absmax, [](auto... a) { widen16<convert_bf16>(a...); });
}
void quantize_fp16(const uint16_t* x, int64_t count, int64_t block_size, const Codebook& book, uint8_t* packed,
                   float* absmax) {
  quantize(x, count, block_size, book, packed, absmax, [](auto... a) { widen16<convert_fp16>(a...); });
}

}  // namespace

extern const kernels::Quantize4bitTable quantize_4bit;
const kernels::Quantize4bitTable quantize_4bit{quantize_float, quantize_bf16, quantize_fp16};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
