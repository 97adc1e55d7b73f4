// The errors of approximate functions. A GPU's fast functions take subnormal numbers as zero, return zero
// instead of subnormal numbers, and are wrong by up to their bound. Which results are wrong is not
// documented, so the error here is a function of the argument, or always the same.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "internal.h"

namespace simt {
namespace {

bool parse(const char* text, Approximation& mode) {
  const char* const names[] = {"exact", "random", "up", "down"};
  for (int i = 0; i < 4; ++i) {
    if (std::strcmp(text, names[i]) == 0) return mode = static_cast<Approximation>(i), true;
  }
  return false;
}

Approximation approximation = [] {
  Approximation mode = Approximation::exact;
  const char* text = std::getenv("SIMT_APPROXIMATE");
  if (text != nullptr && !parse(text, mode)) {
    std::fprintf(stderr, "SIMT_APPROXIMATE: expected exact, random, up or down, received %s\n", text);
    std::exit(2);
  }
  return mode;
}();

constexpr float kSmallest = 0x1p-126f;  // the smallest normal number
float flushed(float x) { return std::fabs(x) < kSmallest ? std::copysign(0.f, x) : x; }

}  // namespace

void set_approximation(Approximation mode) { approximation = mode; }

float argument_of(float x) { return approximation == Approximation::exact ? x : flushed(x); }

float approximate(float result, float argument, int ulps, float least) {
  if (approximation == Approximation::exact) return result;
  result = flushed(result);
  if (result == 0 || argument == 0 || !std::isfinite(result)) return result;
  int error = approximation == Approximation::down ? -ulps : ulps;
  if (approximation == Approximation::random) {
    uint32_t bits;
    std::memcpy(&bits, &argument, sizeof bits);
    bits = (bits ^ bits >> 16) * 0x7feb352du;
    bits = (bits ^ bits >> 15) * 0x846ca68bu;
    error = static_cast<int>((bits ^ bits >> 16) % (2 * ulps + 1)) - ulps;
  }
  const float ulp = std::nextafter(std::fabs(result), INFINITY) - std::fabs(result);
  const float wrong = static_cast<float>(result + error * static_cast<double>(std::fmax(ulp, least)));
  return std::isfinite(wrong) ? flushed(wrong) : result;
}

}  // namespace simt
