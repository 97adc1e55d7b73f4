// Fits and encodes int4 weights on the CPU. A block stays in the L1 cache while scale and offset are fitted.
// Every build of this file (plain, AVX2, AVX-512) sums in 16 lanes, in one, two or four registers, so that
// all builds find the same codes. For the same reason this file is compiled without fused multiply-adds.

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns about its own AVX-512 headers
#endif

#include "quantization/fit_int4.h"

#include "core/vec_simd.h"
#include "quantization/packed_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

using kernels::Int4Fit;
using kernels::kInt4Lanes;
using kernels::kInt4Shift;

constexpr int64_t kLargestBlock = 4096;
constexpr int kBatch = 4;
constexpr int kParts = kInt4Lanes / kLanes;
typedef float F4 __attribute__((vector_size(16)));

// A sum that is accumulated in 16 lanes. folded() returns the sum of the lanes.
struct Lanes {
  F32 part[kParts] = {};

  SHOESTRING_METHOD float folded() const {
    F4 quarter[4];
    __builtin_memcpy(quarter, part, sizeof quarter);
    const F4 four = (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
    return (four[0] + four[2]) + (four[1] + four[3]);
  }
};

// The grid of an int4 fit: its scale, the reciprocal of the scale, and its offset, broadcast to registers.
struct Grid {
  F32 scale, offset, inverse;
  explicit SHOESTRING_METHOD Grid(const Int4Fit& fit)
      : scale(splat(fit.scale)), offset(splat(fit.offset)), inverse(splat(fit.inverse())) {}
  // Returns code + kInt4Shift, where the code (-8 to 7) is away / scale, rounded, and `away` is x - offset.
  // The lowest bits of the result are the code; subtracting kInt4Shift gives the code as a float.
  SHOESTRING_METHOD F32 shifted(F32 away) const {
    return min(max(away * inverse, splat(-8)), splat(7)) + kInt4Shift;
  }
};

struct Sums {
  Lanes error, codes, squares, pulls, products;

