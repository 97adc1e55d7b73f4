// Declares the operators of csrc/gemm. An operator whose name ends in _ changes an argument in place.

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // Computes self = beta * self + alpha * mat1 mat2 in place, accumulated in fp32. If mat1 and mat2 are
  // 16-bit, self may be fp32.
  m.def("addmm_(Tensor(a!) self, Tensor mat1, Tensor mat2, *, float beta=1., float alpha=1.) -> ()");
}
