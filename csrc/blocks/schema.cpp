// Declares the operators of csrc/blocks.

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // Returns gelu(x) W^T + bias. Saves x for backward, which computes gelu(x) again. dtype and library: as for
  // linear.
  m.def(R"(_gelu_linear(Tensor x, Tensor weight, Tensor? bias, str approximate, *, ScalarType? dtype=None,
      int library=0) -> Tensor)");
}
