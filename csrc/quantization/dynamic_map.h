#pragma once

// The dynamic 8-bit map of block-wise optimizers (Dettmers et al., arXiv 2110.02861). Each decade 10^e [0.1,
// 1], e = -6..0, holds equally spaced values, twice as many as the decade below. Number the magnitudes of the
// map in ascending order, and call this number the count. The position of the highest set bit of a count
// gives the decade, and inside a decade the value is an affine function of the count. Encoding and decoding
// therefore need no table of 256 values. The values equal those in bitsandbytes' maps except for the last
// bits of an fp32.
//
//   signed:    code 127 + k has the count |k|, k = -127..128. The decade of count 2^b + j has 2^b values.
//              Count 0 is zero and count 128 is 1.0; there is no -1.0.
//   unsigned:  code u - 1 has the count u = 1..256. The decade of count 2^b + j has 2^b values.
//              Count 1 is zero and count 256 is 1.0.

#include <cstdint>

namespace shoestring::kernels {

constexpr int64_t kStateBlock = 256;  // number of elements that share a quantisation scale

struct DynamicMap {
  // The value of a count (see the top of the file) is offset[i] + count * slope[i], rounded once. Here i is
  // the low three bits of the exponent field of count + bias as an fp32 number. The eighth entry serves both
  // zero and 1.0.
  float bias;
  float offset[8], slope[8];

  // the smallest and the largest count (see the top of the file), for the values zero and 1.0
  int lowest, highest;
  float value[257];  // the value that each count stands for, with a scale of one
  // middle[count] is the mean of the values that count and count + 1 stand for; magnitudes above this mean
  // round up
  float middle[257];

  // Constants for encoding a magnitude x. Segment 0 holds the magnitudes that round to zero; then the decades
  // follow in order. next[i] is the largest magnitude in segment i. For x in segment i, let q =
  // min(inverse_offset[i] + x * inverse_slope[i], limit[i]) / 65536. The count of x (see the top of the file)
  // is lowest + floor(q). If q is within kNear / 65536 of an integer, rounding may have changed floor(q), and
  // x must be compared with `middle` instead. This formula gives at most highest - 1; an x above
  // middle[highest - 1] has the count `highest`.
  float next[8], inverse_offset[8], inverse_slope[8], limit[8];
};

// Upper bound on the rounding error of inverse_offset[i] + x * inverse_slope[i], where 65536 units are one
// count (see the top of the file). inverse_offset already contains kNear.
constexpr int kNear = 4;

namespace detail {

constexpr double power_of_ten(int e) {
  double p = 1;
  for (int i = 0; i < e; ++i) p *= 10;
  return p;
}

/// Computes the map of 8-bit codes for signed or for non-negative values.
constexpr DynamicMap make_dynamic_map(bool is_signed) {
  DynamicMap map{};
  const int first = is_signed ? 0 : 1;  // position of the highest set bit in the counts of the lowest decade
  map.bias = is_signed ? 0.5f : 0.f;
  map.lowest = is_signed ? 0 : 1;
  map.highest = is_signed ? 128 : 256;
  for (int b = first; b < first + 7; ++b) {
    const double scale = 1 / power_of_ten(6 - (b - first)), bins = 1 << b;
    const float slope = static_cast<float>(scale * 0.9 / bins);
    // The offset is computed from the rounded slope, so that the smallest value of the decade is not affected
    // by the slope's rounding.
    map.slope[(127 + b) & 7] = slope;
    map.offset[(127 + b) & 7] = static_cast<float>(scale * (0.1 + 0.45 / bins) - slope * bins);
  }
  const int ends = is_signed ? 6 : 7;
  map.slope[ends] = static_cast<float>(is_signed ? 1 / 128. : 1 / 255.);
  map.offset[ends] = is_signed ? 0.f : -map.slope[ends];

  for (int k = map.lowest; k <= map.highest; ++k) {
    int b = -1;
    while ((k >> (b + 1)) > 0) ++b;
    const int i = k == map.lowest ? ends : (127 + b) & 7;
    map.value[k] =
        static_cast<float>(static_cast<double>(map.offset[i]) + static_cast<double>(map.slope[i]) * k);
  }
  for (int k = map.lowest; k < map.highest; ++k) map.middle[k] = (map.value[k] + map.value[k + 1]) * 0.5f;

  for (int i = 0; i < 8; ++i) {
    const int b = first + i - 1;
    // The unsigned map is for second moments, which must never round to zero. Small positive numbers take the
    // smallest positive code instead.
    if (i == 0) {
      map.next[0] = is_signed ? map.middle[0] : 0.f;
      map.inverse_offset[0] = is_signed ? 0.5f * 65536 : 1.5f * 65536;
      map.limit[0] = map.inverse_offset[0];
      continue;
    }
    const double scale = 1 / power_of_ten(7 - i), bins = 1 << b;
    map.next[i] = i < 7 ? map.middle[(1 << (b + 1)) - 1] : 2.f;
    map.inverse_slope[i] = static_cast<float>(65536 * bins / (0.9 * scale));
    map.inverse_offset[i] = static_cast<float>(65536 * (bins * (1 - 0.1 / 0.9) - map.lowest) + kNear);
    map.limit[i] = 65536.f * ((1 << (b + 1)) - 0.5f - map.lowest);
  }
  return map;
}

}  // namespace detail

inline constexpr DynamicMap kSignedMap = detail::make_dynamic_map(true);
inline constexpr DynamicMap kUnsignedMap = detail::make_dynamic_map(false);

static_assert(kSignedMap.value[0] == 0 && kSignedMap.value[128] == 1);
static_assert(kUnsignedMap.value[1] == 0 && kUnsignedMap.value[256] == 1);

}  // namespace shoestring::kernels