  template <bool kWhole>
  SHOESTRING_METHOD void add(const float* x, const Grid& grid, F32 limit, int64_t left) {
#pragma GCC unroll 4
    for (int k = 0; k < kParts; ++k) {
      const F32 away = load(x + k * kLanes) - grid.offset;
      F32 code = grid.shifted(away) - kInt4Shift;
      F32 rest = away - code * grid.scale;
      if (!kWhole) {
        I32 lane;
        for (int l = 0; l < kLanes; ++l) lane[l] = k * kLanes + l;
        const I32 there = lane < static_cast<int32_t>(left);
        code = there ? code : F32{};
        rest = there ? rest : F32{};
      }
      const F32 pull = max(min(rest, limit), -limit);
      error.part[k] += abs(rest);
      codes.part[k] += code;
      squares.part[k] += code * code;
      pulls.part[k] += pull;
      products.part[k] += code * pull;
    }
  }
};

// Returns the initial scale and offset for the block x, which has n elements and is padded to a multiple of
// 16 with copies of one of them. If the returned scale is 0, later fitting steps change neither scale nor
// offset.
SHOESTRING_INLINE Int4Fit first_fit(const float* x, int64_t n) {
  const int64_t padded = (n + kInt4Lanes - 1) / kInt4Lanes * kInt4Lanes;
  const float top = largest_magnitude(x, padded);
  if (top == 0) return {0, 0};
  if (!(top < __builtin_inff())) return kernels::nan_int4();
  F32 low = load(x), high = low;
  for (int64_t i = kLanes; i < padded; i += kLanes) {
    low = min(low, load(x + i));
    high = max(high, load(x + i));
  }
  return kernels::first_int4(-horizontal_max(-low), horizontal_max(high));
}

// Fits scale and offset of `count` blocks of n elements each. A fitting step for one block is a chain of
// dependent sums and divisions. Several blocks are fitted together, so that their chains overlap.
SHOESTRING_INLINE void fit_blocks(const float* x, int64_t n, int count, Int4Fit (&best)[kBatch]) {
  Int4Fit fit[kBatch];
  float smallest[kBatch], limit[kBatch], error[kBatch];
  kernels::Int4Sums folded[kBatch];
  for (int b = 0; b < count; ++b) {
    best[b] = fit[b] = first_fit(x + b * n, n);
    smallest[b] = __builtin_inff();
    limit[b] = fit[b].scale * 0.5f;
  }
  for (int step = 0; step <= kernels::kInt4Steps; ++step) {
    for (int b = 0; b < count; ++b) {
      const Grid grid(fit[b]);
      const F32 most = splat(limit[b]);
      const float* block = x + b * n;
      Sums sums;
      int64_t i = 0;
      for (; i + kInt4Lanes <= n; i += kInt4Lanes) sums.add<true>(block + i, grid, most, 0);
      if (i < n) sums.add<false>(block + i, grid, most, n - i);
      error[b] = sums.error.folded();
      folded[b] = {sums.codes.folded(), sums.squares.folded(), sums.pulls.folded(), sums.products.folded()};
    }
    for (int b = 0; b < count; ++b) {
      if (error[b] < smallest[b]) {
        smallest[b] = error[b];
        best[b] = fit[b];
      }
      fit[b] = kernels::next_int4(fit[b], folded[b], n);
      limit[b] *= kernels::kInt4Decay;
    }
  }
}

// Stores the codes of x in (n + 1) / 2 bytes. x has n elements and is padded to a multiple of 32.
SHOESTRING_INLINE void encode(const float* x, int64_t n, const Int4Fit& fit, uint8_t* packed) {
  const Grid grid(fit);
  for (int64_t i = 0; i < n; i += 32) {
    const auto code = [&](int k) __attribute__((always_inline)) {
      const F32 away = load(x + i + k) - grid.offset;
      return ((I32)as_bits(grid.shifted(away)) + 8) & 15;
    };
    uint8_t bytes[16];
    pack32(code, bytes);
    const int64_t left = (n - i + 1) / 2;
    __builtin_memcpy(packed + i / 2, bytes, left < 16 ? left : 16);
  }
  if (n % 2 != 0) packed[n / 2] &= 0xf0;
}

template <class T, class Widen>
SHOESTRING_INLINE void quantize(const T* x, int64_t count, int64_t block_size, uint8_t* packed,
                                kernels::Int4Scale* scales, Widen to_float) {
  alignas(64) float buffer[kLargestBlock];
  const int64_t most = kLargestBlock / block_size;
  for (int64_t left = count; left > 0;) {
    const int64_t n = left < block_size ? left : block_size;  // the last block may be shorter than block_size
    int64_t batch = left / n < most ? left / n : most;
    if (batch > kBatch) batch = kBatch;
    const float* blocks = buffer;
    if constexpr (sizeof(T) == sizeof(float)) {
      if (n == block_size) blocks = x;
    }
    if (blocks == buffer) {
      to_float(x, batch * n, buffer);
      for (int64_t i = n; n < block_size && i % 32 != 0; ++i) buffer[i] = buffer[0];
    }
    Int4Fit best[kBatch];
    fit_blocks(blocks, n, static_cast<int>(batch), best);
    for (int64_t b = 0; b < batch; ++b) {
      scales[b] = best[b].packed();
      encode(blocks + b * n, n, best[b], packed + b * n / 2);
    }
    scales += batch;
    packed += batch * n / 2;
    x += batch * n;
    left -= batch * n;
  }
}

void quantize_float(const float* x, int64_t count, int64_t block_size, uint8_t* packed,
                    kernels::Int4Scale* scales) {
  quantize(x, count, block_size, packed, scales, [](auto... a) { widen(a...); });
}
void quantize_bf16(const uint16_t* x, int64_t count, int64_t block_size, uint8_t* packed,
                   kernels::Int4Scale* scales) {
  quantize(x, count, block_size, packed, scales, [](auto... a) { widen16<convert_bf16>(a...); });
}
void quantize_fp16(const uint16_t* x, int64_t count, int64_t block_size, uint8_t* packed,
                   kernels::Int4Scale* scales) {
  quantize(x, count, block_size, packed, scales, [](auto... a) { widen16<convert_fp16>(a...); });
}

}  // namespace

extern const kernels::QuantizeInt4Table quantize_int4;
const kernels::QuantizeInt4Table quantize_int4{quantize_float, quantize_bf16, quantize_fp16};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
