#pragma once

// Encodes and decodes block-wise 8-bit codes on the GPU (the format is in quantization/dynamic_map.h). A warp
// handles a block of 256 elements, eight per lane.
//
// Decoding looks the code up in a table in shared memory. Encoding computes the code without a table search.
// The values of the map are numbered from the smallest magnitude on; the number of a value is called its
// count. A magnitude is encoded as the count of the nearest value. The boundary between two counts is half
// way between their values. Within a decade (a power of 10), the values are equally spaced. So the count is a
// linear function L of the magnitude, rounded down. L is wrong only at the first boundary of a decade,
// because the value below this boundary belongs to the decade below. There L is B + 0.2 instead of B, where B
// is the first count of the decade. A second linear function, X = 1.25 L - (B + 1) / 4, is B at this boundary
// and equals L at the next one. The minimum of L and X is therefore right in the whole decade. It is right
// slightly below the decade, too, so the hardware logarithm is accurate enough to select the decade. About
// one number in ten thousand is so close to a boundary (kNear) that rounding errors may change its count. It
// is compared with the exact boundary.

#include "cuda/core/math.h"
#include "cuda/core/vector.h"
#include "cuda/core/warp.h"
#include "quantization/dynamic_map.h"

namespace shoestring::cuda {

constexpr int kPerLane = 8;
static_assert(kPerLane * kWarp == kernels::kStateBlock);

// Bound on the rounding error of position() near a boundary between two counts, in units of the last bit of
// the fp32 result. The largest actual error at any boundary of the signed or unsigned map is one unit.
constexpr int kNear = 2;

// The constants of the signed or unsigned map, which are a kernel argument.
struct MapConstants {
  float bias, decode_offset[8], decode_slope[8];
  // slope and offset of the linear function L of each decade; the eighth one is for values that may round to
  // 1.0
  float slope[8], offset[8];
  float bend;  // constant term of the linear function X = 1.25 L - 0.28125 offset + bend
};

inline MapConstants make_constants(bool is_signed) {
  const kernels::DynamicMap& map = is_signed ? kernels::kSignedMap : kernels::kUnsignedMap;
  MapConstants c{};
  c.bias = map.bias;
  for (int i = 0; i < 8; ++i) {
    c.decode_offset[i] = map.offset[i];
    c.decode_slope[i] = map.slope[i];
  }
  // The values of L and X are shifted by a constant, `origin`, to a range in which the bits of a float are a
  // fixed-point number. For the signed map, they are the count plus 128. For the unsigned map, they are the
  // code (the count minus one) plus 256.
  const double origin = is_signed ? 128 + kNear / 65536. : 255 + kNear / 32768.;
  double scale = 1e6;
  for (int i = 1; i < 7; ++i) {
    scale /= 10;
    const double bins = 1 << (is_signed ? i : i + 1);
    c.slope[i] = static_cast<float>(bins * scale / 0.9);
    c.offset[i] = static_cast<float>(bins * 8 / 9 + origin);
  }
  // The linear functions L and X of the lowest decade, which has one boundary between counts. In the signed
  // map, it is half way between zero and the only value of the decade. In the unsigned map, it is between the
  // two values of the decade, and no magnitude above zero rounds to zero. X is an integer at this boundary.
  // In the unsigned map, X is just above an integer at magnitude zero, too. So settled() is called for zero
  // and returns code 0.
  const double start = is_signed ? 1 : 2.25 / 0.96875;
  const int below = is_signed ? 0 : 2;
  const double crossing = (below + 1 + 0.25 + 0.28125 * start) / 1.25;
  c.slope[0] = static_cast<float>((crossing - start) / map.middle[below]);
  c.offset[0] = static_cast<float>(start + origin);
  const double steep = is_signed ? 256 : 128;
  c.slope[7] = static_cast<float>(steep);
  c.offset[7] = static_cast<float>(map.highest - steep * map.middle[map.highest - 1] + origin);
  c.bend = static_cast<float>(0.03125 * origin - 0.25);
  return c;
}

// The look-up tables of the signed or unsigned map, in shared memory.
struct SharedMap {
  float value[256];  // the value of each code
  float2 line[8];    // slope and offset of the linear function L of each decade
};

/// Fills the tables of a map in shared memory. All threads of a block call it, and there must be at least 8.
/// A barrier must follow before the tables are read.
template <bool kSigned>
__device__ void fill(SharedMap& map, const MapConstants& c) {
  for (int code = threadIdx.x; code < 256; code += blockDim.x) {
    const float count = static_cast<float>(kSigned ? abs(code - 127) : code + 1);
    const unsigned segment = (__float_as_uint(count + c.bias) >> 23) & 7;
    const float value = __fmaf_rn(count, c.decode_slope[segment], c.decode_offset[segment]);
    map.value[code] = kSigned && code < 127 ? -value : value;
  }
  if (threadIdx.x < 8) map.line[threadIdx.x] = make_float2(c.slope[threadIdx.x], c.offset[threadIdx.x]);
}

/// Decodes a lane's eight codes, without multiplying by the block's scale.
__device__ inline void decode(uint2 codes, const SharedMap& map, float (&x)[kPerLane]) {
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) x[i] = map.value[(i < 4 ? codes.x : codes.y) >> (i % 4 * 8) & 0xff];
}

