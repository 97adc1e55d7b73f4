// Declares the operators of csrc/gemm. An operator whose name ends in _ changes an argument in place.

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // Computes self = beta * self + alpha * mat1 mat2 in place, accumulated in fp32. If mat1 and mat2 are
  // 16-bit, self may be fp32.
  m.def("addmm_(Tensor(a!) self, Tensor mat1, Tensor mat2, *, float beta=1., float alpha=1.) -> ()");
  // linear returns x W^T + bias + residual, in the dtype of x. With `dtype`, the operands are rounded to that
  // dtype, which is also the dtype of the result; x, W and the bias may then have other dtypes. A residual
  // has the shape of the result, and may widen its dtype. library: see shoestring/gemm/ops.h.
  m.def(
      R"(linear(Tensor x, Tensor weight, Tensor? bias=None, *, Tensor? residual=None, ScalarType? dtype=None,
      int library=0) -> Tensor)");
  // linear_group returns x W^T + bias for several layers that read the same x. biases is empty or has one
  // entry for each weight.
  m.def(R"(linear_group(Tensor x, Tensor[] weights, Tensor?[] biases, *, ScalarType? dtype=None,
      int library=0) -> Tensor[])");
  // Returns the gradients of x and of the weights of linear_group. output_mask selects them, x first; a
  // gradient that is not selected is empty. A gradient of an output may be missing; that of its weight is
  // then not selected. dtype is that of the products. x may be missing if no weight's gradient is selected,
  // and has the dtype of the products. x_dtype is the dtype of the gradient of x.
  m.def(R"(_linear_group_backward(Tensor?[] grad_outputs, Tensor? x, Tensor[] weights, ScalarType dtype,
      ScalarType x_dtype, int library, bool[] output_mask) -> Tensor[])");
  // The function dense_linear_group of shoestring/gemm/ops.h.
  m.def("_dense_linear_group(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor[]");
  // Returns whether linear_group computes trainable layers that read the same input faster on this CPU than
  // PyTorch's linear, and the seconds that a measurement took. dtype is that of the weights.
  m.def(R"(_linear_choice(ScalarType compute, ScalarType dtype, int in_features,
      int[] out_features) -> (bool, float))");
}
