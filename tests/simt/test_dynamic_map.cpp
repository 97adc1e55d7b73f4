// Tests the encoder of 8-bit codes (cuda/quantization/dynamic_map.h) as a function of the host, for every
// mantissa that a block's scale can have and every error that approximate functions may have.

#include <cmath>
#include <cstdint>
#include <vector>

#include "catch2.h"
#include "cuda/quantization/dynamic_map.h"

using namespace shoestring;
using simt::Approximation;

namespace {

constexpr uint32_t kMantissas = 1u << 23;

float from_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
float with_mantissa(uint32_t mantissa) { return from_bits(127u << 23 | mantissa); }

// Restores exact functions at the end of a test.
struct Mode {
  explicit Mode(Approximation mode) { simt::set_approximation(mode); }
  ~Mode() { simt::set_approximation(Approximation::exact); }
};

template <bool kSigned>
struct Encoder {
  const kernels::DynamicMap& map = kSigned ? kernels::kSignedMap : kernels::kUnsignedMap;
  cuda::SharedMap shared{};
  cuda::MapConstants constants = cuda::make_constants(kSigned);

  Encoder() {
    for (int code = 0; code < 256; ++code) {
      const int count = kSigned ? std::abs(code - 127) : code + 1;
      shared.value[code] = kSigned && code < 127 ? -map.value[count] : map.value[count];
    }
    for (int i = 0; i < 8; ++i) shared.line[i] = {constants.slope[i], constants.offset[i]};
  }

  // Returns whether the code stands for the value of the map that is nearest to x / scale.
  bool right(int code, float x, float inverse) const {
    const float scaled = x * inverse, magnitude = std::fabs(scaled);
    if (!kSigned && magnitude == 0) return code == 0;
    const int count = kSigned ? std::abs(code - 127) : code + 1;
    // In the unsigned map, only zero has the code of zero. The signed map has no -1.0.
    const int lowest = kSigned ? 0 : 2, highest = kSigned && scaled < 0 ? 127 : map.highest;
    if (kSigned && count > 0 && (code < 127) != (scaled < 0)) return false;
    return count >= lowest && (count == lowest || magnitude > map.middle[count - 1]) &&
           (count == highest || magnitude <= map.middle[count]);
  }

  // Returns the number of wrong codes among elements beside the boundaries `first`, first + 1, ... of the
  // map, in a block with this scale.
  int wrong(float scale, int first) const {
    float x[8];
    for (int i = 0; i < 8; ++i) {
      const int boundary = map.lowest + (first + i / 4) % (map.highest - map.lowest);
      const float at = std::fmin(map.middle[boundary] * scale, scale);
      x[i] = from_bits(bits_of(at) + static_cast<uint32_t>(i % 4) - 2);
      if (kSigned && i % 2 == 1) x[i] = -x[i];
    }
    float encoded[8];
    std::copy(x, x + 8, encoded);
    const uint2 codes = cuda::encode<kSigned>(encoded, scale, shared, constants.bend);
    const float inverse = 1 / scale;
    int found = 0;
    for (int i = 0; i < 8; ++i)
      found += !right((i < 4 ? codes.x : codes.y) >> (i % 4 * 8) & 0xff, x[i], inverse);
    return found;
  }
};

template <bool kSigned>
int wrong_codes(uint32_t step) {
  const Encoder<kSigned> encoder;
  int found = 0;
  for (uint32_t m = 0; m < kMantissas; m += step)
    found += encoder.wrong(with_mantissa(m), static_cast<int>(m / step));
  return found;
}

}  // namespace

TEST_CASE("a reciprocal is correctly rounded from every start within a unit in the last place") {
  int newton = 0, wrong = 0;
  for (uint32_t m = 0; m < kMantissas; ++m) {
    const float x = with_mantissa(m), exact = 1 / x;
    for (int error : {-1, 0, 1}) {
      const float near = from_bits(bits_of(exact) + static_cast<uint32_t>(error));
      newton += std::fma(near, -std::fma(near, x, -1.f), near) != exact;
      wrong += cuda::round_reciprocal(x, near) != exact;
    }
  }
  CHECK(newton == 33);  // a Newton step alone is not enough: from below for 1 mantissa, from above for 32
  CHECK(wrong == 0);
  // Powers of two scale every step, and negative zero does not occur.
  for (float scale : {0x1p-100f, 0x1p-7f, 0x1p99f}) {
    for (uint32_t m : {0u, 1u, 0x069913u, kMantissas - 1}) {
      const float x = with_mantissa(m) * scale;
      CHECK(cuda::round_reciprocal(x, from_bits(bits_of(1 / x) + 1)) == 1 / x);
      CHECK(cuda::round_reciprocal(x, from_bits(bits_of(1 / x) - 1)) == 1 / x);
    }
  }
}

TEST_CASE("codes beside every boundary are right for every mantissa of the scale") {
  const Mode mode(Approximation::down);
  CHECK(wrong_codes<true>(1) == 0);
  CHECK(wrong_codes<false>(1) == 0);
}

TEST_CASE("codes beside boundaries are right whatever the error of approximate functions") {
  for (Approximation error : {Approximation::exact, Approximation::random, Approximation::up}) {
    INFO("mode " << static_cast<int>(error));
    const Mode mode(error);
    CHECK(wrong_codes<true>(61) == 0);
    CHECK(wrong_codes<false>(61) == 0);
    // the mantissas for which a Newton step from one unit above is wrong
    const Encoder<true> with_sign;
    const Encoder<false> without;
    for (uint32_t m = 0; m < kMantissas; ++m) {
      const float x = with_mantissa(m), exact = 1 / x, near = from_bits(bits_of(exact) + 1);
      if (std::fma(near, -std::fma(near, x, -1.f), near) == exact && m != kMantissas - 1) continue;
      for (int boundary = 0; boundary < 256; ++boundary) {
        CHECK(with_sign.wrong(x, boundary) == 0);
        CHECK(without.wrong(x, boundary) == 0);
      }
    }
  }
}
