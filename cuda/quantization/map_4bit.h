#pragma once

// Encodes and decodes 4-bit optimizer state (quantization/map_4bit.h) on the GPU. A warp handles a block;
// each lane has eight consecutive elements, whose codes are one word. A signed group is 4 lanes and an
// unsigned group 16. There is no table and so no barrier. Both directions are a few instructions on a float's
// bits and round exactly as on the CPU.

#include "cuda/core/warp.h"
#include "quantization/map_4bit.h"

namespace shoestring::cuda {

constexpr int kPerLane4 = 8;
static_assert(kPerLane4 * kWarp == kernels::kStateBlock);

/// The number of lanes that share a scale: lane l uses scale l / kGroupLanes4 of its block.
template <bool kSigned>
constexpr int kGroupLanes4 = static_cast<int>(kernels::kGroup4<kSigned>) / kPerLane4;

/// Decodes a lane's codes.
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

/// Returns the scale of a lane's group, the same in all its lanes. It is NaN if an element is NaN, and
/// infinite if one is infinite.
template <bool kSigned>
__device__ float find_scale4(const float (&x)[kPerLane4]) {
  unsigned most = 0;  // signed: the magnitude, with the sign in the lowest bit
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
  return __uint_as_float(most != 0 ? most >> 1 | ~most << 31 : 0);  // the largest magnitude is -1
}

/// Returns the codes of a lane's elements for the group's scale. May multiply x by a power of two.
template <bool kSigned>
__device__ uint32_t encode4(float (&x)[kPerLane4], float scale, kernels::Rounding4 rounding) {
  if (scale != 0 && fabsf(scale) < kernels::kTinyScale4) {
    scale *= kernels::kRaise4;
#pragma unroll
    for (int i = 0; i < kPerLane4; ++i) x[i] *= kernels::kRaise4;
  }
  const float inverse = scale != 0 ? __frcp_rn(scale) : 0;
  // The weight is zero for rounding to the nearest, so that both kinds of rounding use the same instructions.
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
