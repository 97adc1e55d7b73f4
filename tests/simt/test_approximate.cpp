// Tests the errors that approximate functions have in the emulator.

#include <cmath>
#include <cstdint>
#include <cstdlib>

#include "catch2.h"
#include "cuda/core/math.h"
#include "simt.h"

using simt::Approximation;

namespace {

// The distance of two floats in units in the last place.
int64_t ulps(float a, float b) {
  return std::llabs(int64_t{__builtin_bit_cast(int32_t, a)} - __builtin_bit_cast(int32_t, b));
}

}  // namespace

TEST_CASE("approximate functions are wrong by at most their bound, and flush subnormal numbers") {
  namespace cuda = shoestring::cuda;
  for (Approximation mode : {Approximation::random, Approximation::up, Approximation::down}) {
    simt::set_approximation(mode);
    int wrong = 0;
    for (int i = 1; i < 2000; ++i) {
      const float x = static_cast<float>(i) * 0.0137f;
      const int64_t errors[] = {ulps(cuda::fast_reciprocal(x), 1 / x), ulps(cuda::fast_sqrt(x), std::sqrt(x)),
                                ulps(cuda::fast_exp2(-x), std::exp2(-x))};
      CHECK(errors[0] <= 1);
      CHECK(errors[1] <= 1);
      CHECK(errors[2] <= 2);
      CHECK(std::fabs(cuda::fast_log2(x) - std::log2(x)) <=
            0x1p-22f * std::fmax(1.f, std::fabs(std::log2(x))));
      for (int64_t error : errors) wrong += error > 0;
    }
    CHECK(wrong > 3000);
    CHECK(cuda::fast_exp2(0) == 1);
    CHECK(cuda::fast_exp2(-130) == 0);
    CHECK(cuda::fast_reciprocal(1e-40f) == INFINITY);
    CHECK(cuda::fast_sqrt(1e-40f) == 0);
    CHECK(cuda::fast_log2(1e-40f) == -INFINITY);
    CHECK(cuda::fast_exp2(-INFINITY) == 0);
  }
  simt::set_approximation(Approximation::exact);
  CHECK(cuda::fast_exp2(-130) == std::exp2(-130.f));
  CHECK(cuda::fast_reciprocal(3) == 1 / 3.f);
}