// Returns the count of a magnitude (for the unsigned map, its code) before rounding down, as a fixed-point
// number: the integer part in bits 16 to 23, and the fraction in bits 0 to 15.
template <bool kSigned>
__device__ unsigned position(float magnitude, const SharedMap& map, float bend) {
  // `decade` becomes log10(magnitude) + 7 rounded down, from 0 to 7. A decade is selected already for
  // magnitudes from 0.9945 times its start on. Up to its start, the linear functions of this decade and of
  // the decade below give the same codes, in both maps.
  constexpr float kLog = 0.301029996f / 8, kStart = (6.5f + 0.0023952f) / 8;
  // In [2, 4) the last bit of a float is 2^-22, so the low bits of the sum are the decade. Multiplying these
  // bits by sizeof(float2) gives an offset into the table and shifts the high bits out.
  const float decade = __fmaf_rn(__saturatef(__fmaf_rn(fast_log2(magnitude), kLog, kStart)), 0x1p-19f, 2.f);
  const unsigned offset = __float_as_uint(decade) * static_cast<unsigned>(sizeof(float2));
  const float2 line = *reinterpret_cast<const float2*>(reinterpret_cast<const char*>(map.line) + offset);
  const float straight = __fmaf_rn(magnitude, line.x, line.y);
  const float bent = __fmaf_rn(straight, 1.25f, __fmaf_rn(line.y, -0.28125f, bend));
  const unsigned bits = __float_as_uint(fminf(straight, bent));
  return kSigned ? bits : bits << 1;
}

// Corrects a result of position() that is near an integer, by comparing the magnitude with the exact boundary
// between two counts.
template <bool kSigned>
__device__ unsigned settled(unsigned position, float x, float magnitude, const SharedMap& map) {
  if ((position & 0xffff) >= (kSigned ? 2 : 4) * kNear) return position;
  if (!kSigned && x == 0) return 0;  // only zero itself has code 0 in the unsigned map
  const int upper = (position >> 16 & 0xff) + (kSigned ? 127 : 0);
  if (!kSigned && upper < 2) return position;
  return magnitude > (map.value[upper - 1] + map.value[upper]) * 0.5f ? position : position - 0x10000;
}

/// Encodes a lane's eight elements. Each code is that of the map's value nearest to x / scale, where `scale`
/// is the largest magnitude of the block.
template <bool kSigned>
__device__ uint2 encode(float (&x)[kPerLane], float scale, const SharedMap& map, float bend) {
  float inverse;
  if (scale >= 0x1p-100f && scale <= 0x1p100f) {
    inverse = round_reciprocal(scale, fast_reciprocal(scale));
  } else if (scale > 0x1p100f && scale < __uint_as_float(0x7f800000)) {
    inverse = __frcp_rn(scale);
  } else if (scale > 0 && scale < 0x1p-100f) {
    // The reciprocal of a scale below 2^-100 would overflow. Multiplying scale and elements by a power of two
    // changes no code.
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) x[i] *= 0x1p100f;
    inverse = __frcp_rn(scale * 0x1p100f);
  } else {
    // Returns codes of zero. Either all elements of the block are zero, or one is NaN or infinite. In the
    // latter case the scale is not finite, so the elements decode to 0 * scale, which is NaN.
    return kSigned ? make_uint2(0x7f7f7f7f, 0x7f7f7f7f) : make_uint2(0, 0);
  }
  const auto magnitude = [&](int i) {
    return kSigned ? fabsf(__fmul_rn(x[i], inverse)) : __fmul_rn(x[i], inverse);
  };
  unsigned at[kPerLane], near = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) at[i] = position<kSigned>(magnitude(i), map, bend);
  // Detects results of position() that are near an integer, two at once. If a fraction is small, the
  // subtraction below borrows in its half of the word.
