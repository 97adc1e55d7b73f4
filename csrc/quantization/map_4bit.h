#pragma once

// The 4-bit format of optimizer state: two elements per byte, the lower nibble first, in blocks of 256.
//
//   signed (first moments), groups of 32 elements:
//     value = scale * (33^(k / 8) - 1) / 32, approximately, for k = 0..8, with signs.
//     The sign of the scale makes the largest magnitude k = -8. Nibbles are two's complement, -8..7, so no
//     code is lost to a second largest value. Zero is exact.
//   unsigned (second moments), groups of 128 elements:
//     value = scale * 2^(-13/16 k), approximately, for k = 0..15, which spans 12.2 octaves.
//     The value is never zero, because zero would make an update infinite.
//
// The formulas are approximate because the steps are equal in the bits of a float, read as an integer, which
// are a piecewise linear logarithm. Encoding is therefore arithmetic, without a search in a table. Each scale
// is an fp32, so a state takes 5 (signed) or 4.25 (unsigned) bits per element, and Adam's two states take
// 9.25.
//
// A second moment changes by about a thousandth per optimizer step, but neighbouring values of the format are
// almost a factor of two apart. Rounded to the nearest value, the second moment would never change. Rounding
// is therefore dithered: an element between two codes rounds up in a share of the optimizer's steps that
// equals its position between the codes. The threshold of the dither cycles through its range, which is more
// even than a random threshold. A first moment with a decay above 0.95 (Lion's) is dithered for the same
// reason. For a lower decay, rounding to the nearest has the smaller error, with a small bias towards zero: a
// value that is too large stays so for some steps.
//
// Error of the update relative to its mean square. For Adam the gradients are log-normal with the given
// sigma; "jump" has sigma 0.4 and measures only the 2 % of elements whose gradient grows fivefold.
//
//                                                                 sigma 0.4   sigma 1.0   jump
//   Adam, this format                                                   .14         .40    .07
//   Adam, this format, second moment to the nearest                     .15         .39   3.2
//   Adam, dynamic first and linear second moment, 4 bits, groups of 128 .31         .79   1.9
//   Adam, 8 bits                                                       .007         .06   .015
//   Lion with decay 0.99, this format                                   .59         .80
//   Lion with decay 0.99, this format, to the nearest                   .84         .96

#include <cstdint>

#include "core/host_device.h"
#include "quantization/dynamic_map.h"

namespace shoestring::kernels {

// number of elements that share a quantisation scale
constexpr int64_t kGroup4Signed = 32, kGroup4Unsigned = 128;
constexpr int64_t kBlockBytes4 = kStateBlock / 2;

template <bool kSigned>
constexpr int64_t kGroup4 = kSigned ? kGroup4Signed : kGroup4Unsigned;
// number of scales in a block of kStateBlock elements
template <bool kSigned>
constexpr int64_t kScales4 = kStateBlock / kGroup4<kSigned>;

// Constants of encoding 4-bit optimizer state, in units of a float's last bit. The bits of a float, read as
// an integer, serve as its logarithm. In the signed map, kBias4 is first added to the magnitude. Eight steps
// of the signed map lead from kBias4 to 33/32; a step of the unsigned map is 13/16 of an octave.
constexpr float kBias4 = 1.f / 32;
constexpr int32_t kBias4Bits = 0x3d000000, kOneBits = 0x3f800000;
constexpr int32_t kStep4Signed = 161 << 15, kStep4Unsigned = 104 << 16;
constexpr float kInverseStep4Signed = 1.f / kStep4Signed, kInverseStep4Unsigned = 1.f / kStep4Unsigned;

// Selects how 4-bit codes are rounded in one optimizer step: to the nearest, or dithered.
struct Rounding4 {
  bool dithered = false;  // if false, codes are rounded to the nearest value
  uint32_t phase = 0;     // a 16-bit number from which the dither of all elements is computed
};

/// Returns the dithered rounding for an optimizer step. The phase is step * 46073 modulo 65536. No simple
/// fraction approximates 46073 / 65536, so the phases of successive steps cover their range evenly. (Its
/// continued fraction has no term above 2.)
SHOESTRING_HOST_DEVICE constexpr Rounding4 dithered4(uint32_t step) {
  return {true, step * 46073u & 0xffffu};
}

// The dither of element i of a block is phase + i * kDitherStride as a signed 16-bit number, multiplied by
// kDither4Signed or kDither4Unsigned. The dither is in units of a float's last bit and covers plus or minus
// half a step between codes.
constexpr uint32_t kDitherStride = 25087;
constexpr int32_t kDither4Signed = 80, kDither4Unsigned = 104;

// Offsets for encoding, in units of a float's last bit. For signed values the offset is added to the float's
// bits. For unsigned values the float's bits are subtracted from the offset. The result is divided by the
// size of a step between codes.
SHOESTRING_HOST_DEVICE constexpr int32_t offset4_signed(bool dithered) {
  // Halfway between the bits of two neighbouring values, read as integers, lies a float below the mean of the
  // two values. Subtracting part of a step corrects this: with 0.04 steps, dithered rounding preserves the
  // mean.
  return -kBias4Bits - static_cast<int32_t>(kStep4Signed * (dithered ? 0.04 : 0.075));
}
SHOESTRING_HOST_DEVICE constexpr int32_t offset4_unsigned(bool dithered) {
  // The dither is increased by 1/2, because the mean of signed 16-bit numbers is -1/2.
  return kOneBits + (dithered ? kDither4Unsigned / 2 : 0);
}

// The value of each 4-bit code, for a scale of one.
struct Map4 {
  float value[16];
};
namespace detail {

// Returns 2^x, interpolated linearly between whole powers of two.
constexpr double piecewise_power(double x) {
  double power = 1;
  for (; x < 0; x += 1) power /= 2;
  for (; x >= 1; x -= 1) power *= 2;
  return power * (1 + x);
}

constexpr Map4 make_map4(bool is_signed) {
  Map4 map{};
  for (int code = 0; code < 16; ++code) {
    if (is_signed) {
      const int k = code < 8 ? code : 16 - code;
      const double magnitude = (piecewise_power(k * (kStep4Signed / 8388608.)) - 1) / 32;
      map.value[code] = static_cast<float>(code < 8 ? magnitude : -magnitude);
    } else {
      map.value[code] = static_cast<float>(piecewise_power(-code * (kStep4Unsigned / 8388608.)));
    }
  }
  return map;
}

}  // namespace detail

inline constexpr Map4 kSignedMap4 = detail::make_map4(true), kUnsignedMap4 = detail::make_map4(false);
static_assert(kSignedMap4.value[0] == 0 && kSignedMap4.value[8] == -1 && kUnsignedMap4.value[0] == 1);

// The largest value of the signed map, for a scale of one, that has the sign opposite to the scale's.
constexpr float kTop4Signed = kSignedMap4.value[7];

// The reciprocal of a scale below kTinyScale4 may overflow. The values and the scale of the group are then
// multiplied by kRaise4 first, which changes no code.
constexpr float kTinyScale4 = 0x1p-100f, kRaise4 = 0x1p100f;

}  // namespace shoestring::kernels
