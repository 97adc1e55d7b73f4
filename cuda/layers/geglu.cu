// gelu(gate) * up on CUDA, with the kernels of gated.h. gelu(x) is x times the distribution function of the
// normal distribution, or times the tanh approximation of that function. Both formulas avoid cancellation, so
// for very negative x the result is small but not 0.

#include "cuda/layers/gated.h"

namespace shoestring::cuda {
namespace {

// The tanh approximation of GELU is x (1 + tanh(u)) / 2. The code uses that (1 + tanh(u)) / 2 is the logistic
// function of 2 u.
struct GeluTanh {
  static constexpr float kTwice = 1.5957691216f, kCube = 0.044715f;  // kTwice is 2 sqrt(2 / pi)
  float x;
  Logistic s;
  explicit __device__ GeluTanh(float x) : x(x), s(kTwice * (x + kCube * x * x * x)) {}
  __device__ float of() const { return x * s.of; }
  __device__ float slope() const {
    // If x is so large that x * x is infinite, `rest`, the derivative of the logistic function, is 0. The
    // product of the two would be NaN, so it is left out.
    const float rest = s.of * s.of_negative;
    return s.of + (rest > 0 ? x * rest * (kTwice * (1 + 3 * kCube * x * x)) : 0);
  }
};

struct GeluErf {
  float x, below;  // `below` is the distribution function of the normal distribution at x
  explicit __device__ GeluErf(float x) : x(x), below(0.5f * erfcf(-0.7071067812f * x)) {}
  __device__ float of() const { return x * below; }
  __device__ float slope() const {
    const float density = 0.3989422804f * expf(-0.5f * x * x);
    return below + (density > 0 ? x * density : 0);
  }
};

const kernels::GatedCuda kTanh = gated_table<GeluTanh>(), kErf = gated_table<GeluErf>();
const bool kProvided = (provide("geglu_tanh", &kTanh), provide("geglu_erf", &kErf), true);

}  // namespace
}  // namespace shoestring::cuda
