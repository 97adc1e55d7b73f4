// Compresses gradients with error feedback, and decompresses the mean of several, on the CPU. A block is read
// from memory once; its sums stay in the L1 cache until they are encoded.

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns about its own AVX-512 headers
#endif

#include "quantization/compress_gradient_table.h"

#include "core/element_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

using kernels::GradientCodec;
using kernels::GradientType;

constexpr int kAhead = 1024;         // elements that are brought to the caches ahead of a block
constexpr int kLargest = 256;        // elements of the largest block
constexpr float kMagic = 0x1.8p23f;  // x + kMagic rounds x to an integer, in the low bits of the sum
constexpr uint32_t kMagicBits = 0x4b400000u;

// Adds the gradient to the error. Returns the largest magnitude, or NaN if there is one: as integers, the
// bits of NaN are the largest.
template <class E, int kBlock>
SHOESTRING_INLINE float add_block(const float* error, const typename E::Type* gradient, float* sum) {
  I32 most[2] = {};
  for (int i = 0; i < kBlock; i += 2 * kLanes) {
#pragma GCC unroll 2
    for (int r = 0; r < 2; ++r) {
      const F32 x = load(error + i + r * kLanes) + E::load(gradient + i + r * kLanes);
      store(sum + i + r * kLanes, x);
      const I32 magnitude = (I32)(as_bits(x) & 0x7fffffffu);
      most[r] = magnitude > most[r] ? magnitude : most[r];
    }
  }
  I32 top = most[0] > most[1] ? most[0] : most[1], lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2) {
    const I32 other = __builtin_shuffle(top, lane ^ half);
    top = other > top ? other : top;
  }
  return as_float((U32)top)[0];
}

// Adds magnitudes as a tree of halves, which every capability and the CUDA kernel add in the same order.
SHOESTRING_INLINE float sum_of_magnitudes(const float* x) {
  float tree[kLargest / 2];
  for (int i = 0; i < kLargest / 2; i += kLanes)
    store(tree + i, abs(load(x + i)) + abs(load(x + i + kLargest / 2)));
  for (int half = kLargest / 4; half >= kLanes; half /= 2) {
    for (int i = 0; i < half; i += kLanes) store(tree + i, load(tree + i) + load(tree + i + half));
  }
  return horizontal_sum(load(tree));
}

// Rounds the largest magnitude / levels up to 16 significant bits.
SHOESTRING_INLINE float scale_of(float top, float inverse_levels) {
  float scale = top * inverse_levels;
  uint32_t bits;
  __builtin_memcpy(&bits, &scale, sizeof bits);
  bits = (bits + 0xffu) & ~0xffu;
  __builtin_memcpy(&scale, &bits, sizeof scale);
  return scale;
}

struct Code {
  F32 number;
  I32 integer;
};
SHOESTRING_INLINE Code code_of(F32 x, F32 inverse) {
  const F32 shifted = x * inverse + kMagic;
  return {shifted - kMagic, (I32)(as_bits(shifted) - kMagicBits)};
}

SHOESTRING_INLINE uint32_t sign_bits(F32 x) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)x);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps((__m256)x));
#elif defined(__SSE2__)
  return static_cast<uint32_t>(_mm_movemask_ps((__m128)x));
#else
  uint32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits |= as_bits(x)[lane] >> 31 << lane;
  return bits;
#endif
}

// Moves bit i of `bits` to the sign of lane i.
SHOESTRING_INLINE U32 signs_of(uint32_t bits) {
  U32 shift;
  for (int lane = 0; lane < kLanes; ++lane) shift[lane] = static_cast<uint32_t>(31 - lane);
  return ((U32{} + bits) << shift) & 0x80000000u;
}

SHOESTRING_INLINE uint32_t read_bits(const uint8_t* codes, int element) {
  if constexpr (kLanes == 16) {
    uint16_t two;
    __builtin_memcpy(&two, codes + element / 8, sizeof two);
    return two;
  } else {
    return static_cast<uint32_t>(codes[element / 8] >> element % 8);
  }
}

SHOESTRING_INLINE void encode(GradientCodec<8>, const float* sum, F32 scale, F32 inverse, float* error,
                              uint8_t* codes) {
  for (int i = 0; i < 256; i += 4 * kLanes) {
    I32 integer[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const F32 x = load(sum + i + r * kLanes);
      const Code code = code_of(x, inverse);
      store(error + i + r * kLanes, x - code.number * scale);
      integer[r] = code.integer;
    }
    store_bytes(codes + i, integer[0], integer[1], integer[2], integer[3], 128);
  }
}

