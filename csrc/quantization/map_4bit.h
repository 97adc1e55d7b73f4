#pragma once

// 4-bit codes of optimizer state, of a format of our own: two elements a byte, the lower nibble first, blocks
// of 256.
//
//   signed (first moments)     groups of 32.  value = scale * (33^(k / 8) - 1) / 32, nearly, for k = 0..8,
//   with signs.
//                              The scale has the sign that makes the largest magnitude k = -8: nibbles are
//                              two's complement, -8..7, and no step is lost to a second end. Zero is zero.
//   unsigned (second moments)  groups of 128. value = scale * 2^(-13/16 k), nearly, for k = 0..15: 12.2
//   octaves, and
//                              never zero, which would make an update infinite.
//
// "Nearly": the bits of a float are a piecewise linear logarithm, and steps are equal in those. Neither way
// needs a table or a search. A scale is an fp32: 5 and 4.25 bits an element, 9.25 for Adam's two.
//
// A second moment moves by a thousandth of itself a step, where a step of the map is half of it: to the
// nearest it would stay where it is for ever. So it is dithered: an element between two codes rounds up in as
// many of the optimizer's steps as its place between them says, by a threshold that goes round, more evenly
// than a random one. The same is needed by a first moment with a decay above 0.95 (Lion's). Below, to the
// nearest has the smaller error, if a little towards zero: what is too large stays so for some steps. Error
// of the update, as a part of its mean square:
//
//   Adam, log-normal gradients of sigma                            0.4     1.0   0.4: of the 2 % that grow
//   fivefold this format                                                    .14     .40   .07 this format,
//   second moment to the nearest                      .15     .39   3.2 dynamic first, linear second moment,
//   4 bits, groups of 128     .31     .79   1.9 8 bits .007    .06   .015 Lion, decay 0.99: this format .59
//   .80 Lion, decay 0.99: this format, to the nearest                  .84     .96

#include <cstdint>

#include "core/host_device.h"
#include "quantization/dynamic_map.h"

namespace shoestring::kernels {

constexpr int64_t kGroup4Signed = 32, kGroup4Unsigned = 128;  // elements that share a scale
constexpr int64_t kBlockBytes4 = kStateBlock / 2;

template <bool kSigned>
constexpr int64_t kGroup4 = kSigned ? kGroup4Signed : kGroup4Unsigned;
template <bool kSigned>
constexpr int64_t kScales4 = kStateBlock / kGroup4<kSigned>;  // a block

// All in units of a float's last bit. Signed magnitudes are measured from kBias4, at which their logarithm
// begins.
constexpr float kBias4 = 1.f / 32;
constexpr int32_t kBias4Bits = 0x3d000000, kOneBits = 0x3f800000;
constexpr int32_t kStep4Signed = 161 << 15,
                  kStep4Unsigned = 104 << 16;  // (33 / 32 - kBias4) is eight steps; 13 / 16
constexpr float kInverseStep4Signed = 1.f / kStep4Signed, kInverseStep4Unsigned = 1.f / kStep4Unsigned;

// How the codes of a step are rounded.
struct Rounding4 {
  bool dithered = false;  // else to the nearest
  uint32_t phase = 0;     // 16 bits
};

/// Of an optimizer's step by its number. The phase goes round in strides that no fraction comes close to:
/// every stretch of steps has its share of every phase. (The continued fraction of 46073 / 65536 has no term
/// above 2.)
SHOESTRING_HOST_DEVICE constexpr Rounding4 dithered4(uint32_t step) {
  return {true, step * 46073u & 0xffffu};
}

// The dither of element i of a block is the signed 16-bit number phase + i * kDitherStride, times kDither4
// last bits: plus or minus half a step.
constexpr uint32_t kDitherStride = 25087;
constexpr int32_t kDither4Signed = 80, kDither4Unsigned = 104;

// What is added to a float's bits, signed, or what these are taken from, unsigned, before the division into
// steps.
SHOESTRING_HOST_DEVICE constexpr int32_t offset4_signed(bool dithered) {
  // Steps are shorter at their lower ends, so half way is 0.04 of a step too low for the mean to be kept.
  return -kBias4Bits - static_cast<int32_t>(kStep4Signed * (dithered ? 0.04 : 0.075));
}
SHOESTRING_HOST_DEVICE constexpr int32_t offset4_unsigned(bool dithered) {
  return kOneBits + (dithered ? kDither4Unsigned / 2 : 0);  // 16-bit numbers have their middle at -1/2
}

// Values by code, for a scale of one.
struct Map4 {
  float value[16];
};
namespace detail {

// 2^x, but linear between the powers of two.
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

constexpr float kTop4Signed = kSignedMap4.value[7];  // of the sign that the largest magnitude has not

// Scales below it have reciprocals that may overflow: values and scale are multiplied by 2^100 first, which
// changes no code.
constexpr float kTinyScale4 = 0x1p-100f, kRaise4 = 0x1p100f;

}  // namespace shoestring::kernels
