// Quantises to 4 bits on the CPU. The code of an element is found by a branch-free binary search of the 15
// midpoints between neighbouring values, in four steps. For each step, one register holds the 1, 2, 4 or 8
// midpoints that it may need. The result of the earlier steps selects one of them.

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns about its own AVX-512 headers
#endif

#include "quantization/quantize_4bit_table.h"

#include "core/vec_simd.h"
#include "quantization/packed_simd.h"

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
  // Returns the number of midpoints below x, or 15 if x is NaN.
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

// Encodes x[0] to x[31], each multiplied by `inverse`, into 16 bytes.
SHOESTRING_INLINE void encode32(const float* x, float inverse, const Search& search, uint8_t* packed) {
  pack32([&](int k) __attribute__((always_inline)) { return search(load(x + k) * inverse); }, packed);
}

// Lower bound of the scale by which elements are divided: a smaller scale would have an infinite reciprocal.
// bitsandbytes uses the same constant, so the packed bytes agree.
constexpr float kSmallestScale = 1e-38f;

template <class T, class Widen>
SHOESTRING_INLINE void quantize(const T* x, int64_t count, int64_t block_size, const Codebook& book,
                                uint8_t* packed, float* absmax, Widen to_float) {
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
      // Like bitsandbytes, a short last block divides by its scale instead of multiplying by the reciprocal,
      // and stores at least kSmallestScale.
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
  if (book.order[0] == 0) return;  // the codes of NF4 are already in ascending order of their values
  for (int64_t i = 0; i < bytes; ++i) {
    const uint8_t b = packed_begin[i];
    packed_begin[i] = (uint8_t)(book.order[b >> 4] << 4 | book.order[b & 15]);
  }
}

void quantize_float(const float* x, int64_t count, int64_t block_size, const Codebook& book, uint8_t* packed,
                    float* absmax) {
  quantize(x, count, block_size, book, packed, absmax, [](auto... a) { widen(a...); });
}
void quantize_bf16(const uint16_t* x, int64_t count, int64_t block_size, const Codebook& book,
                   uint8_t* packed, float* absmax) {
  quantize(x, count, block_size, book, packed, absmax, [](auto... a) { widen16<convert_bf16>(a...); });
}
void quantize_fp16(const uint16_t* x, int64_t count, int64_t block_size, const Codebook& book,
                   uint8_t* packed, float* absmax) {
  quantize(x, count, block_size, book, packed, absmax, [](auto... a) { widen16<convert_fp16>(a...); });
}

}  // namespace

extern const kernels::Quantize4bitTable quantize_4bit;
const kernels::Quantize4bitTable quantize_4bit{quantize_float, quantize_bf16, quantize_fp16};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
