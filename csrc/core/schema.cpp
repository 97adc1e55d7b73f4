// The schemas of this room's operators. An operator whose name ends in _ changes its arguments in place.

#include <torch/library.h>

TORCH_LIBRARY(shoestring, m) {
  // Which build of the CPU kernels runs: plain, avx2 or avx512; and a switch for tests (false: not supported
  // here).
  m.def("cpu_capability() -> str");
  m.def("set_cpu_capability(str name) -> bool");
  // x *= factor (one element), where the factor is not 1: on CUDA the device finds out. What scales saved
  // gradients.
  m.def("scale_(Tensor(a!) x, Tensor factor) -> ()");
}
