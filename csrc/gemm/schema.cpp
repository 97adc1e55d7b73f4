// The schemas of the operators in csrc/gemm. An operator whose name ends in _ changes its arguments in place.

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // Computes self = beta self + alpha mat1 mat2, accumulated in fp32. self may be fp32 if the matrices have
  // 16 bits.
  m.def("addmm_(Tensor(a!) self, Tensor mat1, Tensor mat2, *, float beta=1., float alpha=1.) -> ()");
}