SHOESTRING_INLINE void encode(GradientCodec<4>, const float* sum, F32 scale, F32 inverse, float* error,
                              uint8_t* codes) {
  for (int i = 0; i < 64; i += 4 * kLanes) {
    I32 both[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const int at = i + r * kLanes;
      const F32 x = load(sum + at), y = load(sum + at + 64);
      const Code low = code_of(x, inverse), high = code_of(y, inverse);
      store(error + at, x - low.number * scale);
      store(error + at + 64, y - high.number * scale);
      both[r] = low.integer + (high.integer << 4);
    }
    store_bytes(codes + i, both[0], both[1], both[2], both[3], 8 + (8 << 4));
  }
}

SHOESTRING_INLINE void encode(GradientCodec<1>, const float* sum, F32 scale, F32, float* error,
                              uint8_t* codes) {
  for (int i = 0; i < 256; i += 16) {
    uint32_t bits = 0;
#pragma GCC unroll 4
    for (int k = 0; k < 16; k += kLanes) {
      const F32 x = load(sum + i + k);
      store(error + i + k, x - as_float(as_bits(scale) | (as_bits(x) & 0x80000000u)));
      bits |= sign_bits(x) << k;
    }
    const auto two = static_cast<uint16_t>(bits);
    __builtin_memcpy(codes + i / 8, &two, sizeof two);
  }
}

// Compresses kTogether whole blocks, so that one block's sums are read while the scale of another is
// computed. The first `count` elements of the last block belong to the gradient; the others are zero.
template <class Codec, class E, int kTogether>
SHOESTRING_INLINE void compress_blocks(float* error, const typename E::Type* gradient, int64_t count,
                                       uint8_t* records) {
  constexpr int kBlock = Codec::kBlock;
  constexpr bool kSigns = __is_same(Codec, GradientCodec<1>);
  alignas(kBytes) float sum[kTogether][kBlock];
  float most[kTogether];  // largest magnitude, or with 1 bit the sum of magnitudes
#pragma GCC unroll 2
  for (int k = 0; k < kTogether; ++k) {
    most[k] = add_block<E, kBlock>(error + k * kBlock, gradient + k * kBlock, sum[k]);
    if constexpr (kSigns) most[k] = sum_of_magnitudes(sum[k]);
  }
  // Brings later blocks to the caches while these are encoded, when no load would ask for them.
  for (int i = 0; i < kTogether * kBlock; i += 16) {
    __builtin_prefetch(address(error, kAhead + i), 1);
    if (i * sizeof(typename E::Type) % 64 == 0) __builtin_prefetch(address(gradient, kAhead + i));
  }
#pragma GCC unroll 2
  for (int k = 0; k < kTogether; ++k) {
    uint8_t* record = records + k * Codec::kRecord;
    float scale, inverse = 0;
    if constexpr (kSigns) {
      scale = most[k] / static_cast<float>(k + 1 < kTogether ? kBlock : count);
    } else {
      scale = most[k] < kernels::kTinyGradient ? 0 : scale_of(most[k], Codec::kInverse);
      inverse = scale > 0 ? 1 / scale : 0;
    }
    if (!(most[k] < kernels::kHugeGradient)) {
      scale = __builtin_nanf("");
      __builtin_memset(record + 4, 0, Codec::kRecord - 4);
      __builtin_memset(error + k * kBlock, 0, kBlock * sizeof(float));
    } else {
      encode(Codec(), sum[k], splat(scale), splat(inverse), error + k * kBlock, record + 4);
    }
    __builtin_memcpy(record, &scale, sizeof scale);
  }
}

template <class Codec, class E>
void compress_all(float* error, const typename E::Type* gradient, int64_t n, uint8_t* records) {
  constexpr int kTogether = __is_same(Codec, GradientCodec<1>) ? 1 : 2, kStep = kTogether * Codec::kBlock;
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep, records += kTogether * Codec::kRecord)
    compress_blocks<Codec, E, kTogether>(error + i, gradient + i, Codec::kBlock, records);
  for (; i < n; i += Codec::kBlock, records += Codec::kRecord) {
    const int64_t count = n - i < Codec::kBlock ? n - i : Codec::kBlock;
    float some[Codec::kBlock] = {};
    typename E::Type rest[Codec::kBlock] = {};
    __builtin_memcpy(some, error + i, count * sizeof(float));
    __builtin_memcpy(rest, gradient + i, count * sizeof rest[0]);
    compress_blocks<Codec, E, 1>(some, rest, count, records);
    __builtin_memcpy(error + i, some, count * sizeof(float));
  }
}

