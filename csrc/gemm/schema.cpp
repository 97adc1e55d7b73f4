// The schemas of this room's operators. An operator whose name ends in _ changes its arguments in place.

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // self = beta self + alpha mat1 mat2, summed in fp32, which self may be for 16-bit matrices.
  m.def("addmm_(Tensor(a!) self, Tensor mat1, Tensor mat2, *, float beta=1., float alpha=1.) -> ()");
}
