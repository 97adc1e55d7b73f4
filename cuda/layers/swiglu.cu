// silu(gate) * up on CUDA, with the kernels of gated.h. silu(x) is x times the logistic function.

#include "cuda/layers/gated.h"

namespace shoestring::cuda {
namespace {

struct Silu {
  float x;
  Logistic s;
  explicit __device__ Silu(float x) : x(x), s(x) {}
  __device__ float of() const { return x * s.of; }
  __device__ float slope() const { return s.of + x * s.of * s.of_negative; }
};

const kernels::GatedCuda kTable = gated_table<Silu>();
const bool kProvided = (provide("swiglu", &kTable), true);

}  // namespace
}  // namespace shoestring::cuda
