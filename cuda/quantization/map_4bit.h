#pragma once

// Encodes and decodes 4-bit optimizer state on the GPU (the format is in quantization/map_4bit.h). A warp
// handles a block of 256 elements; each lane has eight consecutive ones, whose codes are one 32-bit word. The
// group of elements that shares a scale is held by 4 lanes for signed state, and by 16 for unsigned state.
// Encoding and decoding take a few instructions on a float's bits, without a table and therefore without a
// barrier. They round exactly as on the CPU.

#include "cuda/core/warp.h"
#include "quantization/map_4bit.h"

namespace shoestring::cuda {

constexpr int kPerLane4 = 8;
static_assert(kPerLane4 * kWarp == kernels::kStateBlock);

/// Number of lanes that share a scale. Lane l uses scale number l / kGroupLanes4 of its block.
template <bool kSigned>
constexpr int kGroupLanes4 = static_cast<int>(kernels::kGroup4<kSigned>) / kPerLane4;

/// Decodes a lane's eight codes and multiplies them by the group's scale.
template <bool kSigned>
__device__ void decode4(uint32_t codes, float scale, float (&x)[kPerLane4]) {
#pragma unroll
  for (int i = 0; i < kPerLane4; ++i) {
    if (kSigned) {
      const int k = static_cast<int>(codes << (28 - 4 * i)) >> 28;
      const float magnitude =
          __uint_as_float(kernels::kBias4Bits + abs(k) * kernels::kStep4Signed) - kernels::kBias4;
      x[i] = __fmul_rn(__uint_as_float(__float_as_uint(magnitude) | (k & 0x80000000u)), scale);
    } else {
      const int k = codes >> 4 * i & 15;
      x[i] = __fmul_rn(__uint_as_float(kernels::kOneBits - k * kernels::kStep4Unsigned), scale);
    }
  }
}

/// Returns the scale of the group to which the lane belongs, to all lanes of the group. It is NaN if an
/// element is NaN, otherwise infinite if an element is infinite.
template <bool kSigned>
__device__ float find_scale4(const float (&x)[kPerLane4]) {
  // largest magnitude as bits; for signed state shifted left by one, with the sign in the lowest bit
  unsigned most = 0;
#pragma unroll
  for (int i = 0; i < kPerLane4; ++i) {
    const unsigned bits = __float_as_uint(x[i]);
    most = max(most, kSigned ? __funnelshift_l(bits, bits, 1) : bits & 0x7fffffffu);
  }
#pragma unroll
  for (int offset = 1; offset < kGroupLanes4<kSigned>; offset *= 2) {
    most = max(most, __shfl_xor_sync(kAllLanes, most, offset));
  }
  if (!kSigned) return __uint_as_float(most);
  // The sign of the scale is chosen so that the element of largest magnitude, divided by the scale, is -1.
  return __uint_as_float(most != 0 ? most >> 1 | ~most << 31 : 0);
}

/// Returns the codes of a lane's eight elements, given the scale of the group. If the scale is tiny, scale
/// and x are first multiplied by a power of two.
template <bool kSigned>
__device__ uint32_t encode4(float (&x)[kPerLane4], float scale, kernels::Rounding4 rounding) {
  if (scale != 0 && fabsf(scale) < kernels::kTinyScale4) {
    scale *= kernels::kRaise4;
#pragma unroll
    for (int i = 0; i < kPerLane4; ++i) x[i] *= kernels::kRaise4;
  }
  const float inverse = scale != 0 ? __frcp_rn(scale) : 0;
  // For rounding to the nearest, the dither has weight zero. So dithered rounding and rounding to the nearest
  // use the same instructions.
  const int weight = !rounding.dithered ? 0 : kSigned ? kernels::kDither4Signed : kernels::kDither4Unsigned;
  const uint32_t phase = rounding.phase + lane() * (kPerLane4 * kernels::kDitherStride);
  const int offset =
      kSigned ? kernels::offset4_signed(rounding.dithered) : kernels::offset4_unsigned(rounding.dithered);
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < kPerLane4; ++i) {
    const int dither = static_cast<int16_t>(phase + i * kernels::kDitherStride) * weight + offset;
    float part = __fmul_rn(x[i], inverse);
    int k;
    if (kSigned) {
      part = fminf(part, kernels::kTop4Signed);
      const int steps = static_cast<int>(__float_as_uint(__fadd_rn(fabsf(part), kernels::kBias4))) + dither;
      k = __float2int_rn(fmaxf(__fmul_rn(static_cast<float>(steps), kernels::kInverseStep4Signed), 0));
      if (part < 0) k = -k;
    } else {
      const int steps = dither - static_cast<int>(__float_as_uint(fmaxf(part, 0)));
      k = __float2int_rn(fminf(__fmul_rn(static_cast<float>(steps), kernels::kInverseStep4Unsigned), 15));
    }
    codes |= static_cast<uint32_t>(k & 15) << 4 * i;
  }
  return codes;
}

}  // namespace shoestring::cuda
