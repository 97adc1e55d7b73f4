// The schemas of the operators in csrc/core. An operator whose name ends in _ changes its arguments in place.

#include <torch/library.h>

TORCH_LIBRARY(shoestring, m) {
  // Returns the build of the CPU kernels in use (plain, avx2 or avx512), or selects another one for tests.
  // The latter returns false if this machine does not support it.
  m.def("cpu_capability() -> str");
  m.def("set_cpu_capability(str name) -> bool");
  // Computes x *= factor (one element) unless the factor is 1; on CUDA the device tests for 1. Backward
  // passes scale saved gradients with it.
  m.def("scale_(Tensor(a!) x, Tensor factor) -> ()");
}