#pragma unroll
  for (int i = 0; i < kPerLane; i += 2) {
    const unsigned fractions = __byte_perm(at[i], at[i + 1], 0x5410);
    near |= (fractions - (kSigned ? 0x20002u : 0x40004u) * kNear) & ~fractions;
  }
  if ((near & 0x80008000u) != 0) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) at[i] = settled<kSigned>(at[i], x[i], magnitude(i), map);
  }
  unsigned codes[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned* p = at + 4 * i;
    codes[i] = __byte_perm(__byte_perm(p[0], p[1], 0x62), __byte_perm(p[2], p[3], 0x62), 0x5410);
    if (kSigned) {
      const float* f = x + 4 * i;
      const unsigned low = __byte_perm(__float_as_uint(f[0]), __float_as_uint(f[1]), 0x73);
      const unsigned high = __byte_perm(__float_as_uint(f[2]), __float_as_uint(f[3]), 0x73);
      const unsigned sign = __byte_perm(low, high, 0x5410) & 0x80808080u;
      unsigned count = codes[i];
      // the signed map has no code for -1.0, so -1.0 gets the code of the next smaller magnitude
      count -= (count & sign) >> 7;
      // the code is 127 + count for positive elements, and 127 - count for negative ones
      codes[i] = 0x7f7f7f7fu + count - 2 * (count & (sign - (sign >> 7)));
    }
  }
  return make_uint2(codes[0], codes[1]);
}

/// Returns the largest magnitude of a warp's block, to every lane. The result is NaN if any element is NaN,
/// otherwise infinity if any is infinite. kSigned says whether elements may be negative.
template <bool kSigned>
__device__ float largest_magnitude(const float (&x)[kPerLane]) {
  unsigned most = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i)
    most = max(most, __float_as_uint(x[i]) & (kSigned ? 0x7fffffffu : 0xffffffffu));
  return __uint_as_float(warp_max(most) & 0x7fffffffu);
}

/// A lane's eight elements as raw 32-bit words. They are converted only after all loads have been issued.
template <class T>
struct Raw {
  static constexpr int kWords = kPerLane * sizeof(T) / 4;
  Vector<unsigned, kWords> words;

  __device__ Vector<T, kPerLane> values() const {
    Vector<T, kPerLane> v;
    memcpy(&v, &words, sizeof v);
    return v;
  }
};

/// Loads a lane's eight elements as vectors if `vectors` is true, which must hold for the whole warp or for
/// no lane. Otherwise it loads one element at a time; elements from index `left` on become zero.
template <class T>
__device__ Raw<T> load_part(const T* from, int left, bool vectors) {
  Raw<T> raw;
  if (vectors) {
    raw.words = load<Raw<T>::kWords>(reinterpret_cast<const unsigned*>(from));
  } else {
    Vector<T, kPerLane> v;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) v[i] = i < left ? from[i] : T{};
    memcpy(&raw, &v, sizeof raw);
  }
  return raw;
}
template <class T>
__device__ void store_part(T* to, int left, bool vectors, const Vector<T, kPerLane>& part) {
  if (vectors) return store(to, part);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (i < left) to[i] = part[i];
  }
}

/// Returns how many of this lane's eight elements lie before the end of the tensor; the result may be above
/// eight or negative. `count` is the number of elements from the start of the warp's block to the end of the
/// tensor.
__device__ inline int left_of(int64_t count) {
  return static_cast<int>(count < kernels::kStateBlock ? count : kernels::kStateBlock) - lane() * kPerLane;
}

}  // namespace shoestring::cuda