SHOESTRING_INLINE F32 scale_at(const uint8_t* record) {
  float scale;
  __builtin_memcpy(&scale, record, sizeof scale);
  return splat(scale);
}

template <class T>
SHOESTRING_INLINE F32 number(T x) {
  return __builtin_convertvector(x, F32);
}

// Returns the values of the codes from element `at` on.
SHOESTRING_INLINE F32 values(GradientCodec<8>, const uint8_t* record, F32 scale, int at) {
  return number(widen(record + 4 + at) - 128) * scale;
}
SHOESTRING_INLINE F32 values(GradientCodec<1>, const uint8_t* record, F32 scale, int at) {
  return as_float(as_bits(scale) ^ signs_of(read_bits(record + 4, at)));
}

// Writes the means of a whole block to out. `records` are those of the first rank.
template <class E, class Codec>
  requires(Codec::kBlock == 256)
SHOESTRING_INLINE void mean_block(Codec codec, const uint8_t* records, int64_t stride, int64_t ranks,
                                  F32 factor, typename E::Type* out) {
  for (int i = 0; i < 256; i += 4 * kLanes) {
    F32 sum[4] = {};
    const uint8_t* record = records;
    for (int64_t rank = 0; rank < ranks; ++rank, record += stride) {
      const F32 scale = scale_at(record);
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) sum[r] += values(codec, record, scale, i + r * kLanes);
    }
#pragma GCC unroll 2
    for (int r = 0; r < 4; r += 2) E::store(out + i + r * kLanes, sum[r] * factor, sum[r + 1] * factor);
  }
}

template <class E>
SHOESTRING_INLINE void mean_block(GradientCodec<4>, const uint8_t* records, int64_t stride, int64_t ranks,
                                  F32 factor, typename E::Type* out) {
  for (int i = 0; i < 64; i += 2 * kLanes) {
    F32 low[2] = {}, high[2] = {};
    const uint8_t* record = records;
    for (int64_t rank = 0; rank < ranks; ++rank, record += stride) {
      const F32 scale = scale_at(record);
#pragma GCC unroll 2
      for (int r = 0; r < 2; ++r) {
        const I32 both = widen(record + 4 + i + r * kLanes);
        low[r] += number((both & 15) - 8) * scale;
        high[r] += number((both >> 4) - 8) * scale;
      }
    }
    E::store(out + i, low[0] * factor, low[1] * factor);
    E::store(out + i + 64, high[0] * factor, high[1] * factor);
  }
}

template <class Codec, class E>
void mean_all(const uint8_t* records, int64_t stride, int64_t ranks, int64_t n, typename E::Type* out) {
  const F32 factor = splat(1.f / static_cast<float>(ranks));
  int64_t i = 0;
  for (; i + Codec::kBlock <= n; i += Codec::kBlock, records += Codec::kRecord)
    mean_block<E>(Codec(), records, stride, ranks, factor, out + i);
  if (i == n) return;
  typename E::Type some[Codec::kBlock];
  mean_block<E>(Codec(), records, stride, ranks, factor, some);
  __builtin_memcpy(out + i, some, (n - i) * sizeof some[0]);
}

// Calls body(codec, element type).
template <class Body>
SHOESTRING_INLINE void select(int bits, GradientType type, Body body) {
  kernels::with_gradient_codec(bits, [&](auto codec) {
    switch (type) {
      case GradientType::kFloat:
        return body(codec, Float());
      case GradientType::kBFloat16:
        return body(codec, BFloat16());
      default:
        return body(codec, Half());
    }
  });
}

void compress(int bits, GradientType type, float* error, const void* gradient, int64_t n, uint8_t* records) {
  select(bits, type, [&](auto codec, auto element) {
    using E = decltype(element);
    compress_all<decltype(codec), E>(error, static_cast<const typename E::Type*>(gradient), n, records);
  });
}

void decompress_mean(int bits, GradientType type, const uint8_t* records, int64_t stride, int64_t ranks,
                     int64_t n, void* out) {
  select(bits, type, [&](auto codec, auto element) {
    using E = decltype(element);
    mean_all<decltype(codec), E>(records, stride, ranks, n, static_cast<typename E::Type*>(out));
  });
}

}  // namespace

extern const kernels::CompressGradientTable compress_gradient;
const kernels::CompressGradientTable compress_gradient{compress, decompress_mean};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
